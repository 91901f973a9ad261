// Products of bfloat16 on processors that multiply pairs of them and add to float32 in one instruction (AVX-512 BF16).
// Neither x nor w is decoded, so up to eight rows of x take no longer than reading w from memory.
#pragma once

#include "floats.h"

#ifdef PAIRS_IN_HARDWARE
#include <ATen/Parallel.h>

#include <memory>

namespace {

constexpr int64_t PAIRED = 2 * VL;  // columns of a vector

// x, block of columns by block of columns, if that makes any difference: [K / block][M][stride]. Rows are a cache line
// longer than a block, so that they do not meet in the same places of the first cache.
struct Packed {
  int64_t M, K, block, stride;
  std::unique_ptr<BFloat16[]> made;
  const BFloat16* data;

  static constexpr int64_t MOST = 1024;  // columns of a block: a tile's rows of x stay in the first cache

  Packed(const BFloat16* x, int64_t M, int64_t K) : M(M), K(K) {
    const int64_t blocks = std::max<int64_t>(1, (K + MOST - 1) / MOST);
    if (M == 1 || blocks == 1) {
      block = stride = std::max<int64_t>(1, K), data = x;
      return;
    }
    block = ((K + blocks - 1) / blocks + PAIRED - 1) / PAIRED * PAIRED;
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
  static constexpr int FEW = 8;
  static constexpr bool BY_ROW = false;
  static constexpr int side_by_side(int m) { return m <= 4 ? 6 : 24 / m; }

  PairProduct(const Plain<BFloat16>& w, const BFloat16* x, int64_t M) : w(w), x(x, M, w.K) {}

  Vec scales(int64_t, int64_t) const { return Vec(1.0f); }

  template <int M, int R>
  void few(const Strip& strip, int64_t row, int64_t m0, int64_t k, Vec* sums) const {
    tile<M, R, true>(strip, row, m0, k, sums);
  }

  template <int R>
  void many(const Strip& strip, int64_t row, int64_t m0, int64_t m, int64_t k, Vec* sums, int64_t, int64_t) const {
    in_even_tiles<MR>(m, [&](auto rows, int64_t i) {
      constexpr int M = decltype(rows)::value;
      if (i == 0) tile<M, R, true>(strip, row, m0, k, sums);
      else tile<M, R, false>(strip, row, m0 + i, k, sums + i * STRIDE);
    });
  }

 private:
  // `AHEAD`: asks the memory for the strip after this one, in the order of its addresses, and as much at a time as is
  // used at a time. Several rows at once are short streams, which the processor by itself follows badly; and the second
  // cache is where a whole strip finds room.
  template <int M, int R, bool AHEAD>
  void tile(const Strip& strip, int64_t row, int64_t m0, int64_t k, Vec* sums) const {
    const int64_t n = x.width(k);
    const BFloat16 *of_x = x.at(m0, k), *of_w = w.at(row, k);
    [[maybe_unused]] const char* ahead = reinterpret_cast<const char*>(
        w.at(strip.begin + strip.rows, 0) + k * strip.rows + (row - strip.begin) * n);
    __m512 own[M * R];
    each<M * R>([&](auto i) { own[i] = k ? sums[i / R * STRIDE + i % R] : Vec(0.0f); });
    const auto step = [&](int64_t at, auto&& load) __attribute__((always_inline)) {
      __m512i b[R];
      each<R>([&](auto r) { b[r] = load(of_w + r * w.K + at); });
      each<M>([&](auto m) {
        const __m512i a = load(of_x + m * x.stride + at);
        each<R>([&](auto r) { own[m * R + r] = add_pairs(own[m * R + r], a, b[r]); });
      });
    };
    int64_t at = 0;
    for (; at + PAIRED <= n; at += PAIRED) {
      if constexpr (AHEAD) {
        each<R>([&](auto r) { __builtin_prefetch(ahead + r * 64, 0, 2); });
        ahead += R * 64;
      }
      step(at, [](const BFloat16* p) { return _mm512_loadu_si512(p); });
    }
    if (at < n) step(at, [&](const BFloat16* p) { return _mm512_maskz_loadu_epi16((1u << (n - at)) - 1, p); });
    each<M * R>([&](auto i) { sums[i / R * STRIDE + i % R] = own[i]; });
  }
};

}  // namespace
#endif
