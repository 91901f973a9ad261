// Attention of bfloat16 queries over a pool of bfloat16, in products of pairs: twice as many in a vector, and nothing is
// decoded. Scores are sums of exact products. A weight is rounded to bfloat16 before it meets its value, as transformers
// does, and sums of weights are of rounded ones.
#pragma once

#include "../vectors.h"

#ifdef PAIRS_IN_HARDWARE
#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using c10::BFloat16;

constexpr int64_t PAIR_COLUMNS = 32;  // columns of a panel: two vectors of sums
constexpr int PAIR_ROWS = 12;         // rows of a tile: 12 x 2 sums of 32 registers

// s[M, 8] = q[M, D] x rows[8][D]; D is a multiple of 32. A sum is the same, bit for bit, whatever M is.
template <int M>
[[gnu::flatten]] inline void dot_eight(const BFloat16* q, int64_t ldq, const BFloat16* const* rows, int64_t D, float* s,
                                       int64_t lds) {
  __m512 sums[M * 8];
  each<M * 8>([&](auto i) { sums[i] = _mm512_setzero_ps(); });
  for (int64_t d = 0; d < D; d += 32) {
    __m512i of_q[M];
    each<M>([&](auto m) { of_q[m] = _mm512_loadu_si512(q + m * ldq + d); });
    each<8>([&](auto i) {
      const __m512i key = _mm512_loadu_si512(rows[i] + d);
      each<M>([&](auto m) { sums[m * 8 + i] = add_pairs(sums[m * 8 + i], of_q[m], key); });
    });
  }
  each<M / 2>([&](auto two) {
    const __m512 totals = totals16(sums + two * 16);
    _mm256_storeu_ps(s + two * 2 * lds, _mm512_castps512_ps256(totals));
    _mm256_storeu_ps(s + (two * 2 + 1) * lds, _mm512_extractf32x8_ps(totals, 1));
  });
  if constexpr (M % 2) _mm256_storeu_ps(s + (M - 1) * lds, totals8(sums + (M - 1) * 8));
}

// s[M, 8] = q[M, D] x rows[8][D]; D is a multiple of 32
[[gnu::flatten]] inline void dot_rows_in_pairs(int64_t M, const BFloat16* q, int64_t ldq, const BFloat16* const* rows,
                                               int64_t D, float* s, int64_t lds) {
  in_even_tiles<3>(M, [&](auto some, int64_t m) {
    dot_eight<decltype(some)::value>(q + m * ldq, ldq, rows, D, s + m * lds, lds);
  });
}

// c[M, 32] += a[M, kn] x b[kn, 32], of pairs; or = instead of +=
template <int M, bool ADD>
[[gnu::flatten]] inline void pair_tile(const uint32_t* a, int64_t lda, const uint32_t* b, float* c, int64_t ldc, int64_t kn) {
  __m512 sums[M * 2];
  each<M * 2>([&](auto i) { sums[i] = ADD ? _mm512_loadu_ps(c + i / 2 * ldc + i % 2 * 16) : _mm512_setzero_ps(); });
  for (int64_t k = 0; k < kn; ++k) {
    const __m512i first = _mm512_loadu_si512(b + k * 32), second = _mm512_loadu_si512(b + k * 32 + 16);
    each<M>([&](auto m) {
      const __m512i of_a = _mm512_set1_epi32(static_cast<int>(a[m * lda + k]));
      sums[2 * m] = add_pairs(sums[2 * m], of_a, first);
      sums[2 * m + 1] = add_pairs(sums[2 * m + 1], of_a, second);
    });
  }
  each<M * 2>([&](auto i) { _mm512_storeu_ps(c + i / 2 * ldc + i % 2 * 16, sums[i]); });
}

// c[M, width] += or = a[M, kn] x panels[width / 32][panel_rows][32], of each panel the first kn rows; all but c of pairs
template <bool ADD>
[[gnu::noinline]] void pair_product(int64_t M, int64_t width, const uint32_t* a, int64_t lda, const uint32_t* b,
                                    int64_t panel_rows, float* c, int64_t ldc, int64_t kn) {
  for (int64_t n = 0; n < width; n += PAIR_COLUMNS)
    in_even_tiles<PAIR_ROWS>(M, [&](auto rows, int64_t m) {
      pair_tile<decltype(rows)::value, ADD>(a + m * lda, lda, b + n * panel_rows, c + m * ldc + n, ldc, kn);
    });
}

// What a block of attention is computed from, and its weights.
struct PairScratch {
  std::vector<uint32_t> memory;
  uint32_t *q, *keys, *values, *weights;

  void reserve(int64_t M, int64_t block, int64_t key_pairs, int64_t value_columns) {
    const int64_t sizes[] = {M * key_pairs, block * key_pairs, block / 2 * value_columns, M * block / 2};
    uint32_t** fields[] = {&q, &keys, &values, &weights};
    int64_t total = 16;
    for (int64_t n : sizes) total += (n + 15) / 16 * 16;
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(total);
    auto* next = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    for (int i = 0; i < 4; ++i) *fields[i] = next, next += (sizes[i] + 15) / 16 * 16;
  }
};

inline __mmask32 first_columns(int64_t count) { return count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1; }

// pairs[ceil(D / 2)] = row[D]
inline void pack_query(const BFloat16* row, int64_t D, uint32_t* pairs) {
  for (int64_t d = 0; d < D; d += 32) {
    const __mmask32 there = first_columns(D - d);
    _mm512_mask_storeu_epi32(pairs + d / 2, static_cast<__mmask16>((1u << (std::min<int64_t>(D - d, 32) + 1) / 2) - 1),
                             _mm512_maskz_loadu_epi16(there, row + d));
  }
}

// panels[count / 32][ceil(D / 2)][32] = pairs of columns of rows[count][D], transposed; sixteen rows at a time, of which
// those before c0 and from c1 on are zero.
[[gnu::flatten]] inline void pack_column_pairs(const BFloat16* const* rows, int64_t c0, int64_t c1, int64_t D, uint32_t* panels) {
  const int64_t pairs = (D + 1) / 2;
  for (int64_t c = c0 / 16 * 16; c < c1; c += 16) {
    uint32_t* to = panels + c / 32 * pairs * 32 + c % 32;
    for (int64_t d = 0; d < D; d += 32) {
      const __mmask32 there = first_columns(D - d);
      __m512i x[16];
      each<16>([&](auto i) {
        x[i] = c + i < c0 || c + i >= c1 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(there, rows[c + i] + d);
      });
      transpose16(x);
      each<16>([&](auto i) {
        if (d / 2 + i < pairs) _mm512_storeu_si512(to + (d / 2 + i) * 32, x[i]);
      });
    }
  }
}

constexpr auto ALTERNATING = [] {  // which of 32 numbers of one vector and 32 of another, for each place
  std::array<int16_t, 64> places{};
  for (int i = 0; i < 64; ++i) places[i] = static_cast<int16_t>(i / 2 + i % 2 * 32);
  return places;
}();

// panels[ceil(D / 32)][panel_rows][32] = pairs of rows[2 · panel_rows][D], one above the other. Rows of a pair that are
// not in c0..c1 are zero, as are columns from D on. False if there is an infinity or NaN.
inline bool pack_row_pairs(const BFloat16* const* rows, int64_t c0, int64_t c1, int64_t D, int64_t panel_rows,
                           uint32_t* panels) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const __m512i low = _mm512_loadu_si512(ALTERNATING.data()), high = _mm512_loadu_si512(ALTERNATING.data() + 32);
  __mmask32 wrong = 0;
  for (int64_t c = c0 / 2 * 2; c < c1; c += 2) {
    for (int64_t d = 0; d < D; d += 32) {
      const auto row = [&](int64_t i) {
        return i < c0 || i >= c1 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(first_columns(D - d), rows[i] + d);
      };
      const __m512i a = row(c), b = row(c + 1);
      wrong |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(a, exponent), exponent);
      wrong |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, exponent), exponent);
      uint32_t* to = panels + d * panel_rows + c / 2 * 32;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, high, b));
    }
  }
  return wrong == 0;
}

// Rounds weights to bfloat16, in place and as pairs; a multiple of 32.
inline void round_weights(float* p, uint32_t* pairs, int64_t count) {
  for (int64_t c = 0; c < count; c += 32) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + c + 16), _mm512_loadu_ps(p + c));
    _mm512_storeu_si512(pairs + c / 2, both);
    for (int64_t half = 0; half < 2; ++half) {
      const __m256i of = half ? _mm512_extracti64x4_epi64(both, 1) : _mm512_castsi512_si256(both);
      _mm512_storeu_ps(p + c + half * 16, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(of), 16)));
    }
  }
}

// 2^y for y <= 0, within 2^-18, which rounding to 8 bits hides. -inf gives 0, and NaN stays NaN.
inline __m512 exp2_nonpositive(__m512 y) {
  y = _mm512_max_ps(_mm512_set1_ps(-200.0f), y);  // this operand order keeps NaN
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(y, n);
  __m512 p = _mm512_set1_ps(9.570101434e-3f);  // of degree 4, with the least largest error on [-1/2, 1/2]
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.591786028e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402474484e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931218147e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.999992614e-1f));
  return _mm512_scalef_ps(p, n);
}

// What softmax_step in attention.h does, without soft cap and slopes, for the 64 logits of up to sixteen rows at
// once, so that none waits for its own largest and sum: weights go to `pairs`, and largest, l and o[rows, width] follow.
// Bit c of seen[r]: whether row r sees column c. A weight is 2 to the power of `scale`, which is positive, times how far
// its logit is from the largest, so that the largest has the weight 1 however large it is.
[[gnu::flatten]] inline void pair_softmax(int64_t rows, const float* s, const uint64_t* seen, float scale, uint32_t* pairs,
                                          float* largest, float* l, float* o, int64_t width) {
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity()), scales = _mm512_set1_ps(scale);
  const auto there = static_cast<__mmask16>((1u << rows) - 1);
  const auto logits = [&](auto r, auto i) {
    return _mm512_mask_loadu_ps(nothing, static_cast<__mmask16>(seen[r] >> (16 * i)), s + 64 * r + 16 * i);
  };
  const auto larger = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
  constexpr auto at = [](int i) { return i; };
  __m512 of[16];  // each row's largest, then its sum; a NaN that is lost here is in the sum
  each<16>([&](auto r) {
    of[r] = nothing;
    if (r < rows) of[r] = larger(larger(logits(r, at(0)), logits(r, at(1))), larger(logits(r, at(2)), logits(r, at(3))));
  });
  const __m512 before = _mm512_maskz_loadu_ps(there, largest);
  const __m512 top = larger(reduce16(of, larger), before);
  _mm512_mask_storeu_ps(largest, there, top);
  alignas(64) float base[16], shrink[16];
  // Where every logit so far is -inf, weights are 0: no -inf - -inf.
  const __m512 bases = _mm512_mask_mov_ps(top, _mm512_cmp_ps_mask(top, nothing, _CMP_EQ_OQ), _mm512_setzero_ps());
  _mm512_store_ps(base, bases);
  const __mmask16 moved = there & _mm512_cmp_ps_mask(top, before, _CMP_NEQ_UQ);
  const __m512 shrinks = _mm512_mask_mov_ps(_mm512_set1_ps(1), moved, exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(before, bases), scales)));
  _mm512_store_ps(shrink, shrinks);
  for (unsigned left = moved; left; left &= left - 1) {
    const int r = __builtin_ctz(left);
    const __m512 by = _mm512_set1_ps(shrink[r]);
    float* row = o + r * width;
    for (int64_t d = 0; d < width; d += 16) _mm512_storeu_ps(row + d, _mm512_mul_ps(_mm512_loadu_ps(row + d), by));
  }
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  each<16>([&](auto r) {
    of[r] = _mm512_setzero_ps();
    if (r >= rows) return;
    const __m512 down = _mm512_set1_ps(base[r]);
    const auto weight = [&](auto i) {
      return exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(logits(r, i), down), scales));
    };
    each<2>([&](auto i) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weight(2 * i + 1), weight(2 * i));
      _mm512_storeu_si512(pairs + 32 * r + 16 * i, both);
      of[r] = add_pairs(of[r], both, ones);
    });
  });
  _mm512_mask_storeu_ps(l, there, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(there, l), shrinks, totals16(of)));
}

// o[M, 32 · V] += weights[M, count / 2] x rows[count][32 · V], of pairs of rows; an even count
template <int M, int V>
[[gnu::flatten]] inline void weigh_pairs(const uint32_t* weights, int64_t ldw, const BFloat16* const* rows, int64_t count,
                                         int64_t d, float* o, int64_t ldo) {
  const __m512i low = _mm512_loadu_si512(ALTERNATING.data()), high = _mm512_loadu_si512(ALTERNATING.data() + 32);
  __m512 sums[M * 2 * V];
  each<M * 2 * V>([&](auto i) { sums[i] = _mm512_loadu_ps(o + i / (2 * V) * ldo + d + i % (2 * V) * 16); });
  for (int64_t c = 0; c < count; c += 2) {
    __m512i values[2 * V];
    each<V>([&](auto v) {
      const __m512i a = _mm512_loadu_si512(rows[c] + d + 32 * v), b = _mm512_loadu_si512(rows[c + 1] + d + 32 * v);
      values[2 * v] = _mm512_permutex2var_epi16(a, low, b);
      values[2 * v + 1] = _mm512_permutex2var_epi16(a, high, b);
    });
    each<M>([&](auto m) {
      const __m512i weight = _mm512_set1_epi32(static_cast<int>(weights[m * ldw + c / 2]));
      each<2 * V>([&](auto i) { sums[m * 2 * V + i] = add_pairs(sums[m * 2 * V + i], weight, values[i]); });
    });
  }
  each<M * 2 * V>([&](auto i) { _mm512_storeu_ps(o + i / (2 * V) * ldo + d + i % (2 * V) * 16, sums[i]); });
}

// o[M, D] += weights[M, count / 2] x rows[count][D]; an even count, and D a multiple of 32
[[gnu::flatten]] inline void weigh_rows_in_pairs(int64_t M, const uint32_t* weights, int64_t ldw,
                                                 const BFloat16* const* rows, int64_t count, int64_t D, float* o,
                                                 int64_t ldo) {
  in_even_tiles<4>(M, [&](auto some, int64_t m) {
    constexpr int R = decltype(some)::value;
    int64_t d = 0;
    for (; d + 64 <= D; d += 64) weigh_pairs<R, 2>(weights + m * ldw, ldw, rows, count, d, o + m * ldo, ldo);
    if (d < D) weigh_pairs<R, 1>(weights + m * ldw, ldw, rows, count, d, o + m * ldo, ldo);
  });
}

}  // namespace
#endif
