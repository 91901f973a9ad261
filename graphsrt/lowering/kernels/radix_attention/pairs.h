// Attention of bfloat16 queries over a pool of bfloat16, in products of pairs: twice as many in a vector, and nothing is
// decoded. Scores are sums of exact products. Where several query tokens are computed together, a weight is rounded to
// bfloat16 before it meets its value, as transformers does, and sums of weights are of rounded ones.
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

// s[0..16] = scale · (q · rows[i]); D is a multiple of 32
[[gnu::flatten]] inline void dot_sixteen(const BFloat16* q, const BFloat16* const* rows, int64_t D, float scale, float* s) {
  __m512 sums[16];
  each<16>([&](auto i) { sums[i] = _mm512_setzero_ps(); });
  for (int64_t d = 0; d < D; d += 32) {
    const __m512i of_q = _mm512_loadu_si512(q + d);
    each<16>([&](auto i) { sums[i] = add_pairs(sums[i], of_q, _mm512_loadu_si512(rows[i] + d)); });
  }
  _mm512_storeu_ps(s, _mm512_mul_ps(totals16(sums), _mm512_set1_ps(scale)));
}

// c[M, 32] += a[M, kn] x b[kn, 32], of pairs
template <int M>
[[gnu::flatten]] inline void pair_tile(const uint32_t* a, int64_t lda, const uint32_t* b, float* c, int64_t ldc, int64_t kn) {
  __m512 sums[M * 2];
  each<M * 2>([&](auto i) { sums[i] = _mm512_loadu_ps(c + i / 2 * ldc + i % 2 * 16); });
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

// c[M, width] += a[M, kn] x panels[width / 32][panel_rows][32], of each panel the first kn rows; all but c of pairs
[[gnu::noinline]] void pair_product(int64_t M, int64_t width, const uint32_t* a, int64_t lda, const uint32_t* b,
                                    int64_t panel_rows, float* c, int64_t ldc, int64_t kn) {
  for (int64_t n = 0; n < width; n += PAIR_COLUMNS)
    in_even_tiles<PAIR_ROWS>(M, [&](auto rows, int64_t m) {
      pair_tile<decltype(rows)::value>(a + m * lda, lda, b + n * panel_rows, c + m * ldc + n, ldc, kn);
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

// What softmax_step in radix_attention.cpp does for 64 logits of a row, in powers of two and without soft cap or slopes:
// weights of columns c0..c1 go to `pairs`, 0 elsewhere, and the largest logit, the sum l and o follow. Weights are within
// 2^-17, which rounding them to 8 bits hides.
[[gnu::flatten]] inline void pair_softmax(const float* s, int64_t c0, int64_t c1, float scale, uint32_t* pairs,
                                          float& largest, float& l, float* o, int64_t width) {
  constexpr float LOG2E = 1.44269504088896341f;
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const uint64_t seen = (c1 - c0 >= 64 ? ~uint64_t(0) : (uint64_t(1) << (c1 - c0)) - 1) << (c0 & 63);
  __m512 x[4];
  each<4>([&](auto i) {
    const auto own = static_cast<__mmask16>(c0 < 64 ? seen >> (16 * i) : 0);
    x[i] = _mm512_mask_mul_ps(nothing, own, _mm512_loadu_ps(s + 16 * i), _mm512_set1_ps(scale));
  });
  __mmask16 nan = 0;
  each<4>([&](auto i) { nan |= _mm512_cmp_ps_mask(x[i], x[i], _CMP_UNORD_Q); });
  float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
  top = nan ? std::numeric_limits<float>::quiet_NaN() : std::max(top, largest);
  if (top == -std::numeric_limits<float>::infinity()) {
    each<2>([&](auto i) { _mm512_storeu_si512(pairs + 16 * i, _mm512_setzero_si512()); });
    return;
  }
  if (top != largest) {
    const float shrink = std::exp(largest - top);
    largest = top, l *= shrink;
    for (int64_t d = 0; d < width; d += 16)
      _mm512_storeu_ps(o + d, _mm512_mul_ps(_mm512_loadu_ps(o + d), _mm512_set1_ps(shrink)));
  }
  const __m512 down = _mm512_set1_ps(top * LOG2E);
  each<4>([&](auto i) {
    const __m512 y = _mm512_fmsub_ps(x[i], _mm512_set1_ps(LOG2E), down);
    const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(y, n);
    __m512 p = _mm512_set1_ps(1.3333558e-3f);  // the series of 2^r
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    x[i] = _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p, n);  // NaN stays
  });
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  __m512 total = _mm512_setzero_ps();
  each<2>([&](auto i) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x[2 * i + 1], x[2 * i]);
    _mm512_storeu_si512(pairs + 16 * i, both);
    total = add_pairs(total, both, ones);
  });
  l += _mm512_reduce_add_ps(total);
}

}  // namespace
#endif
