// Runs forward and backward of a causal bfloat16 bundle and checks them against loops in double precision, without
// Python and without the CUDA runtime.
//
//   cutlass-py-attn export --problem bf16_d128_s512_b2_h4_causal --arch sm_80,sm_90a -o bundle
//   g++ -std=c++17 -O2 -I bundle -I <folder of cuda.h> main.cpp -l:libcuda.so.1 -o cpp_host
//   ./cpp_host bundle [batch queries keys heads]        sizes may differ from the exported ones
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

using Doubles = std::vector<double>;

static void expect(int code, const char *error) {
    if (code == 0) return;
    std::fprintf(stderr, "%s\n", error);
    std::exit(2);
}
#define CU(call) expect(call, #call " failed")

static uint16_t to_bf16(double value) {  // to nearest, ties to even
    float narrow = (float)value;
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static double from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr address = 0;
    if (bytes) CU(cuMemAlloc(&address, bytes));
    return address;
}
static CUdeviceptr random_array(Doubles &values, size_t count, std::mt19937 &random) {
    std::normal_distribution<double> normal;
    std::vector<uint16_t> halves(count);
    for (uint16_t &half : halves) half = to_bf16(normal(random));
    for (uint16_t half : halves) values.push_back(from_bf16(half));
    CUdeviceptr address = allocate(2 * count);
    CU(cuMemcpyHtoD(address, halves.data(), 2 * count));
    return address;
}
static bool close(const char *name, CUdeviceptr address, const Doubles &wanted) {
    std::vector<uint16_t> found(wanted.size());
    CU(cuMemcpyDtoH(found.data(), address, 2 * found.size()));
    double worst = 0, largest = 0;
    for (size_t i = 0; i < found.size(); i++) {
        double error = std::fabs(from_bf16(found[i]) - wanted[i]);
        worst = error <= worst ? worst : error;  // keeps a NaN
        largest = std::fmax(largest, std::fabs(wanted[i]));
    }
    bool good = worst <= 0.01 * std::fmax(largest, 1);  // rounding of bfloat16 sums of that magnitude
    std::printf("%-10s %9zu elements, largest %8.4f, worst error %.6f: %s\n", name, found.size(), largest, worst,
                good ? "ok" : "WRONG");
    return good;
}

int main(int argc, char **argv) {
    expect(argc == 2 || argc == 6 ? 0 : 1, "usage: cpp_host BUNDLE [batch queries keys heads]");
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CU(cuInit(0));
    CU(cuDeviceGet(&device, 0));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));

    attention_bundle bundle;
    expect(attention_open(&bundle, argv[1], device), bundle.error);
    attention_forward_call f;
    attention_backward_call g;
    attention_forward_init(&f);
    attention_backward_init(&g);
    const int64_t D = ATTENTION_FORWARD_HEAD_DIM, V = ATTENTION_FORWARD_HEAD_DIM_VALUE;
    const int64_t group = f.num_heads / f.num_heads_key;
    if (argc == 6) {
        f.batch = std::atoll(argv[2]), f.num_queries = std::atoll(argv[3]), f.num_keys = std::atoll(argv[4]);
        f.num_heads = std::atoll(argv[5]), f.num_heads_key = f.num_heads / group;
    }
    g.batch = f.batch, g.num_queries = f.num_queries, g.num_keys = f.num_keys;
    g.num_heads = f.num_heads, g.num_heads_key = f.num_heads_key;
    attention_forward_contiguous(&f);
    attention_backward_contiguous(&g);

    const int64_t B = f.batch, M = f.num_queries, N = f.num_keys, H = f.num_heads, K = f.num_heads_key;
    std::mt19937 random(0);
    Doubles q, k, v, dout;
    f.query = g.query = random_array(q, B * M * H * D, random);
    f.key = g.key = random_array(k, B * N * K * D, random);
    f.value = g.value = random_array(v, B * N * K * V, random);
    g.grad_output = random_array(dout, B * M * H * V, random);
    f.output = g.output = allocate(2 * B * M * H * V);
    f.logsumexp = g.logsumexp = allocate(4 * B * H * ((M + 31) / 32 * 32));
    g.grad_query = allocate(2 * q.size()), g.grad_key = allocate(2 * k.size()), g.grad_value = allocate(2 * v.size());
    int64_t bytes = 0;
    expect(attention_forward_workspace(&bundle, &f, &bytes), bundle.error);
    expect(attention_forward(&bundle, &f, allocate(bytes), stream), bundle.error);
    expect(attention_backward_workspace(&bundle, &g, &bytes), bundle.error);
    expect(attention_backward(&bundle, &g, allocate(bytes), stream), bundle.error);
    CU(cuStreamSynchronize(stream));

    Doubles out(B * M * H * V), dq(q.size()), dk(k.size()), dv(v.size()), p(N), dp(N);
    auto dot = [](const double *a, const double *b, int64_t n) { return std::inner_product(a, a + n, b, 0.0); };
    auto add = [](double *a, double s, const double *b, int64_t n) {
        for (int64_t i = 0; i < n; i++) a[i] += s * b[i];
    };
    for (int64_t b = 0; b < B; b++) for (int64_t h = 0; h < H; h++) for (int64_t i = 0; i < M; i++) {
        const int64_t row = (b * M + i) * H + h, first = b * N * K + h / group;
        const int64_t last = i + (f.bottom_right ? N - M : 0) + f.window_right;  // last key visible to this query
        const int64_t end = std::min(N, std::max<int64_t>(0, last + 1));
        double sum = 0, delta = 0;
        for (int64_t j = 0; j < end; j++)
            sum += p[j] = std::exp(f.scale * dot(&q[row * D], &k[(first + j * K) * D], D));
        for (int64_t j = 0; j < end; j++) add(&out[row * V], p[j] /= sum, &v[(first + j * K) * V], V);
        for (int64_t j = 0; j < end; j++)
            delta += p[j] * (dp[j] = dot(&dout[row * V], &v[(first + j * K) * V], V));
        for (int64_t j = 0; j < end; j++) {
            const double ds = f.scale * p[j] * (dp[j] - delta);
            add(&dv[(first + j * K) * V], p[j], &dout[row * V], V);
            add(&dk[(first + j * K) * D], ds, &q[row * D], D);
            add(&dq[row * D], ds, &k[(first + j * K) * D], D);
        }
    }
    std::printf("batch %lld, %lld queries, %lld keys, %lld heads of %lld, %s for compute capability %d.%d\n",
                (long long)B, (long long)M, (long long)N, (long long)H, (long long)D,
                attention_forward_targets[bundle.targets[0]].arch, bundle.major, bundle.minor);
    bool good = close("output", f.output, out) & close("grad_query", g.grad_query, dq) &
                close("grad_key", g.grad_key, dk) & close("grad_value", g.grad_value, dv);
    std::puts(good ? "passed" : "FAILED");
    return good ? 0 : 1;
}
