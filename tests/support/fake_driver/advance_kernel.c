#include <stdint.h>

/* The kernel `advance` of examples/serving_c and serving_rust, with its parameters: lengths, slots, table, page_size, max_pages. */
void fake_driver_run_ptx(unsigned threads, const unsigned long long *parameters) {
    int32_t *lengths = (int32_t *)(uintptr_t)parameters[0], *table = (int32_t *)(uintptr_t)parameters[2];
    int64_t *slots = (int64_t *)(uintptr_t)parameters[1];
    const int32_t page = (int32_t)parameters[3], most = (int32_t)parameters[4];
    for (unsigned b = 0; b < threads; b++) {
        const int32_t length = lengths[b];
        slots[b] = length ? (int64_t)table[(int32_t)b * most + length / page] * page + length % page : -1;
        lengths[b] += length != 0;
    }
}
