// What a block of attention is computed from in float32 and float64: rows of the pool become vectors of numbers, keys
// and values are packed into panels, and these are multiplied. pairs.h has the same for pairs of bfloat16.
#pragma once

#include <c10/util/Float8_e4m3fn.h>

#include "../vectors.h"

namespace {

using at::vec::Vectorized;
using c10::BFloat16;
using c10::Half;
using Float8 = c10::Float8_e4m3fn;

constexpr int64_t BLOCK = 64;    // KV tokens per online-softmax step
#if defined(CPU_CAPABILITY_AVX512)
constexpr int TILE_M = 12;       // 12 x 2 accumulators of 32 registers
#else
constexpr int TILE_M = 6;        // 6 x 2 accumulators of 16 registers
#endif
constexpr int TILE_N = 2;

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
// Sign and the other 7 bits, moved to where a float has them, are the number but for the exponents' biases: 2^(127 - 7).
inline __m256 load_fp32_from_fp8(const Float8* p) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i low = _mm256_and_si256(bytes, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(bytes, low), 24);
  const __m256 number = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(low, 20)), _mm256_set1_ps(0x1p120f));
  const __m256i nan = _mm256_cmpeq_epi32(low, _mm256_set1_epi32(0x7f));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_or_si256(_mm256_castps_si256(number), sign), nan));
}
#endif

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
template <class T>
inline __m256 load_eight(const T* p) {
  if constexpr (std::is_same_v<T, float>) return _mm256_loadu_ps(p);
  else if constexpr (std::is_same_v<T, Float8>) return load_fp32_from_fp8(p);
  else {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (std::is_same_v<T, Half>) return _mm256_cvtph_ps(bits);
    else return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
}
#endif

template <class A, class T>
inline Vectorized<A> load(const T* p) {
  if constexpr (std::is_same_v<A, T>) {
    return Vectorized<A>::loadu(p);
  } else {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<A, float> && std::is_same_v<T, BFloat16>) {
      Vectorized<float> out;
      at::vec::load_fp32_from_bf16(p, out);
      return out;
    } else if constexpr (std::is_same_v<A, float> && std::is_same_v<T, Half>) {
      Vectorized<float> out;
      at::vec::load_fp32_from_fp16(p, out);
      return out;
    }
#endif
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<A, float> && std::is_same_v<T, Float8>)
      return _mm512_insertf32x8(_mm512_castps256_ps512(load_fp32_from_fp8(p)), load_fp32_from_fp8(p + 8), 1);
#elif defined(CPU_CAPABILITY_AVX2)
    if constexpr (std::is_same_v<A, float> && std::is_same_v<T, Float8>) return load_fp32_from_fp8(p);
#endif
    constexpr int VL = Vectorized<A>::size();
    alignas(64) A buffer[VL];
    for (int i = 0; i < VL; ++i) buffer[i] = static_cast<A>(p[i]);
    return Vectorized<A>::loadu(buffer);
  }
}

template <class A>
inline A sum(const Vectorized<A>& x) {
  return at::vec::vec_reduce_all<A>([](Vectorized<A>& a, Vectorized<A>& b) { return a + b; }, x);
}

// Lane sums of four vectors at once: a third of the shuffles of four separate sums.
template <class A>
inline void sum4(const Vectorized<A>* x, A* out) {
#if defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<A, float>) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    return;
  }
#endif
  for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
}

// exp for arguments <= 0 (what a softmax asks for); -inf gives 0 and NaN stays NaN. Float: Cephes' degree-6
// polynomial on [-ln2/2, ln2/2], within 2 ulp; about a third of the instructions of the general function.
// Below the clamp the result is zero: exp(-87) is 1e-38 and masked entries must be exactly nothing.
template <class A>
inline Vectorized<A> exp_nonpositive(const Vectorized<A>& x) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<A, float>) {
    using Vec = Vectorized<float>;
    using at::vec::fmadd;
#if defined(CPU_CAPABILITY_AVX512)
    const Vec clamped = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // this operand order keeps NaN
    const Vec n = _mm512_roundscale_ps(clamped * Vec(1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    const Vec power = _mm512_castsi512_ps(exponent);
#else
    const Vec clamped = _mm256_max_ps(_mm256_set1_ps(-87.0f), x);  // this operand order keeps NaN
    const Vec n = _mm256_round_ps(clamped * Vec(1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const Vec power = _mm256_castsi256_ps(exponent);
#endif
    Vec r = fmadd(n, Vec(-0.693359375f), clamped);
    r = fmadd(n, Vec(2.12194440e-4f), r);
    Vec p(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
      p = fmadd(p, r, Vec(c));
    p = fmadd(p, r * r, r + Vec(1.0f)) * power;
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), p);
#else
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ), p);
#endif
  }
#endif
  return x.exp();
}

// c[M, TILE_N * VL] += a[M, kn] x b[kn, TILE_N * VL]; each element is summed in the order of k whatever MR is.
template <class A, int MR>
inline void product_tile(const A* a, int64_t lda, const A* b, A* c, int64_t ldc, int64_t kn) {
  using Vec = Vectorized<A>;
  constexpr int VL = Vec::size();
  Vec acc[MR][TILE_N];
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < TILE_N; ++n) acc[m][n] = Vec::loadu(c + m * ldc + n * VL);
  for (int64_t k = 0; k < kn; ++k) {
    Vec bv[TILE_N];
#pragma GCC unroll 2
    for (int n = 0; n < TILE_N; ++n) bv[n] = Vec::loadu(b + (k * TILE_N + n) * VL);
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      const Vec av(a[m * lda + k]);
#pragma GCC unroll 2
      for (int n = 0; n < TILE_N; ++n) acc[m][n] = at::vec::fmadd(av, bv[n], acc[m][n]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < TILE_N; ++n) acc[m][n].store(c + m * ldc + n * VL);
}

template <class A, int MR = TILE_M>
void product_rows(int64_t M, const A* a, int64_t lda, const A* b, A* c, int64_t ldc, int64_t kn) {
  while (M >= MR) {
    product_tile<A, MR>(a, lda, b, c, ldc, kn);
    a += MR * lda, c += MR * ldc, M -= MR;
  }
  if constexpr (MR > 1) {
    if (M > 0) product_rows<A, MR - 1>(M, a, lda, b, c, ldc, kn);
  }
}

// c[M, width] += a[M, kn] x panels[width / PW][panel_rows][PW], of each panel the first kn rows
template <class A>
[[gnu::noinline]] void product(int64_t M, int64_t width, const A* a, int64_t lda, const A* b, int64_t panel_rows, A* c,
                               int64_t ldc, int64_t kn) {
  constexpr int64_t PW = TILE_N * Vectorized<A>::size();
  for (int64_t n = 0; n < width; n += PW) product_rows<A>(M, a, lda, b + n * panel_rows, c + n, ldc, kn);
}

// s[MR, 4] = q[MR, D] x rows[4][D]; D is a multiple of the vector length
template <class A, class T, int MR>
inline void dot_rows(const A* q, int64_t ldq, const T* const* rows, int64_t D, A* s, int64_t lds) {
  using Vec = Vectorized<A>;
  constexpr int VL = Vec::size();
  Vec acc[MR][4];
#pragma GCC unroll 4
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) acc[m][r] = Vec(A(0));
  for (int64_t d = 0; d < D; d += VL) {
    Vec kv[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) kv[r] = load<A>(rows[r] + d);
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) {
      const Vec qv = Vec::loadu(q + m * ldq + d);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) acc[m][r] = at::vec::fmadd(qv, kv[r], acc[m][r]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < MR; ++m) sum4(acc[m], s + m * lds);
}

// o[MR, NR * VL] += p[MR, count] x rows[count][NR * VL]
template <class A, class T, int MR, int NR>
[[gnu::flatten]] inline void weigh_columns(const A* p, int64_t ldp, const T* const* rows, int64_t count, int64_t d, A* o, int64_t ldo) {
  using Vec = Vectorized<A>;
  constexpr int VL = Vec::size();
  Vec sums[MR * NR];
  each<MR * NR>([&](auto i) { sums[i] = Vec::loadu(o + i / NR * ldo + d + i % NR * VL); });
  for (int64_t c = 0; c < count; ++c) {
    Vec value[NR];
    each<NR>([&](auto n) { value[n] = load<A>(rows[c] + d + n * VL); });
    each<MR>([&](auto m) {
      const Vec weight(p[m * ldp + c]);
      each<NR>([&](auto n) { sums[m * NR + n] = at::vec::fmadd(weight, value[n], sums[m * NR + n]); });
    });
  }
  each<MR * NR>([&](auto i) { sums[i].store(o + i / NR * ldo + d + i % NR * VL); });
}

template <class A, class T, int MR>
void weigh_rows(const A* p, int64_t ldp, const T* const* rows, int64_t count, int64_t D, A* o, int64_t ldo) {
  constexpr int VL = Vectorized<A>::size();
  constexpr int NR = VL == 16 || MR <= 2 ? 4 : 2;
  int64_t d = 0;
  for (; d + NR * VL <= D; d += NR * VL) weigh_columns<A, T, MR, NR>(p, ldp, rows, count, d, o, ldo);
  for (; d < D; d += VL) weigh_columns<A, T, MR, 1>(p, ldp, rows, count, d, o, ldo);
}

template <class T>
inline void prefetch_row(const T* row, int64_t D) {
  const char* p = reinterpret_cast<const char*>(row);
  const int64_t bytes = D * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
  asm volatile("" ::"r"(p));  // GCC takes a function that only prefetches for one that does nothing
}

// panels[n / PW][D][PW] = rows[n][D] transposed; columns without a row are zero
template <class A, class T>
void pack_keys(const T* const* rows, int64_t c0, int64_t c1, int64_t D, A* panels) {
  constexpr int64_t PW = TILE_N * Vectorized<A>::size();
  if (c0 > 0 || c1 < BLOCK) std::fill_n(panels, BLOCK * D, A(0));
  int64_t c = c0;
  while (c < c1) {
    A* column = panels + (c / PW) * D * PW + c % PW;
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    if constexpr (std::is_same_v<A, float>) {
      if (c % 8 == 0 && c + 8 <= c1 && D % 8 == 0) {
        for (int64_t d = 0; d < D; d += 8) {
          __m256 x[8], y[8];
#pragma GCC unroll 8
          for (int i = 0; i < 8; ++i) x[i] = load_eight(rows[c + i] + d);
#pragma GCC unroll 4
          for (int i = 0; i < 8; i += 2) {
            y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
            y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
          }
#pragma GCC unroll 2
          for (int i = 0; i < 8; i += 4) {
            x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
            x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xEE);
            x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
            x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xEE);
          }
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            _mm256_storeu_ps(column + (d + i) * PW, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
            _mm256_storeu_ps(column + (d + i + 4) * PW, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
          }
        }
        c += 8;
        continue;
      }
    }
#endif
    for (int64_t d = 0; d < D; ++d) column[d * PW] = static_cast<A>(rows[c][d]);
    ++c;
  }
}

// panels[d / PW][BLOCK][PW] = rows[c][d]; only rows c0..c1 are written, and only they may be read
template <class A, class T>
void pack_values(const T* const* rows, int64_t c0, int64_t c1, int64_t D, A* panels) {
  constexpr int64_t VL = Vectorized<A>::size(), PW = TILE_N * VL;
  for (int64_t c = c0; c < c1; ++c) {
    int64_t d = 0;
    for (; d + PW <= D; d += PW)
      for (int64_t n = 0; n < PW; n += VL) load<A>(rows[c] + d + n).store(panels + d * BLOCK + c * PW + n);
    if (d < D) {
      A* tail = panels + d * BLOCK + c * PW;
      for (int64_t n = 0; n < PW; ++n) tail[n] = d + n < D ? static_cast<A>(rows[c][d + n]) : A(0);
    }
  }
}

}  // namespace
