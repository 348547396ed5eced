// The AdamW update on the CPU, its finite check and its sum of squares; plain C ABI, called through ctypes.
//
// Every fp32 operation is rounded on its own (no FMA contraction, IEEE division and square root, no flush to zero), so
// the results equal those of reference.py in every bit, on any instruction set and any number of threads. The
// formula is documented in formula.py. Loops are plain; the compiler vectorises them for each instruction set, and the
// loader picks one at run time.

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(TIERSTEP_NO_CLONES)
#define PER_INSTRUCTION_SET __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PER_INSTRUCTION_SET
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

enum Dtype : int64_t { BF16 = 0, FP16 = 1, FP32 = 2 };

struct Scalars {  // the order of formula.Scalars
  float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_bias2, eps, grad_scale;
};

struct Segment {  // one piece: consecutive elements of one parameter
  void* weight;
  const void* grad;
  int64_t grad_dtype;
  int64_t start;  // first element in the record's fields
  int64_t length;
  int64_t scalars;  // index into the array of Scalars
};

struct Fields {  // what the weight's dtype does not have is null
  int16_t* low;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
};

INLINE float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Returns `value`; for any NaN, one that is the same on every processor, and whose upper half is a NaN as well after
// rounding (0x7fffffff would become zero).
INLINE float one_nan(float value) {
  return (to_bits(value) & 0x7fffffffu) > 0x7f800000u ? from_bits(0x7fc00000u) : value;
}

struct Bf16 {
  using Storage = uint16_t;
  static INLINE float widen(uint16_t value) { return from_bits(static_cast<uint32_t>(value) << 16); }
};

struct Fp16 {
  using Storage = uint16_t;

  // The exponent's bias grows by 112: shift the fields into place and multiply by 2^112, which is exact and turns
  // fp16 denormals into normal numbers. inf and nan keep an exponent of all ones.
  static INLINE float widen(uint16_t value) {
    const uint32_t magnitude = static_cast<uint32_t>(value & 0x7fff) << 13;
    const uint32_t finite = to_bits(from_bits(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7f800000u;
    const uint32_t bits = magnitude >= 0x0f800000u ? special : finite;
    return from_bits(bits | static_cast<uint32_t>(value & 0x8000) << 16);
  }

  // Round to nearest even. Below 2^-14 the sum with 0.5 has the spacing of fp16 denormals, so the addition rounds.
  static INLINE uint16_t narrow(float value) {
    const uint32_t sign = to_bits(value) >> 16 & 0x8000u;
    const uint32_t magnitude = to_bits(value) & 0x7fffffffu;
    const uint32_t tiny = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t huge = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t rounded = magnitude < 0x38800000u ? tiny : normal;
    return static_cast<uint16_t>((magnitude >= 0x47800000u ? huge : rounded) | sign);
  }
};

struct Fp32 {
  using Storage = float;
  static INLINE float widen(float value) { return value; }
};

// How a weight and its record make up the fp32 master weight, and how a new master is put back.

struct SplitMaster {  // bf16: the weight is the master's upper half, rounded half up; the record has the rest
  using Weight = Bf16;
  // No master has a zero as its upper half and a negative lower one (those bits are a NaN): somebody else set the weight
  // to zero, and it is zero.
  static INLINE float load(const uint16_t* weight, const Fields& at, int64_t i) {
    const uint32_t high = weight[i];
    const int32_t low = at.low[i];
    const int32_t kept = (high & 0x7fffu) == 0 && low < 0 ? 0 : low;
    return from_bits((high << 16) + static_cast<uint32_t>(kept));
  }
  static INLINE void store(uint16_t* weight, const Fields& at, int64_t i, float master) {
    const uint32_t bits = to_bits(master);
    const uint32_t high = (bits + 0x8000u) >> 16;
    weight[i] = static_cast<uint16_t>(high);
    at.low[i] = static_cast<int16_t>(bits - (high << 16));
  }
};

struct FullMaster {  // fp16: the record has the master; a weight that it does not round to was set by somebody else
  using Weight = Fp16;
  static INLINE float load(const uint16_t* weight, const Fields& at, int64_t i) {
    const float master = at.master[i];
    return Fp16::narrow(master) == weight[i] ? master : Fp16::widen(weight[i]);
  }
  static INLINE void store(uint16_t* weight, const Fields& at, int64_t i, float master) {
    weight[i] = Fp16::narrow(master);
    at.master[i] = master;
  }
};

struct OwnMaster {  // fp32: the weight is the master
  using Weight = Fp32;
  static INLINE float load(const float* weight, const Fields&, int64_t i) { return weight[i]; }
  static INLINE void store(float* weight, const Fields&, int64_t i, float master) { weight[i] = master; }
};

template <class Master, class Grad>
INLINE void update_range(void* weight_memory, const void* grad_memory, Fields fields, int64_t n, const Scalars& s) {
  auto* __restrict weight = static_cast<typename Master::Weight::Storage*>(weight_memory);
  const auto* __restrict grad = static_cast<const typename Grad::Storage*>(grad_memory);
  float* __restrict exp_avg = fields.exp_avg;
  float* __restrict exp_avg_sq = fields.exp_avg_sq;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const float g = Grad::widen(grad[i]) * s.grad_scale;
    const float decayed = Master::load(weight, fields, i) * s.decay;
    const float m = exp_avg[i] * s.beta1 + g * s.one_minus_beta1;
    const float v = exp_avg_sq[i] * s.beta2 + (g * g) * s.one_minus_beta2;
    const float denominator = std::sqrt(v) * s.inv_sqrt_bias2 + s.eps;
    exp_avg[i] = one_nan(m);
    exp_avg_sq[i] = one_nan(v);
    Master::store(weight, fields, i, one_nan(decayed - s.step_size * (m / denominator)));
  }
}

// One function for each pair of dtypes, compiled for each instruction set.
#define DEFINE_UPDATE(name, Master, Grad)                                                                 \
  PER_INSTRUCTION_SET void name(void* weight, const void* grad, Fields at, int64_t n, const Scalars& s) { \
    update_range<Master, Grad>(weight, grad, at, n, s);                                                   \
  }
DEFINE_UPDATE(update_bf16_bf16, SplitMaster, Bf16)
DEFINE_UPDATE(update_bf16_fp16, SplitMaster, Fp16)
DEFINE_UPDATE(update_bf16_fp32, SplitMaster, Fp32)
DEFINE_UPDATE(update_fp16_bf16, FullMaster, Bf16)
DEFINE_UPDATE(update_fp16_fp16, FullMaster, Fp16)
DEFINE_UPDATE(update_fp16_fp32, FullMaster, Fp32)
DEFINE_UPDATE(update_fp32_bf16, OwnMaster, Bf16)
DEFINE_UPDATE(update_fp32_fp16, OwnMaster, Fp16)
DEFINE_UPDATE(update_fp32_fp32, OwnMaster, Fp32)

using Update = void (*)(void*, const void*, Fields, int64_t, const Scalars&);
constexpr Update UPDATES[3][3] = {{update_bf16_bf16, update_bf16_fp16, update_bf16_fp32},
                                  {update_fp16_bf16, update_fp16_fp16, update_fp16_fp32},
                                  {update_fp32_bf16, update_fp32_fp16, update_fp32_fp32}};
constexpr int64_t ITEM_BYTES[3] = {2, 2, 4};

// IEEE arithmetic for the length of a scope: the caller may have asked its threads to flush denormals to zero.
class PlainArithmetic {
#if defined(__x86_64__)
  unsigned before_ = _mm_getcsr();

 public:
  PlainArithmetic() { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  uint64_t before_;

 public:
  PlainArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~PlainArithmetic() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#endif
};

// Calls work(begin, end) for equal parts of 0..total, each on a thread of its own; parts begin at multiples of `grain`.
template <class Work>
void in_parallel(int64_t total, int64_t grain, int threads, const Work& work) {
  const int64_t grains = (total + grain - 1) / grain;
  const auto edge = [=](int64_t part, int64_t parts) {
    const int64_t at = grains / parts * part + (grains % parts) * part / parts;
    return at * grain < total ? at * grain : total;
  };
#ifdef _OPENMP
  if (threads > 1 && grains > 1) {
#pragma omp parallel num_threads(threads)
    {
      const PlainArithmetic scope;
      const int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
      work(edge(part, parts), edge(part + 1, parts));
    }
    return;
  }
#endif
  const PlainArithmetic scope;
  work(edge(0, 1), edge(1, 1));
}

void update_segment(const Segment& segment, int64_t skip, int64_t n, int64_t weight_dtype, const Fields& fields,
                    const Scalars* scalars) {
  const int64_t at = segment.start + skip;
  const Fields here = {fields.low ? fields.low + at : nullptr, fields.master ? fields.master + at : nullptr,
                       fields.exp_avg + at, fields.exp_avg_sq + at};
  auto* weight = static_cast<char*>(segment.weight) + skip * ITEM_BYTES[weight_dtype];
  const auto* grad = static_cast<const char*>(segment.grad) + skip * ITEM_BYTES[segment.grad_dtype];
  UPDATES[weight_dtype][segment.grad_dtype](weight, grad, here, n, scalars[segment.scalars]);
}

// ---- finite check

template <class Storage, Storage EXPONENT>
INLINE bool any_special(const void* memory, int64_t n) {
  const auto* values = static_cast<const Storage*>(memory);
  Storage found = 0;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) found |= static_cast<Storage>((values[i] & EXPONENT) == EXPONENT);
  return found != 0;
}

PER_INSTRUCTION_SET bool special_bf16(const void* memory, int64_t n) { return any_special<uint16_t, 0x7f80>(memory, n); }
PER_INSTRUCTION_SET bool special_fp16(const void* memory, int64_t n) { return any_special<uint16_t, 0x7c00>(memory, n); }
PER_INSTRUCTION_SET bool special_fp32(const void* memory, int64_t n) {
  return any_special<uint32_t, 0x7f800000u>(memory, n);
}

// ---- sum of squares

constexpr int64_t BLOCK = 4096, LANES = 16;  // the order of additions is part of the result: see reference.py

template <class Type>
INLINE double block_sum(const void* memory, int64_t n) {
  const auto* values = static_cast<const typename Type::Storage*>(memory);
  double sums[LANES] = {};
  const int64_t whole = n / LANES * LANES;
  for (int64_t row = 0; row < whole; row += LANES)
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const double x = static_cast<double>(Type::widen(values[row + lane]));
      sums[lane] += x * x;  // exact product: x has at most 24 significant bits
    }
  for (int64_t i = whole; i < n; ++i) {
    const double x = static_cast<double>(Type::widen(values[i]));
    sums[i - whole] += x * x;
  }
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

PER_INSTRUCTION_SET double squares_bf16(const void* memory, int64_t n) { return block_sum<Bf16>(memory, n); }
PER_INSTRUCTION_SET double squares_fp16(const void* memory, int64_t n) { return block_sum<Fp16>(memory, n); }
PER_INSTRUCTION_SET double squares_fp32(const void* memory, int64_t n) { return block_sum<Fp32>(memory, n); }

}  // namespace

extern "C" {

// Updates `count` segments of one record; their concatenation is shared evenly among the threads.
void tierstep_adamw_update(const Segment* segments, int64_t count, int64_t weight_dtype, const Fields* fields,
                           const Scalars* scalars, int32_t threads) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += segments[i].length;
  in_parallel(total, 1024, threads, [=](int64_t begin, int64_t end) {
    int64_t reached = 0;
    for (int64_t i = 0; i < count && reached < end; reached += segments[i++].length) {
      const int64_t first = begin > reached ? begin - reached : 0;
      const int64_t last = end - reached < segments[i].length ? end - reached : segments[i].length;
      if (first < last) update_segment(segments[i], first, last - first, weight_dtype, *fields, scalars);
    }
  });
}

// Returns 1 when no value is inf or nan, else 0.
int32_t tierstep_all_finite(const void* memory, int64_t n, int64_t dtype, int32_t threads) {
  constexpr bool (*CHECKS[3])(const void*, int64_t) = {special_bf16, special_fp16, special_fp32};
  int32_t special = 0;
  in_parallel(n, BLOCK, threads, [&, n, dtype](int64_t begin, int64_t end) {
    const auto* at = static_cast<const char*>(memory) + begin * ITEM_BYTES[dtype];
    if (CHECKS[dtype](at, end - begin)) __atomic_store_n(&special, 1, __ATOMIC_RELAXED);
  });
  return !special;
}

// Writes the sum of squares of each block of 4096 values (the last may be shorter).
void tierstep_sum_squares(const void* memory, int64_t n, int64_t dtype, double* sums, int32_t threads) {
  constexpr double (*SUMS[3])(const void*, int64_t) = {squares_bf16, squares_fp16, squares_fp32};
  in_parallel(n, BLOCK, threads, [=](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += BLOCK) {
      const int64_t length = end - at < BLOCK ? end - at : BLOCK;
      sums[at / BLOCK] = SUMS[dtype](static_cast<const char*>(memory) + at * ITEM_BYTES[dtype], length);
    }
  });
}

}  // extern "C"
