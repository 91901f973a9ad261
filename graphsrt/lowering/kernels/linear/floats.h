// Products in float32: weights of 16 or 32 bits, or integers of 8 bits with a scale for each row, become float32 in
// registers, as they are read. With many rows of x that happens again for each few of them, out of the first cache:
// multiplying takes longer, so it costs nothing, where writing them down as float32 would.
#pragma once

#include <ATen/Parallel.h>

#include <memory>

#include "tile.h"

namespace {

constexpr int64_t KB = 512;  // columns of a block: a tile of w and the rows that it meets stay in the first cache

// ---- how weights are stored ----------------------------------------------------------------------------------------

// A row's columns k0..k0+n become float32. `n` is a multiple of VL, but for the last block of a row.
template <class T>
struct Plain {
  const T* data;
  int64_t K;
  const T* at(int64_t row, int64_t k) const { return data + row * K + k; }
  Vec scales(int64_t, int64_t) const { return Vec(1.0f); }
  static Vec load(const T* p) {
    if constexpr (std::is_same_v<T, float>) return Vec::loadu(p);
#if defined(CPU_CAPABILITY_AVX2)
    else if constexpr (std::is_same_v<T, BFloat16>)
      return Vec(_mm256_castsi256_ps(
          _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16)));
    else
      return Vec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(CPU_CAPABILITY_AVX512)
    else if constexpr (std::is_same_v<T, BFloat16>)
      return Vec(_mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16)));
    else
      return Vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
    else {
      alignas(64) float out[VL];
      for (int64_t i = 0; i < VL; ++i) out[i] = static_cast<float>(p[i]);
      return Vec::loadu(out);
    }
#endif
  }
  static float one(const T* p) { return static_cast<float>(*p); }
};

struct Int8 {
  const int8_t* data;
  const float* of_rows;  // [N]
  int64_t K;
  const int8_t* at(int64_t row, int64_t k) const { return data + row * K + k; }
  Vec scales(int64_t row, int64_t count) const { return load_floats(of_rows + row, count); }
  static Vec load(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX2)
    return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#elif defined(CPU_CAPABILITY_AVX512)
    return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#else
    alignas(64) float out[VL];
    for (int64_t i = 0; i < VL; ++i) out[i] = static_cast<float>(p[i]);
    return Vec::loadu(out);
#endif
  }
  static float one(const int8_t* p) { return static_cast<float>(*p); }
};

template <class Format>
void decode(const Format& w, int64_t row, int64_t k, int64_t n, float* out) {
  const auto* p = w.at(row, k);
  int64_t i = 0;
  for (; i + VL <= n; i += VL) Format::load(p + i).store(out + i);
  for (; i < n; ++i) out[i] = Format::one(p + i);
}

// ---- dot products --------------------------------------------------------------------------------------------------

// sums[m · STRIDE + r] = x row m · w row r, over n columns, or += if these are not the `first`; rows of x lie one behind
// the other.
// `AHEAD`: w comes out of memory, and what follows these rows is asked for.
template <int M, int N, bool AHEAD, class Format, class P>
inline void tile(const float* x, const P* w, int64_t n, Vec* sums, bool first) {
  Vec own[M][N];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < N; ++r) own[m][r] = first ? Vec(0.0f) : sums[m * STRIDE + r];
  int64_t k = 0;
  const auto step = [&](auto&& of_w, auto&& of_x) {
    Vec b[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) b[r] = in_register(of_w(w[r]));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec a = in_register(of_x(x + m * n + k));
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) own[m][r] = at::vec::fmadd(a, b[r], own[m][r]);
    }
  };
  [[maybe_unused]] const char* ahead = reinterpret_cast<const char*>(w[0]) + N * n * sizeof(*w[0]);
  for (; k + VL <= n; k += VL) {
    if constexpr (AHEAD) ahead = prefetch<N * VL * sizeof(*w[0])>(ahead);
    step([&](P p) { return Format::load(p + k); }, [](const float* p) { return Vec::loadu(p); });
  }
  if (k < n) {
    const auto last = [&](P p) {
      alignas(64) float out[VL] = {};
      for (int64_t i = k; i < n; ++i) out[i - k] = Format::one(p + i);
      return Vec::loadu(out);
    };
    step(last, [&](const float* p) { return Vec::loadu(p, n - k); });
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < N; ++r) sums[m * STRIDE + r] = own[m][r];
}

// ---- a product -----------------------------------------------------------------------------------------------------

// x in float32, block of columns by block of columns: [K / block][M][block], the last block as wide as it is.
struct Wide {
  int64_t M, K, block;
  std::unique_ptr<float[]> made;
  const float* data;  // of `made`, or x as it was given

  template <class Y>
  Wide(const Y* x, int64_t M, int64_t K, int64_t block) : M(M), K(K), block(block) {
    if constexpr (std::is_same_v<Y, float>) {
      data = x;
      if (block >= K) return;
    }
    made.reset(new float[M * K]);
    data = made.get();
    at::parallel_for(0, M, 1 + 65536 / std::max<int64_t>(1, K), [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        for (int64_t k = 0; k < K; k += block)
          decode(Plain<Y>{x, K}, m, k, width(k), made.get() + (at(m, k) - data));
    });
  }
  int64_t width(int64_t k) const { return std::min(block, K - k); }
  const float* at(int64_t m, int64_t k) const { return data + k * M + m * width(k); }
};

template <class Format>
struct FloatProduct {
  Format w;
  Wide x;

  // Rows of x and of w in a tile: MR x NR sums, NR weights and a value are as many vectors as there are registers, or a
  // few less. The fewer rows x has, the more of w go side by side: that keeps as many sums under way as hide the time
  // that an addition takes, and as many streams as memory can serve.
  static constexpr int MR = VL == 16 ? 6 : 4, NR = VL == 16 ? 4 : 3;
  static constexpr int64_t UNIT = NR;  // of rows of w that threads divide
  static constexpr int side_by_side(int m) { return m == 1 ? 6 : m == 2 ? 4 : NR; }

  static constexpr int FEW = 4;  // up to so many rows of x, w comes out of memory as it is needed

  template <class Y>
  FloatProduct(const Format& w, const Y* x, int64_t M)
      : w(w), x(x, M, w.K, M <= FEW ? std::max<int64_t>(1, w.K) : KB) {}

  Vec scales(int64_t row, int64_t count) const { return w.scales(row, count); }

  // These two are compiled once for x of any dtype: nothing takes the compiler longer. GCC would inline them into what
  // calls them, and not what they call.
  template <int M, int R>
  [[gnu::noinline, gnu::flatten]] void few(int64_t row, int64_t m0, int64_t k, Vec* sums) const {
    meet<M, R, true>(row, m0, k, sums);
  }

  // While rows of x meet these rows of w, the memory is asked for those that come next, a part by each tile.
  template <int R>
  [[gnu::noinline, gnu::flatten]] void many(int64_t row, int64_t m0, int64_t m, int64_t k, Vec* sums, int64_t next_row, int64_t next_k) const {
    const int64_t bytes = x.width(next_k) * sizeof(*w.at(0, 0)), tiles = (m + MR - 1) / MR;
    int64_t asked = 0, turn = 0;
    in_tiles<MR>(m, [&](auto rows, int64_t i) {
      for (const int64_t until = bytes * ++turn / tiles; asked < until; asked += 64)
        for (int r = 0; r < R; ++r) prefetch<64>(reinterpret_cast<const char*>(w.at(next_row + r, next_k)) + asked);
      meet<decltype(rows)::value, R, false>(row, m0 + i, k, sums + i * STRIDE);
    });
  }

 private:
  template <int M, int R, bool AHEAD>
  void meet(int64_t row, int64_t m, int64_t k, Vec* sums) const {
    decltype(w.at(0, 0)) rows[R];
    for (int r = 0; r < R; ++r) rows[r] = w.at(row + r, k);
    tile<M, R, AHEAD, Format>(x.at(m, k), rows, x.width(k), sums, k == 0);
  }
};

}  // namespace
