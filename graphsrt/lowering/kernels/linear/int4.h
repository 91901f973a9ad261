// Products with weights of 4 bits, in integers: each 32 columns of a row of x, a group, are rounded to 16 bits, and meet
// the nibbles of w as exact sums of int32. A group's sum then becomes float32, and counts by the scales of both.
//
// x is rounded to multiples of a power of two, 2^-14 of the one below the group's largest magnitude. That is exact for
// a bfloat16 of at least a 128th of the largest magnitude (float16: a 16th), and otherwise off by 2^-15 of it at most.
// An infinity or NaN gives its group the scale NaN, and so all of its row of y.
//
// Rows of w are decoded in registers for any number of rows of x: that costs less than to read them decoded.
#pragma once

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>
#include <memory>

#include "tile.h"

namespace {

constexpr int64_t GROUP = 32;          // columns with a scale and an offset of their own
constexpr int64_t BLOCK = 2 * GROUP;   // columns that are stored together
constexpr int64_t STEP = GROUP * VL;   // columns whose scales fill a vector
static_assert(VL % 2 == 0);  // a step takes whole blocks

constexpr int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- a group of 16-bit numbers -------------------------------------------------------------------------------------
//
// decode_group gives the first or second one of the block at p. dot sums products, those of 32 / VL columns in each
// lane: at most 8 · 15 · 2^15, which float32 holds exactly.

#if defined(CPU_CAPABILITY_AVX512)
using Numbers = __m512i;

inline Numbers load_numbers(const int16_t* p) { return in_register(_mm512_loadu_si512(p)); }

template <bool SECOND>
inline Numbers decode_group(const uint8_t* p) {
  const __m512i words = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i by = _mm512_inserti64x4(_mm512_set1_epi16(SECOND ? 8 : 0), _mm256_set1_epi16(SECOND ? 12 : 4), 1);
  return _mm512_and_si512(_mm512_srlv_epi16(words, by), _mm512_set1_epi16(15));
}

inline Vec dot(Numbers a, Numbers b) { return Vec(_mm512_cvtepi32_ps(_mm512_madd_epi16(a, b))); }

#elif defined(CPU_CAPABILITY_AVX2)
struct Numbers {
  __m256i low, high;
};

inline Numbers load_numbers(const int16_t* p) {
  const auto* v = reinterpret_cast<const __m256i*>(p);
  return {in_register(_mm256_loadu_si256(v)), in_register(_mm256_loadu_si256(v + 1))};
}

template <bool SECOND>
inline Numbers decode_group(const uint8_t* p) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi16(15);
  if constexpr (SECOND) return {_mm256_and_si256(_mm256_srli_epi16(words, 8), mask), _mm256_srli_epi16(words, 12)};
  return {_mm256_and_si256(words, mask), _mm256_and_si256(_mm256_srli_epi16(words, 4), mask)};
}

inline Vec dot(const Numbers& a, const Numbers& b) {
  return Vec(_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high))));
}

#else
struct Numbers {
  int16_t of[GROUP];
};

inline Numbers load_numbers(const int16_t* p) {
  Numbers v;
  std::memcpy(v.of, p, sizeof v.of);
  return v;
}

template <bool SECOND>
inline Numbers decode_group(const uint8_t* p) {
  Numbers v;
  for (int i = 0; i < 16; ++i) {
    const int word = p[2 * i] | p[2 * i + 1] << 8;
    v.of[i] = word >> (SECOND ? 8 : 0) & 15, v.of[16 + i] = word >> (SECOND ? 12 : 4) & 15;
  }
  return v;
}

inline Vec dot(const Numbers& a, const Numbers& b) {
  int32_t sums[VL] = {};
  for (int64_t i = 0; i < GROUP; ++i) sums[i % VL] += a.of[i] * b.of[i];
  alignas(64) float out[VL];
  for (int64_t i = 0; i < VL; ++i) out[i] = static_cast<float>(sums[i]);
  return Vec::loadu(out);
}
#endif

// ---- x -------------------------------------------------------------------------------------------------------------

// Rounds a group: x ≈ q · scale. `sum` is that of q.
template <class Y>
inline void round_group(const Y* x, int16_t* q, float& scale, float& sum) {
  float wide[GROUP];
  uint32_t largest = 0;  // magnitudes compare as their bits do, and those of infinities and NaN are the largest
  for (int64_t i = 0; i < GROUP; ++i) {
    wide[i] = static_cast<float>(x[i]);
    uint32_t bits;
    std::memcpy(&bits, wide + i, 4);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  const bool finite = largest < 0x7f800000u;
  // As it is stored. From 15 on scales are normal numbers; what is less is rounded to multiples of 2^-126.
  const uint32_t exponent = finite ? std::max(largest >> 23, 15u) : 254u;
  const uint32_t of_scale = (exponent - 14) << 23, of_inverse = (268 - exponent) << 23;
  float inverse;
  std::memcpy(&scale, &of_scale, 4), std::memcpy(&inverse, &of_inverse, 4);
  int32_t total = 0;
  for (int64_t i = 0; i < GROUP; ++i) {
    const float near = std::nearbyint(std::min(wide[i] * inverse, 32767.0f));
    q[i] = static_cast<int16_t>(finite ? static_cast<int32_t>(near) : 0);
    total += q[i];
  }
  sum = static_cast<float>(total);
  if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
}

// x, rounded: [columns / block][M][block] numbers, the last block as wide as it is. Zeros make up whole BLOCKs.
struct Rounded {
  int64_t M, columns, block;
  int64_t groups;  // in whole vectors; what is beyond the columns has the scale zero
  std::unique_ptr<int16_t[]> data;
  std::unique_ptr<float[]> scales, sums;  // [M, groups]

  int64_t width(int64_t k) const { return std::min(block, columns - k); }
  int16_t* at(int64_t m, int64_t k) const { return data.get() + k * M + m * width(k); }

  template <class Y>
  Rounded(const Y* x, int64_t M, int64_t K, int64_t block)
      : M(M), columns(rounded_up(K, BLOCK)), block(block), groups(rounded_up(K, STEP) / GROUP),
        data(new int16_t[M * columns]), scales(new float[M * groups]), sums(new float[M * groups]) {
    at::parallel_for(0, M, 1 + 65536 / std::max<int64_t>(1, K), [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t k = g * GROUP;
          float &scale = scales[m * groups + g], &sum = sums[m * groups + g];
          scale = sum = 0;
          int16_t* q = at(m, k / block * block) + k % block;
          if (k < K) round_group(x + m * K + k, q, scale, sum);
          else if (k < columns) std::fill_n(q, GROUP, int16_t(0));
        }
      }
    });
  }
};

// ---- w -------------------------------------------------------------------------------------------------------------

// q · scale + offset. 64 columns lie in sixteen words of 16 bits: word j holds column 16 s + j in its bits 4 s to
// 4 s + 3. If 32 columns are left at the end of a row, the upper halves of its last words are not used.
struct Int4 {
  const uint8_t* data;    // [N, ceil(K / 64) · 32]
  const uint32_t* pairs;  // [N, K / GROUP]: scale and offset, each as BFloat16
  int64_t K;
  const uint8_t* at(int64_t row, int64_t k) const { return data + (row * rounded_up(K, BLOCK) + k) / 2; }
  const uint32_t* pair(int64_t row, int64_t k) const { return pairs + (row * K + k) / GROUP; }
};

// Scales and offsets of the next VL groups, zeros for what is beyond `count`.
inline void load_pairs(const uint32_t* p, int64_t count, Vec& scale, Vec& offset) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i both = _mm512_maskz_loadu_epi32(count < VL ? (1 << count) - 1 : 0xffff, p);
  scale = Vec(_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)));
  offset = Vec(_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000))));
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i both;
  if (count >= VL) both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  else {
    const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    both = _mm256_maskload_epi32(reinterpret_cast<const int*>(p), there);
  }
  scale = Vec(_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)));
  offset = Vec(_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000))));
#else
  alignas(64) uint32_t scales[VL] = {}, offsets[VL] = {};
  for (int64_t i = 0; i < std::min(VL, count); ++i) scales[i] = p[i] << 16, offsets[i] = p[i] & 0xffff0000u;
  scale = Vec::loadu(scales), offset = Vec::loadu(offsets);
#endif
}

// sums[m · STRIDE + r] += x row m0 + m · w row `row` + r, over the block of columns from k on. The first one begins.
template <int M, int R>
void int4_tile(const Rounded& x, int64_t m0, int64_t k, const Int4& w, int64_t row, Vec* sums) {
  Vec own[M][R];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) own[m][r] = k ? sums[m * STRIDE + r] : Vec(0.0f);
  const int64_t n = x.width(k), groups = std::min(n, w.K - k) / GROUP;
  const int16_t* of_x = x.at(m0, k);
  const float* scales = x.scales.get() + m0 * x.groups + k / GROUP;
  const float* of_sums = x.sums.get() + m0 * x.groups + k / GROUP;
  const uint8_t* q[R];
  const uint32_t* pairs[R];
  for (int r = 0; r < R; ++r) q[r] = w.at(row + r, k), pairs[r] = w.pair(row + r, k);
  const char* ahead = reinterpret_cast<const char*>(w.at(row + R, k));
  const char* pairs_ahead = reinterpret_cast<const char*>(w.pair(row + R, k));
  alignas(64) float by[M][R][VL];  // scales of the groups of a step

  // Not inlined, a lambda keeps what it captures in memory: here, the sums.
  const auto add_group = [&](auto second, int64_t g0, int64_t g) __attribute__((always_inline)) {
    Numbers b[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) b[r] = decode_group<decltype(second)::value>(q[r] + (g0 + g) / 2 * (BLOCK / 2));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Numbers a = load_numbers(of_x + m * n + (g0 + g) * GROUP);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) own[m][r] = at::vec::fmadd(dot(a, b[r]), Vec(by[m][r][g]), own[m][r]);
    }
  };
  for (int64_t g0 = 0; g0 < groups; g0 += VL) {
    ahead = prefetch<R * STEP / 2>(ahead);
    pairs_ahead = prefetch<R * VL * 4>(pairs_ahead);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vec scale, offset;
      load_pairs(pairs[r] + g0, groups - g0, scale, offset);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Vec of_row = Vec::loadu(scales + m * x.groups + g0);
        (scale * of_row).store(by[m][r]);
        own[m][r] = at::vec::fmadd(offset * of_row, Vec::loadu(of_sums + m * x.groups + g0), own[m][r]);
      }
    }
    for (int64_t g = 0; g < std::min(VL, groups - g0); g += 2) {
      add_group(std::false_type(), g0, g);
      add_group(std::true_type(), g0, g + 1);  // beyond the last group: zeros times the scale zero
    }
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < R; ++r) sums[m * STRIDE + r] = own[m][r];
}

// A product as `part` in linear.cpp goes through it.
struct Int4Product {
  Int4 w;
  Rounded x;

  // Rows of x and of w in a tile: what its sums, a group of these rows of w and of one of x take in registers.
  static constexpr int MR = VL == 16 ? 6 : 4, NR = VL == 16 ? 4 : 2;
  static constexpr int64_t UNIT = NR;
  static constexpr int64_t COLUMNS = 2048;  // of a block: a tile's rows of x and of w stay in the first cache
  static_assert(COLUMNS % STEP == 0);
  static constexpr int side_by_side(int m) { return m == 1 ? 4 : m == 2 ? 3 : NR; }

  static constexpr int FEW = 4;

  template <class Y>
  Int4Product(const Int4& w, const Y* x, int64_t M)
      : w(w), x(x, M, w.K, M <= FEW ? std::max(BLOCK, rounded_up(w.K, BLOCK)) : COLUMNS) {}

  Vec scales(int64_t, int64_t) const { return Vec(1.0f); }

  template <int M, int R>
  [[gnu::noinline]] void few(int64_t row, int64_t m0, int64_t k, Vec* sums) const {
    int4_tile<M, R>(x, m0, k, w, row, sums);
  }

  template <int R>
  [[gnu::noinline]] void many(int64_t row, int64_t m0, int64_t m, int64_t k, Vec* sums, int64_t, int64_t) const {
    in_tiles<MR>(m, [&](auto rows, int64_t i) {
      int4_tile<decltype(rows)::value, R>(x, m0 + i, k, w, row, sums + i * STRIDE);
    });
  }
};

}  // namespace
