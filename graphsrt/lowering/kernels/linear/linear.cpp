// y[M, N] = x[M, K] · w[N, K]ᵀ (+ bias) for few rows of x and many of w: the weights are read once, as they are stored
// (16 or 32 bits, or integers of 8 or 4 bits), and everything is multiplied and summed in float32.
//
// A row of w and a row of x lie contiguous in memory, so an element of y is a dot product along both: vectors run along
// K, and are summed at the very end. Up to FEW rows of x the weights are decoded in registers; with more of
// them a tile of w is decoded once into the first-level cache and multiplied with all. The sum of an element is formed
// in the same order for every M, so a row's result does not depend on which others are in the batch.
//
// Regions that Inductor compiles call the C functions at the end; the dispatcher calls the rest.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using at::BFloat16;
using at::Half;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t VL = Vec::size();

constexpr int64_t KB = 512;       // columns of a block: a tile of w and the rows that it meets stay in the first cache
constexpr int64_t MB = 96;        // rows of x that are gone through with one block of columns: in the second cache
constexpr int64_t FEW = 4;        // up to so many rows weights are decoded in registers
constexpr int64_t NR = VL == 16 ? 4 : 3;  // rows of w and of x in a tile: MR x NR sums, NR weights and a value
constexpr int64_t MR = VL == 16 ? 6 : 4;  // are as many vectors as there are registers, or a few less
constexpr int64_t GROUP = 32;     // int4: columns with a scale and an offset of their own

// ---- how weights are stored ----------------------------------------------------------------------------------------

// A row's columns k0..k0+n become float32. `n` is a multiple of VL, but for the last block of a row.
template <class T>
struct Plain {
  const T* data;
  int64_t K;
  static constexpr bool in_registers = true;  // with few rows of x there is no need for a tile
  const T* at(int64_t row, int64_t k) const { return data + row * K + k; }
  float scale(int64_t) const { return 1.0f; }
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
  const float* scales;  // [N]
  int64_t K;
  static constexpr bool in_registers = true;
  const int8_t* at(int64_t row, int64_t k) const { return data + row * K + k; }
  float scale(int64_t row) const { return scales[row]; }
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

// Four bits a number, q · scale + offset. 64 columns lie in eight words of 32 bits: word j holds column 8 s + j in its
// bits 4 s to 4 s + 3. If 32 columns are left at the end of a row, the upper halves of its last words are not used.
struct Int4 {
  const uint8_t* data;   // [N, ceil(K / 64) · 32]
  const uint32_t* pairs;  // [N, K / GROUP]: scale and offset, each as BFloat16
  int64_t K;
#if defined(CPU_CAPABILITY_AVX2)
  static constexpr bool in_registers = true;
#else
  static constexpr bool in_registers = false;
#endif
  float scale(int64_t) const { return 1.0f; }
  const uint8_t* at(int64_t row, int64_t k) const { return data + (row * ((K + 63) / 64) + k / 64) * 32; }
  const uint32_t* pair(int64_t row, int64_t k) const { return pairs + (row * K + k) / GROUP; }
};

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// f(i, columns 8 i .. 8 i + 7 as float32) for the columns of one group, the lower or upper half of eight words
template <bool UPPER, class F>
inline void each_of_group(__m256i words, uint32_t pair, F&& f) {
  const __m256i both = _mm256_set1_epi32(pair);
  const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  const __m256 offset = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000)));
  const __m256 scale_16 = _mm256_mul_ps(scale, _mm256_set1_ps(0.0625f));  // exact: for bits 4 to 7 where they are
  const __m256i low = _mm256_set1_epi32(0x0f), high = _mm256_set1_epi32(0xf0);
  const auto give = [&](int i, __m256i q, __m256 by) { f(i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), by, offset)); };
  const __m256i first = UPPER ? _mm256_srli_epi32(words, 16) : words, second = _mm256_srli_epi32(words, UPPER ? 24 : 8);
  give(0, _mm256_and_si256(first, low), scale), give(1, _mm256_and_si256(first, high), scale_16);
  give(2, _mm256_and_si256(second, low), scale), give(3, _mm256_and_si256(second, high), scale_16);
}
#endif

template <class Format>
void decode(const Format& w, int64_t row, int64_t k, int64_t n, float* out) {
  const auto* p = w.at(row, k);
  if constexpr (std::is_same_v<Format, Int4>) {
    const uint32_t* pair = w.pair(row, k);
    for (int64_t i = 0; i < n; i += 64, p += 32, pair += 2) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      each_of_group<false>(words, pair[0], [&](int j, __m256 v) { _mm256_storeu_ps(out + i + 8 * j, v); });
      if (i + GROUP < n)
        each_of_group<true>(words, pair[1], [&](int j, __m256 v) { _mm256_storeu_ps(out + i + GROUP + 8 * j, v); });
#else
      for (int64_t c = 0; c < std::min<int64_t>(64, n - i); ++c) {
        uint32_t word, scale = pair[c / GROUP] << 16, offset = pair[c / GROUP] & 0xffff0000u;
        float by, plus;
        std::memcpy(&word, p + c % 8 * 4, 4), std::memcpy(&by, &scale, 4), std::memcpy(&plus, &offset, 4);
        out[i + c] = static_cast<float>(word >> (c / 8 * 4) & 15) * by + plus;
      }
#endif
    }
  } else {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) Format::load(p + i).store(out + i);
    for (; i < n; ++i) out[i] = Format::one(p + i);
  }
}

// ---- dot products --------------------------------------------------------------------------------------------------
//
// A sum is a vector of VL partial ones while it goes over the blocks of columns, and is summed up when all have been
// seen. So it is formed in the same order however the work is divided.

#if defined(CPU_CAPABILITY_AVX2)
// The totals of eight vectors, in order.
inline Vec totals(const Vec* v) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return Vec(_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
}
#else
inline Vec totals(const Vec* v) {
  alignas(64) float out[VL];
  for (int64_t i = 0; i < VL; ++i)
    out[i] = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, Vec(v[i]));
  return Vec::loadu(out);
}
#endif

// Rows of w that are gone through side by side lie one behind the other, and so do the next ones. The processor sees
// short streams that end and begin; this asks for what comes after them, as much at a time as is used at a time.
template <int BYTES>
inline const char* prefetch(const char* p) {
#pragma GCC unroll 8
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + i);
  return p + BYTES;
}

// A vector of a row of w: decoded as it is read, or out of the tile that was decoded before.
template <class Format>
struct AsStored {
  static constexpr bool from_memory = true;
  using P = decltype(std::declval<Format>().at(0, 0));
  static Vec load(P p, int64_t k) { return Format::load(p + k); }
  static Vec last(P p, int64_t k, int64_t n) {
    alignas(64) float out[VL] = {};
    for (int64_t i = k; i < n; ++i) out[i - k] = Format::one(p + i);
    return Vec::loadu(out);
  }
};

struct Decoded {
  static constexpr bool from_memory = false;
  using P = const float*;
  static Vec load(P p, int64_t k) { return Vec::loadu(p + k); }
  static Vec last(P p, int64_t k, int64_t n) { return Vec::loadu(p + k, n - k); }
};

// The compiler would load a value again for each product that it is in; loads are what there are too few of.
inline Vec in_register(Vec v) {
#if defined(__x86_64__) && (defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512))
  std::conditional_t<VL == 16, __m512, __m256> value = v;
  asm("" : "+v"(value));
  return Vec(value);
#else
  return v;
#endif
}

// sums[m · stride + r] += x row m · w row r, over n columns.
template <int M, int N, class Read>
inline void tile(const float* x, int64_t x_stride, const typename Read::P* w, int64_t n, Vec* sums, int64_t stride) {
  Vec own[M][N];
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < N; ++r) own[m][r] = sums[m * stride + r];
  int64_t k = 0;
  const auto step = [&](auto&& of_w, auto&& of_x) {
    Vec b[N];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) b[r] = in_register(of_w(w[r]));
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec a = in_register(of_x(x + m * x_stride + k));
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) own[m][r] = at::vec::fmadd(a, b[r], own[m][r]);
    }
  };
  [[maybe_unused]] const char* ahead = reinterpret_cast<const char*>(w[0]) + N * n * sizeof(*w[0]);
  for (; k + VL <= n; k += VL) {
    if constexpr (Read::from_memory) ahead = prefetch<N * VL * sizeof(*w[0])>(ahead);
    step([&](auto p) { return Read::load(p, k); }, [](const float* p) { return Vec::loadu(p); });
  }
  if (k < n)
    step([&](auto p) { return Read::last(p, k, n); }, [&](const float* p) { return Vec::loadu(p, n - k); });
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < N; ++r) sums[m * stride + r] = own[m][r];
}

// As `tile` for any number of rows of x.
template <int N>
void tiles(int64_t M, const float* x, int64_t x_stride, const float* const* w, int64_t n, Vec* sums, int64_t stride) {
  int64_t m = 0;
  for (; m + MR <= M; m += MR) tile<MR, N, Decoded>(x + m * x_stride, x_stride, w, n, sums + m * stride, stride);
  x += m * x_stride, sums += m * stride;
  switch (M - m) {
    case 1: return tile<1, N, Decoded>(x, x_stride, w, n, sums, stride);
    case 2: return tile<2, N, Decoded>(x, x_stride, w, n, sums, stride);
    case 3: return tile<3, N, Decoded>(x, x_stride, w, n, sums, stride);
    case 4: if constexpr (MR > 4) return tile<4, N, Decoded>(x, x_stride, w, n, sums, stride); break;
    case 5: if constexpr (MR > 5) return tile<5, N, Decoded>(x, x_stride, w, n, sums, stride); break;
  }
}

#if defined(CPU_CAPABILITY_AVX2)
// As `tile` for weights of 4 bits.
template <int M, int N>
void int4_tile(const float* x, int64_t x_stride, const Int4& w, int64_t row, int64_t k0, int64_t n, Vec* sums,
               int64_t stride) {
  __m256 own[M][N];
  const uint8_t* p[N];
  const uint32_t* pair[N];
  for (int r = 0; r < N; ++r) {
    p[r] = w.at(row + r, k0), pair[r] = w.pair(row + r, k0);
    for (int m = 0; m < M; ++m) own[m][r] = sums[m * stride + r];
  }
  const char* ahead = reinterpret_cast<const char*>(w.at(row + N, k0));
  for (int64_t k = 0; k < n; k += 64, x += 64) {
    ahead = prefetch<N * 32>(ahead);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p[r] + k / 2));
      each_of_group<false>(words, pair[r][k / GROUP], [&](int i, __m256 b) {
        for (int m = 0; m < M; ++m)
          own[m][r] = _mm256_fmadd_ps(_mm256_loadu_ps(x + m * x_stride + 8 * i), b, own[m][r]);
      });
    }
    if (k + GROUP == n) break;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p[r] + k / 2));
      each_of_group<true>(words, pair[r][k / GROUP + 1], [&](int i, __m256 b) {
        for (int m = 0; m < M; ++m)
          own[m][r] = _mm256_fmadd_ps(_mm256_loadu_ps(x + m * x_stride + GROUP + 8 * i), b, own[m][r]);
      });
    }
  }
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < N; ++r) sums[m * stride + r] = Vec(own[m][r]);
}
#endif

// How many rows of w are gone through side by side. The fewer rows x has, the more of w: that keeps as many sums under
// way as hide the time that an addition takes, and as many streams as memory can serve.
constexpr int side_by_side(int64_t m) { return m == 1 ? 6 : m == 2 ? 4 : NR; }

template <int MOST, class F>
inline void with_rows(int64_t count, int64_t r, int64_t k, F&& f) {
  if constexpr (MOST > 1)
    if (count < MOST) return with_rows<MOST - 1>(count, r, k, f);
  f(std::integral_constant<int, MOST>(), r, k);
}

// ---- a product -----------------------------------------------------------------------------------------------------

// x in float32, block of columns by block of columns: [K / block][M][block], the last block as wide as it is.
struct Blocks {
  const float* data;
  int64_t M, K, block;
  int64_t width(int64_t k) const { return std::min(block, K - k); }
  const float* at(int64_t m, int64_t k) const { return data + k * M + m * width(k); }
};

// Columns k.. of rows row..row+R of w, with M rows of x from m0 on.
template <int M, int R, class Format>
inline void meet_few(const Format& w, int64_t row, const Blocks& x, int64_t m0, int64_t k, Vec* sums, int64_t stride) {
  const int64_t n = x.width(k);
#if defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<Format, Int4>)
    return int4_tile<M, R>(x.at(m0, k), n, w, row, k, n, sums, stride);
#endif
  if constexpr (!std::is_same_v<Format, Int4>) {
    typename AsStored<Format>::P rows[R];
    for (int r = 0; r < R; ++r) rows[r] = w.at(row + r, k);
    tile<M, R, AsStored<Format>>(x.at(m0, k), n, rows, n, sums, stride);
  }
}

// The same with m rows of x, out of a decoded tile of w.
template <int R, class Format>
inline void meet_many(const Format& w, int64_t row, const Blocks& x, int64_t m0, int64_t m, int64_t k, float* tile_of_w,
                      Vec* sums, int64_t stride) {
  const int64_t n = x.width(k);
  const float* rows[R];
  for (int r = 0; r < R; ++r) {
    if constexpr (std::is_same_v<Format, Plain<float>>) {
      rows[r] = w.at(row + r, k);
    } else {
      decode(w, row + r, k, n, tile_of_w + r * KB);
      rows[r] = tile_of_w + r * KB;
    }
  }
  tiles<R>(m, x.at(m0, k), n, rows, n, sums, stride);
}

// Rows n0..n1 of w with all rows of x.
template <class Format, class Y>
void part(const Format& w, const Blocks& x, int64_t N, const Y* bias, Y* y, int64_t n0, int64_t n1) {
  constexpr int64_t WIDE = 24;  // rows of w whose sums are under way at a time: a multiple of every side_by_side
  alignas(64) thread_local float tile_of_w[NR * KB];
  alignas(64) thread_local Vec sums[MB * (WIDE + VL)];
  constexpr int64_t STRIDE = WIDE + VL;  // room for whole vectors at the end
  for (int64_t m0 = 0; m0 < x.M; m0 += MB) {
    const int64_t m = std::min(MB, x.M - m0);
    for (int64_t w0 = n0; w0 < n1; w0 += WIDE) {
      const int64_t wide = std::min(WIDE, n1 - w0);
      for (int64_t i = 0; i < m; ++i) std::fill_n(sums + i * STRIDE, wide, Vec(0.0f));
      const bool by_row = m * x.K <= 1 << 16;  // x stays in the second cache: read w as it lies
      const auto over = [&](auto side, auto&& meet) {
        constexpr int SIDE = decltype(side)::value;
        const auto visit = [&](int64_t r, int64_t k) { with_rows<SIDE>(std::min<int64_t>(SIDE, wide - r), r, k, meet); };
        if (by_row) {
          for (int64_t r = 0; r < wide; r += SIDE)
            for (int64_t k = 0; k < x.K; k += x.block) visit(r, k);
        } else {
          for (int64_t k = 0; k < x.K; k += x.block)
            for (int64_t r = 0; r < wide; r += SIDE) visit(r, k);
        }
      };
      const auto few = [&](auto rows_of_x) {
        constexpr int M = decltype(rows_of_x)::value;
        over(std::integral_constant<int, side_by_side(M)>(), [&](auto rows, int64_t r, int64_t k) {
          meet_few<M, decltype(rows)::value>(w, w0 + r, x, m0, k, sums + r, STRIDE);
        });
      };
      if (Format::in_registers && m == 1) few(std::integral_constant<int, 1>());
      else if (Format::in_registers && m == 2) few(std::integral_constant<int, 2>());
      else if (Format::in_registers && m == 3) few(std::integral_constant<int, 3>());
      else if (Format::in_registers && m == 4) few(std::integral_constant<int, 4>());
      else
        over(std::integral_constant<int, NR>(), [&](auto rows, int64_t r, int64_t k) {
          meet_many<decltype(rows)::value>(w, w0 + r, x, m0, m, k, tile_of_w, sums + r, STRIDE);
        });
      for (int64_t i = 0; i < m; ++i) {
        Y* out = y + (m0 + i) * N + w0;
        for (int64_t j = 0; j < wide; j += VL) {
          alignas(64) float sum[VL];
          totals(sums + i * STRIDE + j).store(sum);
          for (int64_t c = j; c < std::min(wide, j + VL); ++c) {
            const float own = sum[c - j] * w.scale(w0 + c);
            out[c] = static_cast<Y>(bias ? own + static_cast<float>(bias[w0 + c]) : own);
          }
        }
      }
    }
  }
}

template <class Format, class Y>
void product(const Format& w, const at::Tensor& x, int64_t N, const at::Tensor* bias, at::Tensor& y) {
  const int64_t K = w.K, M = K ? x.numel() / K : 0;
  const Y* given = x.const_data_ptr<Y>();
  std::unique_ptr<float[]> made;
  Blocks blocks{nullptr, M, K, M <= FEW && Format::in_registers ? std::max<int64_t>(1, K) : KB};
  if constexpr (std::is_same_v<Y, float>)
    if (blocks.block >= K) blocks.data = given;
  if (!blocks.data) {
    made.reset(new float[M * K]);
    blocks.data = made.get();
    at::parallel_for(0, M, 1 + 65536 / std::max<int64_t>(1, K), [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        for (int64_t k = 0; k < K; k += blocks.block)
          decode(Plain<Y>{given, K}, m, k, blocks.width(k), const_cast<float*>(blocks.at(m, k)));
    });
  }
  const Y* b = bias ? bias->const_data_ptr<Y>() : nullptr;
  Y* out = y.mutable_data_ptr<Y>();
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, NR * K * M));
  at::parallel_for(0, (N + NR - 1) / NR, grain, [&](int64_t begin, int64_t end) {
    part<Format, Y>(w, blocks, N, b, out, begin * NR, std::min(N, end * NR));
  });
}

bool matrix_hardware = false;    // oneDNN multiplies 16-bit numbers in hardware
constexpr int64_t MATRIX_ROWS = 16;  // from so many rows on that is worth its call

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("linear: " + what); }

void check(bool fine, const char* what) {
  if (!fine) refuse(what);
}

std::vector<int64_t> result_sizes(const at::Tensor& x, int64_t N) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = N;
  return sizes;
}

template <class F>
void with_activations(at::ScalarType type, F&& f) {
  switch (type) {
    case at::kFloat: return f(float());
    case at::kBFloat16: return f(BFloat16());
    case at::kHalf: return f(Half());
    default: refuse("x must be float32, bfloat16 or float16");
  }
}

at::Tensor linear(const at::Tensor& given, const at::Tensor& w, const at::Tensor* bias) {
  const at::Tensor x = given.contiguous();
  check(w.dim() == 2 && w.is_contiguous() && x.dim() >= 1 && x.size(-1) == w.size(1), "w must be [N, K] for x [.., K]");
  check(w.scalar_type() == x.scalar_type(), "x and w must have one dtype");
  const int64_t N = w.size(0), K = w.size(1), M = K ? x.numel() / K : 0;
  if (matrix_hardware && x.scalar_type() != at::kFloat && M >= MATRIX_ROWS)
    return at::linear(x, w, bias ? std::optional<at::Tensor>(*bias) : std::nullopt);
  at::Tensor y = at::empty(result_sizes(x, N), x.options());
  with_activations(x.scalar_type(), [&](auto tag) {
    using Y = decltype(tag);
    product<Plain<Y>, Y>(Plain<Y>{w.const_data_ptr<Y>(), K}, x, N, bias, y);
  });
  return y;
}

at::Tensor int8_linear(const at::Tensor& given, const at::Tensor& q, const at::Tensor& scales, const at::Tensor* bias) {
  const at::Tensor x = given.contiguous();
  const int64_t N = q.size(0), K = q.size(1);
  check(q.scalar_type() == at::kChar && q.is_contiguous() && x.size(-1) == K, "q must be int8 [N, K] for x [.., K]");
  check(scales.scalar_type() == at::kFloat && scales.is_contiguous() && scales.numel() == N, "a float32 scale for each row");
  at::Tensor y = at::empty(result_sizes(x, N), x.options());
  with_activations(x.scalar_type(), [&](auto tag) {
    using Y = decltype(tag);
    product<Int8, Y>(Int8{q.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), K}, x, N, bias, y);
  });
  return y;
}

at::Tensor int4_linear(const at::Tensor& given, const at::Tensor& q, const at::Tensor& pairs, const at::Tensor* bias) {
  const at::Tensor x = given.contiguous();
  const int64_t N = q.size(0), K = x.size(-1);
  check(q.scalar_type() == at::kByte && q.is_contiguous() && q.size(1) == (K + 63) / 64 * 32 && K % GROUP == 0,
        "q must be uint8 [N, K / 2] for x [.., K], K a multiple of 32, rows of whole 32 bytes");
  check(pairs.scalar_type() == at::kBFloat16 && pairs.is_contiguous() && pairs.numel() == N * (K / GROUP) * 2,
        "a bfloat16 scale and offset for each 32 columns");
  at::Tensor y = at::empty(result_sizes(x, N), x.options());
  with_activations(x.scalar_type(), [&](auto tag) {
    using Y = decltype(tag);
    product<Int4, Y>(Int4{q.const_data_ptr<uint8_t>(), static_cast<const uint32_t*>(pairs.const_data_ptr()), K}, x, N, bias, y);
  });
  return y;
}

using MaybeTensor = std::optional<at::Tensor>;

const at::Tensor* pointer(const MaybeTensor& x) { return x ? &*x : nullptr; }

const at::Tensor& tensor(AtenTensorHandle handle) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
}

const at::Tensor* optional_tensor(AtenTensorHandle* handle) { return handle ? &tensor(*handle) : nullptr; }

template <class F>
AOTITorchError guarded(AtenTensorHandle* result, F&& f) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({ *result = torch::aot_inductor::new_tensor_handle(f()); });
}

}  // namespace

// What the dispatcher calls.
TORCH_LIBRARY_IMPL(graphsrt, CPU, library) {
  library.impl("dense_linear", [](const at::Tensor& x, const at::Tensor& w, const MaybeTensor& bias) {
    return linear(x, w, pointer(bias));
  });
  library.impl("int8_linear", [](const at::Tensor& x, const at::Tensor& q, const at::Tensor& scales,
                                 const MaybeTensor& bias) { return int8_linear(x, q, scales, pointer(bias)); });
  library.impl("int4_linear", [](const at::Tensor& x, const at::Tensor& q, const at::Tensor& pairs,
                                 const MaybeTensor& bias) { return int4_linear(x, q, pairs, pointer(bias)); });
}

// What compiled regions call: no dispatcher, no boxing. inductor.py declares them.
extern "C" {

AOTITorchError aoti_torch_cpu_dense_linear(AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias,
                                           AtenTensorHandle* result) {
  return guarded(result, [&] { return linear(tensor(x), tensor(w), optional_tensor(bias)); });
}

AOTITorchError aoti_torch_cpu_int8_linear(AtenTensorHandle x, AtenTensorHandle q, AtenTensorHandle scales,
                                          AtenTensorHandle* bias, AtenTensorHandle* result) {
  return guarded(result, [&] { return int8_linear(tensor(x), tensor(q), tensor(scales), optional_tensor(bias)); });
}

AOTITorchError aoti_torch_cpu_int4_linear(AtenTensorHandle x, AtenTensorHandle q, AtenTensorHandle pairs,
                                          AtenTensorHandle* bias, AtenTensorHandle* result) {
  return guarded(result, [&] { return int4_linear(tensor(x), tensor(q), tensor(pairs), optional_tensor(bias)); });
}

// Whether oneDNN multiplies 16-bit numbers in hardware here: products of many rows are then its.
void graphsrt_use_matrix_hardware(bool use) { matrix_hardware = use; }
}
