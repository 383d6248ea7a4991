/* Kernels that compute, for programs on the fake driver: attention to pages and to dense keys, its backward, appends and
   merges in plain loops over host memory. Each reads the struct that the real kernel would get; "fields.h", which a test writes, says where its fields
   are. Linked into a program with -rdynamic, the file gives the driver the function that runs a launch. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fields.h" /* static const struct { const char *kernel, *name; int offset; char type; } fields[] */

typedef struct { const char *symbol; const unsigned char *bytes; } Params;

/* Returns a field; 0 for one that the kernel does not have. */
static double number(const Params *p, const char *name) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (strncmp(fields[i].kernel, p->symbol, strlen(fields[i].kernel)) || strcmp(fields[i].name, name)) continue;
        int32_t narrow;
        float factor;
        memcpy(&narrow, p->bytes + fields[i].offset, 4);
        memcpy(&factor, p->bytes + fields[i].offset, 4);
        return fields[i].type == 'f' ? (double)factor : (double)narrow;
    }
    return 0;
}
static int64_t wide(const Params *p, const char *name) {
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (strncmp(fields[i].kernel, p->symbol, strlen(fields[i].kernel)) || strcmp(fields[i].name, name)) continue;
        int64_t found = 0;
        memcpy(&found, p->bytes + fields[i].offset, 8);
        return fields[i].type == 'l' ? found : (int64_t)number(p, name);
    }
    return 0;
}
static void *address(const Params *p, const char *name) { return (void *)(uintptr_t)wide(p, name); }

typedef struct { uint16_t *start; int64_t outer, row, head; } Array; /* bfloat16 */
static Array array(const Params *p, const char *name, const char *outer) {
    char text[64];
    Array found;
    found.start = address(p, name);
    snprintf(text, sizeof text, "%s_%s", name, outer), found.outer = wide(p, text);
    snprintf(text, sizeof text, "%s_row", name), found.row = wide(p, text);
    snprintf(text, sizeof text, "%s_head", name), found.head = wide(p, text);
    return found;
}
static uint16_t *at(const Array *a, int64_t outer, int64_t row, int64_t head) {
    return a->start + outer * a->outer + row * a->row + head * a->head;
}
static float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
static uint16_t to_bf16(double value) {
    const float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

enum { D = 128 };
static int64_t padded(int64_t rows) { return (rows + 31) / 32 * 32; }

/* The keys that query `i` of `rows` sees, of `length`: the first ones, up to its diagonal. */
static int64_t visible(const Params *p, int64_t i, int64_t rows, int64_t length) {
    const int64_t last = i + wide(p, "window_right") + (wide(p, "bottom_right") ? length - rows : 0);
    return last < length - 1 ? (last < -1 ? 0 : last + 1) : length;
}
static double dot(const uint16_t *a, const uint16_t *b) {
    double sum = 0;
    for (int c = 0; c < D; c++) sum += (double)from_bf16(a[c]) * from_bf16(b[c]);
    return sum;
}
static void attend(const Params *p) {
    const Array query = array(p, "query", "batch"), output = array(p, "output", "batch");
    const int is_paged = address(p, "page_table") != NULL;
    const char *outer = is_paged ? "page" : "batch";
    const Array key = array(p, "key", outer), value = array(p, "value", outer);
    const int32_t *lengths = address(p, "seqused_k"), *starts = address(p, "cu_seqlens_q"), *table = address(p, "page_table");
    const int64_t queries = wide(p, "num_queries"), heads = wide(p, "num_heads"), group = wide(p, "group"), page = wide(p, "page_size");
    const int64_t most = wide(p, "num_keys");
    float *logsumexp = address(p, "logsumexp");
    double *weights = calloc((size_t)most + 1, sizeof *weights);
    for (int64_t b = 0; b < wide(p, "batch"); b++) for (int64_t h = 0; h < heads; h++) {
        const int64_t rows = starts ? starts[b + 1] - starts[b] : queries, first = starts ? starts[b] : 0;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t count = visible(p, i, rows, lengths ? lengths[b] : most);
            const uint16_t *q = at(&query, starts ? 0 : b, first + i, h);
            double sum = 0, sums[D] = {0};
            for (int64_t j = 0; j < count; j++) {
                const int64_t place = is_paged ? table[b * wide(p, "page_table_row") + j / page] : b, row = is_paged ? j % page : j;
                const uint16_t *k = at(&key, place, row, h / group), *v = at(&value, place, row, h / group);
                const double weight = exp(number(p, "scale") * dot(q, k));
                sum += weight;
                for (int c = 0; c < D; c++) sums[c] += weight * from_bf16(v[c]);
            }
            for (int c = 0; c < D; c++) at(&output, starts ? 0 : b, first + i, h)[c] = to_bf16(count > 0 ? sums[c] / sum : 0);
            logsumexp[(b * heads + h) * padded(queries) + i] = count > 0 ? (float)log(sum) : -INFINITY;
        }
    }
    free(weights);
}
static void differentiate(const Params *p) {
    const Array query = array(p, "query", "batch"), key = array(p, "key", "batch"), value = array(p, "value", "batch");
    const Array output = array(p, "output", "batch"), grad_output = array(p, "grad_output", "batch");
    const Array grads[] = {array(p, "grad_query", "batch"), array(p, "grad_key", "batch"), array(p, "grad_value", "batch")};
    const int64_t queries = wide(p, "num_queries"), keys = wide(p, "num_keys"), heads = wide(p, "num_heads"), group = wide(p, "group");
    const float *logsumexp = address(p, "logsumexp");
    const size_t of_key = (size_t)(keys * D);
    for (int64_t b = 0; b < wide(p, "batch"); b++) for (int64_t of_group = 0; of_group < heads / group; of_group++) {
        double *grad_key = calloc(2 * of_key, sizeof *grad_key), *grad_value = grad_key + of_key;
        for (int64_t h = of_group * group; h < (of_group + 1) * group; h++) for (int64_t i = 0; i < queries; i++) {
            const uint16_t *q = at(&query, b, i, h), *g = at(&grad_output, b, i, h);
            const double delta = dot(g, at(&output, b, i, h));
            double grad_query[D] = {0};
            for (int64_t j = 0; j < visible(p, i, queries, keys); j++) {
                const uint16_t *k = at(&key, b, j, of_group), *v = at(&value, b, j, of_group);
                const double weight = exp(number(p, "scale") * dot(q, k) - logsumexp[(b * heads + h) * padded(queries) + i]);
                const double grad = number(p, "scale") * weight * (dot(g, v) - delta);
                for (int c = 0; c < D; c++) {
                    grad_query[c] += grad * from_bf16(k[c]);
                    grad_key[j * D + c] += grad * from_bf16(q[c]);
                    grad_value[j * D + c] += weight * from_bf16(g[c]);
                }
            }
            for (int c = 0; c < D; c++) at(&grads[0], b, i, h)[c] = to_bf16(grad_query[c]);
        }
        for (int64_t j = 0; j < keys; j++) for (int c = 0; c < D; c++) {
            at(&grads[1], b, j, of_group)[c] = to_bf16(grad_key[j * D + c]);
            at(&grads[2], b, j, of_group)[c] = to_bf16(grad_value[j * D + c]);
        }
        free(grad_key);
    }
}
static void append(const Params *p) {
    const Array pools[] = {array(p, "key_cache", "page"), array(p, "value_cache", "page")};
    const Array given[] = {array(p, "key", "row"), array(p, "value", "row")};
    const int64_t *slots = address(p, "slots"), heads = wide(p, "num_heads_key"), page = wide(p, "page_size");
    for (int64_t i = 0; i < wide(p, "num_rows"); i++) {
        const int64_t slot = slots[i / heads];
        for (int n = 0; n < 2 && slot >= 0 && slot < wide(p, "num_slots"); n++)
            memcpy(at(&pools[n], slot / page, slot % page, i % heads), at(&given[n], 0, i / heads, i % heads), 2 * D);
    }
}
static void merge(const Params *p) {
    const Array a = array(p, "output_a", "batch"), b = array(p, "output_b", "batch"), output = array(p, "output", "batch");
    const float *lse_a = address(p, "logsumexp_a"), *lse_b = address(p, "logsumexp_b");
    const int64_t queries = wide(p, "num_queries"), heads = wide(p, "num_heads");
    float *logsumexp = address(p, "logsumexp");
    for (int64_t n = 0; n < wide(p, "num_rows"); n++) {
        const int64_t head = n % heads, query = n / heads % queries, batch = n / heads / queries;
        const int64_t place = (batch * heads + head) * padded(queries) + query;
        const double weight_a = exp(lse_a[place]), weight_b = exp(lse_b[place]), sum = weight_a + weight_b;
        logsumexp[place] = (float)log(sum);
        for (int c = 0; c < D; c++) {
            const double one = weight_a > 0 ? weight_a * from_bf16(at(&a, batch, query, head)[c]) : 0;
            const double other = weight_b > 0 ? weight_b * from_bf16(at(&b, batch, query, head)[c]) : 0;
            at(&output, batch, query, head)[c] = to_bf16(sum > 0 ? (one + other) / sum : 0);
        }
    }
}
/* Runs a launch. parameters: `maps` tensor maps of 128 bytes each, then the struct. */
void fake_driver_run(const char *symbol, const unsigned char *parameters, int maps) {
    const Params p = {symbol, parameters + 128 * maps};
    if (strstr(symbol, "_combine_") || strstr(symbol, "_delta_") || strstr(symbol, "_finish_")) return; /* another entry does everything */
    if (!strncmp(symbol, "append_", 7)) append(&p);
    else if (!strncmp(symbol, "merge_", 6)) merge(&p);
    else if (!strncmp(symbol, "bwd_", 4)) differentiate(&p);
    else attend(&p);
}
