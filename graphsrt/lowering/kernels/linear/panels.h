// Products of bfloat16 with many rows of x, where the processor multiplies pairs of them (AVX-512 BF16). A panel of 48
// rows of w is rearranged, so that a vector holds a pair of columns of sixteen of its rows, and meets all rows of x. That
// costs little for each weight: a pair of x, broadcast, then serves 48 sums, and none is ever added up across lanes.
//
// The panel's weights are in the second cache. While it meets x, the memory is asked for the one that comes next.
// Source of the idea: the packed panels of GotoBLAS (Goto and van de Geijn, 2008).
#pragma once

#include "pairs.h"

#ifdef PAIRS_IN_HARDWARE
#include <cstring>
#include <vector>

namespace {

constexpr int GROUPS = 3, PANEL = GROUPS * VL;   // rows of w
constexpr int PANEL_ROWS = 8;                    // of x, at a time: 24 sums, three weights and a value in 32 registers
constexpr int64_t PANEL_COLUMNS = 2048;          // of a block of a panel
constexpr int64_t LINE = 64;

// `pairs` of columns from w on, of `count` rows K apart, as [pairs][PANEL]; zeros for rows beyond.
inline void rearrange(const BFloat16* w, int64_t K, int64_t pairs, int64_t count, uint32_t* panel) {
  for (int64_t p = 0; p < pairs; p += VL) {
    const int64_t some = std::min<int64_t>(VL, pairs - p);
    const auto there = static_cast<__mmask16>((1u << some) - 1);
    for (int64_t g = 0; g < GROUPS; ++g) {
      __m512i v[16];
      for (int64_t r = 0; r < VL; ++r)
        v[r] = _mm512_maskz_loadu_epi32(g * VL + r < count ? there : 0, w + (g * VL + r) * K + 2 * p);
      transpose16(v);
      for (int64_t i = 0; i < some; ++i) _mm512_store_si512(panel + (p + i) * PANEL + g * VL, v[i]);
    }
  }
}

// Which of a panel's blocks of columns this is: the first begins the sums, the last writes them down as y.
struct Block {
  bool first, last;
};

// M rows of x with a block of a panel. `sums` [M][PANEL] are kept between blocks; y: `count` columns, N apart.
template <int M, class Bias>
[[gnu::flatten]] inline void panel_tile(const BFloat16* x, int64_t K, const uint32_t* panel, int64_t pairs, Block block,
                                        float* sums, const Bias& bias, BFloat16* y, int64_t N, int64_t count) {
  __m512 own[M][GROUPS];
  each<M>([&](auto m) {
    each<GROUPS>([&](auto g) {
      own[m][g] = block.first ? _mm512_setzero_ps() : _mm512_load_ps(sums + m * PANEL + g * VL);
    });
  });
  for (int64_t p = 0; p < pairs; ++p) {
    __m512i b[GROUPS];
    each<GROUPS>([&](auto g) { b[g] = _mm512_load_si512(panel + p * PANEL + g * VL); });
    each<M>([&](auto m) {
      int32_t pair;
      std::memcpy(&pair, x + m * K + 2 * p, sizeof(pair));
      const __m512i a = _mm512_set1_epi32(pair);
      each<GROUPS>([&](auto g) { own[m][g] = add_pairs(own[m][g], a, b[g]); });
    });
  }
  each<M>([&](auto m) {
    each<GROUPS>([&](auto g) {
      if (!block.last) return _mm512_store_ps(sums + m * PANEL + g * VL, own[m][g]);
      const int64_t some = std::min<int64_t>(VL, count - g * VL);
      if (some <= 0) return;
      const Vec sum = bias(own[m][g], g, some);
      store_floats(sum, y + m * N + g * VL, some);
    });
  });
}

// y rows 0..M, columns n0..n1.
inline void part_in_panels(const BFloat16* x, const Plain<BFloat16>& w, const BFloat16* bias, BFloat16* y, int64_t M,
                           int64_t N, int64_t n0, int64_t n1) {
  const int64_t K = w.K, blocks = (K + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
  const int64_t width = ((K + blocks - 1) / blocks + PAIRED - 1) / PAIRED * PAIRED;
  static thread_local std::vector<__m512> memory;  // aligned as these are
  const int64_t of_panel = std::min(width, K) / 2 * GROUPS, of_sums = blocks > 1 ? M * GROUPS : 0;
  if (static_cast<int64_t>(memory.size()) < of_panel + of_sums) memory.resize(of_panel + of_sums);
  auto* const panel = reinterpret_cast<uint32_t*>(memory.data());
  auto* const sums = reinterpret_cast<float*>(memory.data() + of_panel);
  const int64_t tiles = M / PANEL_ROWS + M % PANEL_ROWS / 4 + M % 4;
  for (int64_t n = n0; n < n1; n += PANEL) {
    const int64_t count = std::min<int64_t>(PANEL, n1 - n);
    for (int64_t k = 0; k < K; k += width) {
      const Block block{k == 0, k + width >= K};
      const int64_t pairs = std::min(width, K - k) / 2;
      rearrange(w.at(n, k), K, pairs, count, panel);
      // What comes next, an equal part of it with each tile.
      const int64_t next_n = block.last ? n + PANEL : n, next_k = block.last ? 0 : k + width;
      const int64_t next_rows = std::clamp<int64_t>(n1 - next_n, 0, PANEL);
      const int64_t row_lines = (std::min(width, K - next_k) * 2 + LINE - 1) / LINE, lines = next_rows * row_lines;
      int64_t line = 0, tile = 0;
      const auto ask = [&] {
        for (const int64_t until = lines * ++tile / tiles; line < until; ++line)
          __builtin_prefetch(reinterpret_cast<const char*>(w.at(next_n + line / row_lines, next_k)) +
                                 line % row_lines * LINE, 0, 2);
      };
      const auto with_bias = [&](__m512 sum, int64_t g, int64_t some) {
        return bias ? Vec(sum) + load_floats(bias + n + g * VL, some) : Vec(sum);
      };
      const auto meet = [&](auto rows, int64_t m) {
        ask();
        panel_tile<decltype(rows)::value>(x + m * K + k, K, panel, pairs, block, sums + m * PANEL, with_bias,
                                          y + m * N + n, N, count);
      };
      int64_t m = 0;
      for (; m + PANEL_ROWS <= M; m += PANEL_ROWS) meet(std::integral_constant<int, PANEL_ROWS>(), m);
      for (; m + 4 <= M; m += 4) meet(std::integral_constant<int, 4>(), m);
      for (; m < M; ++m) meet(std::integral_constant<int, 1>(), m);
    }
  }
}

}  // namespace
#endif
