// What kernels share: loops whose steps are constants, and sums of vectors.
#pragma once

#include <ATen/cpu/vec/vec.h>
#include <ATen/cpu/vec/functional.h>  // after vec.h, which includes it itself for AVX2 only
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

// Pairs of bfloat16 are multiplied and added to a float32 in one instruction. It takes denormal numbers for zero.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define PAIRS_IN_HARDWARE
#endif

namespace {

// f(std::integral_constant<int, 0>) to N - 1. An array that is indexed by such constants is kept in registers; GCC 12
// writes one that is indexed by the variable of a loop to memory in every step, even if it unrolls the loop.
template <int N, class F>
[[gnu::always_inline]] inline void each(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, N>());
}

// f(M as a constant), M being 1 to MOST.
template <int MOST, class F>
inline void as_constant(int64_t M, F&& f) {
  if (M == MOST) f(std::integral_constant<int, MOST>());
  else if constexpr (MOST > 1) as_constant<MOST - 1>(M, f);
}

// f(how many as a constant, from which on) for `count` rows, at most MOST at a time and as even as can be.
template <int MOST, class F>
inline void in_even_tiles(int64_t count, F&& f) {
  for (int64_t from = 0, left = (count + MOST - 1) / MOST; left > 0; --left) {
    const int64_t rows = (count - from + left - 1) / left;
    as_constant<MOST>(rows, [&](auto constant) { f(constant, from); });
    from += rows;
  }
}

#if defined(CPU_CAPABILITY_AVX512)
// Sixteen vectors of sixteen 32-bit elements, rows to columns. Two neighbours, then four, come to lie side by side; then
// quarters of the vectors change places.
[[gnu::always_inline]] inline void transpose16(__m512i* v) {
  __m512i t[16];
  each<8>([&](auto i) {
    t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  });
  each<4>([&](auto i) {
    v[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    v[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    v[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    v[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  });
  each<4>([&](auto i) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  });
  each<4>([&](auto i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  });
}

// Each quarter of fours[N] holds what `f` makes of the same quarters of four of the 4 · N vectors, in order: neighbours'
// elements come to lie side by side, then pairs' pairs.
template <int N, class V, class F>
inline void reduce_quarters(const V* v, __m512* fours, F&& f) {
  __m512 twos[2 * N];
  each<2 * N>([&](auto i) {
    const __m512 a = v[2 * i], b = v[2 * i + 1];
    twos[i] = f(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  });
  each<N>([&](auto i) {
    const __m512d a = _mm512_castps_pd(twos[2 * i]), b = _mm512_castps_pd(twos[2 * i + 1]);
    fours[i] = f(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  });
}

// Half as many quarters: those of a and of b, first with second, third with fourth.
template <class F>
inline __m512 halve_quarters(__m512 a, __m512 b, F&& f) {
  return f(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// What `f`, which is associative and commutative, makes of each of sixteen vectors, in order.
template <class V, class F>
inline __m512 reduce16(const V* v, F&& f) {
  __m512 fours[4];
  reduce_quarters<4>(v, fours, f);
  return halve_quarters(halve_quarters(fours[0], fours[1], f), halve_quarters(fours[2], fours[3], f), f);
}

struct Sum {
  __m512 operator()(__m512 a, __m512 b) const { return _mm512_add_ps(a, b); }
};

// The totals of sixteen vectors, in order.
template <class V>
inline __m512 totals16(const V* v) {
  return reduce16(v, Sum());
}

// The totals of eight vectors, in order; each is summed as by totals16.
template <class V>
inline __m256 totals8(const V* v) {
  __m512 fours[2];
  reduce_quarters<2>(v, fours, Sum());
  const __m512 eight = halve_quarters(fours[0], fours[1], Sum());
  return _mm512_castps512_ps256(halve_quarters(eight, eight, Sum()));
}
#endif

#ifdef PAIRS_IN_HARDWARE
inline __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif

}  // namespace
