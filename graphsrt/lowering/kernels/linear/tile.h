// What the products of all formats share: vectors, how many rows go side by side, and sums.
//
// A sum is a vector of VL partial ones while it goes over the columns, and is summed up when all have been seen. So it
// is formed in the same order however the work is divided.
#pragma once

#include <cstring>

#include "../vectors.h"

namespace {

using c10::BFloat16;
using c10::Half;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t VL = Vec::size();

constexpr int64_t MB = 96;    // rows of x that are gone through with one block of columns: in the second cache
constexpr int64_t WIDE = 24;  // rows of w whose sums are under way at a time: a multiple of all that go side by side
constexpr int64_t STRIDE = WIDE + VL;  // sums of a row of x, with room for whole vectors at the end

// Rows of w that are gone through side by side lie one behind the other, and so do the next ones. The processor sees
// short streams that end and begin; this asks for what comes after them, as much at a time as is used at a time.
template <int BYTES>
inline const char* prefetch(const char* p) {
#pragma GCC unroll 8
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + i);
  return p + BYTES;
}

// The compiler would load a value again for each product that it is in; loads are what there are too few of.
template <class V>
inline V in_register(V value) {
#if defined(__x86_64__) && (defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512))
  asm("" : "+v"(value));
#endif
  return value;
}
inline Vec in_register(Vec v) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  return Vec(in_register<std::conditional_t<VL == 16, __m512, __m256>>(v));
#else
  return v;
#endif
}

// f(how many, from which on) for `count` rows, MOST at a time and then the rest at once.
template <int MOST, class F>
inline void in_tiles(int64_t count, F&& f, int64_t from = 0) {
  for (; count - from >= MOST; from += MOST) f(std::integral_constant<int, MOST>(), from);
  if constexpr (MOST > 1) in_tiles<MOST - 1>(count, f, from);
}

// The totals of VL vectors, in order.
inline Vec totals(const Vec* v) {
#if defined(CPU_CAPABILITY_AVX2)
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return Vec(_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#elif defined(CPU_CAPABILITY_AVX512)
  return Vec(totals16(v));
#else
  alignas(64) float out[VL];
  for (int64_t i = 0; i < VL; ++i)
    out[i] = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, Vec(v[i]));
  return Vec::loadu(out);
#endif
}

// `count` numbers of at most VL.
template <class T>
inline Vec load_floats(const T* p, int64_t count) {
  alignas(64) float out[VL] = {};
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(p[i]);
  return Vec::loadu(out);
}

template <class T>
inline void store_floats(Vec v, T* p, int64_t count) {
  alignas(64) T out[VL];
  T* to = count == VL ? p : out;
  if constexpr (std::is_same_v<T, float>) {
    v.store(to);
#if defined(CPU_CAPABILITY_AVX2)
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), at::vec::cvtfp32_bf16(v));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), at::vec::cvtfp32_fp16(v));
#elif defined(CPU_CAPABILITY_AVX512)
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), at::vec::cvtfp32_bf16(v));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), at::vec::cvtfp32_fp16(v));
#else
  } else {
    alignas(64) float wide[VL];
    v.store(wide);
    for (int64_t i = 0; i < VL; ++i) to[i] = static_cast<T>(wide[i]);
#endif
  }
  if (to == out) std::copy_n(out, count, p);
}

}  // namespace
