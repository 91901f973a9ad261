// Products of bfloat16 on processors that multiply pairs of them and add to float32 in one instruction (AVX-512 BF16).
// Neither x nor w is decoded, so up to eight rows of x take hardly longer than reading w from memory.
#pragma once

#include "floats.h"

#ifdef PAIRS_IN_HARDWARE
#include <ATen/Parallel.h>

#include <memory>

namespace {

constexpr int64_t PAIRED = 2 * VL;  // columns of a vector

// x, block of columns by block of columns: [K / block][M][stride], which x is already if it has one row or one block.
// Otherwise rows are a cache line longer than a block, so that they do not meet in the same places of the first cache.
struct Packed {
  int64_t M, K, block, stride;
  std::unique_ptr<BFloat16[]> made;
  const BFloat16* data;

  static constexpr int64_t MOST = 1024;  // columns of a block: a tile's rows of x stay in the first cache

  Packed(const BFloat16* x, int64_t M, int64_t K) : M(M), K(K) {
    const int64_t blocks = std::max<int64_t>(1, (K + MOST - 1) / MOST);
    block = ((K + blocks - 1) / blocks + PAIRED - 1) / PAIRED * PAIRED;
    if (M == 1 || blocks == 1) {
      stride = std::max<int64_t>(1, M == 1 ? block : K), data = x;
      return;
    }
    stride = block + PAIRED;
    made.reset(new BFloat16[(K + block - 1) / block * M * stride]);
    data = made.get();
    at::parallel_for(0, M, 1 + 65536 / K, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        for (int64_t k = 0; k < K; k += block) std::copy_n(x + m * K + k, width(k), made.get() + (at(m, k) - data));
    });
  }
  int64_t width(int64_t k) const { return std::min(block, K - k); }
  const BFloat16* at(int64_t m, int64_t k) const { return data + k / block * M * stride + m * stride; }
};

struct PairProduct {
  Plain<BFloat16> w;
  Packed x;

  static constexpr int MR = 6, NR = 4;  // 24 sums, four weights and a value: 29 of 32 registers
  static constexpr int64_t UNIT = VL;   // of rows of w that threads divide
  static constexpr int64_t MOST_BLOCKS = 32;  // of columns, up to which a single row of x has a way of its own

  PairProduct(const Plain<BFloat16>& w, const BFloat16* x, int64_t M) : w(w), x(x, M, w.K) {}
};

// The totals of R vectors, an element each, in each quarter of a vector.
template <int R>
inline __m512 quarters(const __m512* v) {
  const __m512 none = _mm512_setzero_ps();
  const __m512 a = v[0], b = R > 1 ? v[R > 1 ? 1 : 0] : none, c = R > 2 ? v[R > 2 ? 2 : 0] : none,
               d = R > 3 ? v[R > 3 ? 3 : 0] : none;
  const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}

// x · w over n columns. What comes after them is asked for as well.
[[gnu::always_inline]] inline __m512 pair_dot(const BFloat16* x, const BFloat16* w, int64_t n) {
  constexpr int64_t AHEAD = 4096 / sizeof(BFloat16);
  __m512 sum = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + PAIRED <= n; k += PAIRED) {
    __builtin_prefetch(w + k + AHEAD, 0, 2);
    sum = add_pairs(sum, _mm512_loadu_si512(x + k), _mm512_loadu_si512(w + k));
  }
  if (k == n) return sum;
  const __mmask32 there = (1u << (n - k)) - 1;
  return add_pairs(sum, _mm512_maskz_loadu_epi16(there, x + k), _mm512_maskz_loadu_epi16(there, w + k));
}

// sums[m · stride] = quarters of x row m · w rows 0 to R, over a block of n columns; or += if it is not the `first`.
// Asks the memory for what lies `ahead`, as much as AHEAD rows have.
template <int M, int R, int AHEAD>
[[gnu::flatten]] inline void pair_tile(const BFloat16* x, int64_t x_stride, const BFloat16* w, int64_t w_stride,
                                       int64_t n, __m512* sums, int64_t stride, bool first, const BFloat16* ahead) {
  __m512 own[M * R];
  each<M * R>([&](auto i) { own[i] = _mm512_setzero_ps(); });
  const auto step = [&](int64_t at, auto&& load) {
    __m512i b[R];
    each<R>([&](auto r) { b[r] = load(w + r * w_stride + at); });
    each<M>([&](auto m) {
      const __m512i a = load(x + m * x_stride + at);
      each<R>([&](auto r) { own[m * R + r] = add_pairs(own[m * R + r], a, b[r]); });
    });
  };
  int64_t at = 0;
  for (; at + PAIRED <= n; at += PAIRED) {
    each<AHEAD>([&](auto i) { __builtin_prefetch(ahead + i * PAIRED, 0, 2); });
    ahead += AHEAD * PAIRED;
    step(at, [](const BFloat16* p) { return _mm512_loadu_si512(p); });
  }
  if (at < n) step(at, [&](const BFloat16* p) { return _mm512_maskz_loadu_epi16((1u << (n - at)) - 1, p); });
  each<M>([&](auto m) {
    const __m512 four = quarters<R>(own + m * R);
    sums[m * stride] = first ? four : _mm512_add_ps(sums[m * stride], four);
  });
}

// M rows of x with a strip of w. AHEAD: how many rows of the next strip are asked for with each tile, of four, and from
// which on.
template <int M, int AHEAD>
void pair_tiles(const PairProduct& p, int64_t m, int64_t w0, int64_t rows, int64_t k, int64_t from, __m512* sums,
                int64_t stride) {
  const int64_t n = p.x.width(k);
  const BFloat16* ahead = p.w.at(w0 + rows, 0) + k * rows;
  in_tiles<PairProduct::NR>(rows, [&](auto some, int64_t r) {
    constexpr int R = decltype(some)::value;
    pair_tile<M, R, std::min(AHEAD, R)>(p.x.at(m, k), p.x.stride, p.w.at(w0 + r, k), p.w.K, n, sums + r / 4, stride,
                                        k == 0, ahead + (r + from) * n);
  });
}

// All rows of x with a strip of w. The first few tiles of each four rows of it ask for the next strip, in equal parts.
inline void pair_strip(const PairProduct& p, int64_t m0, int64_t m, int64_t w0, int64_t rows, int64_t k, __m512* sums,
                       int64_t stride) {
  const int64_t tiles = (m + PairProduct::MR - 1) / PairProduct::MR, share = tiles == 1 ? 4 : tiles < 4 ? 2 : 1;
  int64_t from = 0;
  in_even_tiles<PairProduct::MR>(m, [&](auto some, int64_t i) {
    constexpr int M = decltype(some)::value;
    const auto meet = [&](auto ahead) {
      pair_tiles<M, decltype(ahead)::value>(p, m0 + i, w0, rows, k, from, sums + i * stride, stride);
      from += ahead;
    };
    if (from >= 4) meet(std::integral_constant<int, 0>());
    else if (share == 4) meet(std::integral_constant<int, 4>());
    else if (share == 2) meet(std::integral_constant<int, 2>());
    else meet(std::integral_constant<int, 1>());
  });
}

// Sixteen elements of y: the totals of four rows of w at a time.
template <class Y>
inline void store_sixteen(const __m512* four, const Y* bias, Y* y, int64_t count) {
  const __m512 a = four[0], b = four[1], c = four[2], d = four[3];
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
  Vec sum(_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)));
  if (bias) sum = sum + load_floats(bias, count);
  store_floats(sum, y, count);
}

// Rows n0..n1 of w with the only row of x: they are gone through one by one, whole, as they lie in memory. BLOCKS: of
// columns, or 0 if they are more.
template <int BLOCKS, class Y>
void part_of_row(const PairProduct& p, const Y* bias, Y* y, int64_t n0, int64_t n1) {
  const int64_t K = p.w.K, block = p.x.block, blocks = BLOCKS ? BLOCKS : (K + block - 1) / block;
  const BFloat16* const x = p.x.data;
  const BFloat16* w = p.w.at(n0, 0);
  for (int64_t n = n0; n < n1; n += VL) {
    const int64_t count = std::min(VL, n1 - n);
    __m512 sums[4];
    for (int64_t j = 0; j < 4; ++j) {
      __m512 own[BLOCKS ? BLOCKS : PairProduct::MOST_BLOCKS][4];
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t b = 0; b < blocks; ++b)
          own[b][i] = pair_dot(x + b * block, w + b * block, std::min(block, K - b * block));
        if (4 * j + i + 1 < count) w += K;  // beyond the last row: not used
      }
      sums[j] = quarters<4>(own[0]);
      for (int64_t b = 1; b < blocks; ++b) sums[j] = _mm512_add_ps(sums[j], quarters<4>(own[b]));
    }
    w += K;
    store_sixteen(sums, bias ? bias + n : nullptr, y + n, count);
  }
}

// Rows n0..n1 of w with all rows of x, a strip of w after the other. What memory is asked for is the strip that comes
// next, in the order of its addresses: several rows at once are short streams, which the processor by itself follows
// badly. The second cache has room for two strips.
template <class Y>
void part(const PairProduct& p, int64_t N, const Y* bias, Y* y, int64_t n0, int64_t n1) {
  constexpr int64_t MOST = 48, STRIDE = MOST / 4 + 1;  // rows of a strip
  alignas(64) thread_local __m512 sums[MB * STRIDE];
  const int64_t K = p.w.K, M = p.x.M;
  if (M == 1 && K > 0 && K <= PairProduct::MOST_BLOCKS * p.x.block) {
    if (K <= p.x.block) return part_of_row<1>(p, bias, y, n0, n1);
    return part_of_row<0>(p, bias, y, n0, n1);
  }
  const int64_t most = std::clamp<int64_t>((1 << 17) / std::max<int64_t>(1, K) / VL * VL, VL, MOST);
  for (int64_t m0 = 0; m0 < M; m0 += MB) {
    const int64_t m = std::min(MB, M - m0);
    for (int64_t w0 = n0; w0 < n1; w0 += most) {
      const int64_t rows = std::min(most, n1 - w0);
      if (K == 0) std::fill_n(sums, m * STRIDE, _mm512_setzero_ps());
      for (int64_t k = 0; k < K; k += p.x.block) pair_strip(p, m0, m, w0, rows, k, sums, STRIDE);
      for (int64_t i = 0; i < m; ++i) {
        const int64_t at = (m0 + i) * N + w0;
        for (int64_t j = 0; j < rows; j += VL)  // sums beyond the last row: not used
          store_sixteen(sums + i * STRIDE + j / 4, bias ? bias + w0 + j : nullptr, y + at + j, std::min(VL, rows - j));
      }
    }
  }
}

}  // namespace
#endif
