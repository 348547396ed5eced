// The memory traffic of a bf16 update and nothing else: the same bytes are read and written, with one cheap operation
// each. What this takes is the least that any update of this layout can take on this machine's memory.

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
static void move(uint16_t* __restrict weight, const uint16_t* __restrict grad, uint16_t* __restrict low,
                 uint32_t* __restrict exp_avg, uint32_t* __restrict exp_avg_sq, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const uint16_t g = grad[i];
    weight[i] ^= g;
    low[i] ^= g;
    exp_avg[i] ^= g;
    exp_avg_sq[i] ^= g;
  }
}

extern "C" void traffic(uint16_t* weight, const uint16_t* grad, uint16_t* low, uint32_t* exp_avg, uint32_t* exp_avg_sq,
                        int64_t n, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int32_t part = 0; part < threads; ++part)
    move(weight, grad, low, exp_avg, exp_avg_sq, n / threads * part, part + 1 == threads ? n : n / threads * (part + 1));
}
