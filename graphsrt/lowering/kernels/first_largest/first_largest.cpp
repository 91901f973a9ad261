// The first of the largest numbers of each row, NaN being the largest of all; -0 and 0 are equal.
//
// Numbers compare as their bits do, read as integers with a sign, so that 16 bits need not become floats first.
#include <algorithm>
#include <cstdint>
#include <limits>

namespace {

constexpr int64_t BLOCK = 2048;  // numbers that are searched for the place, once it is known where the largest is

// INFINITE: the bits of infinity. What is above them, the sign aside, is NaN.
template <class Signed, Signed INFINITE>
inline Signed key(Signed bits) {
  constexpr Signed MOST = std::numeric_limits<Signed>::max();
  const auto magnitude = static_cast<Signed>(bits & MOST);
  const auto negative = static_cast<Signed>(bits >> (8 * sizeof(Signed) - 1));  // -1 or 0
  const auto number = static_cast<Signed>((magnitude ^ negative) - negative);
  const auto is_nan = static_cast<Signed>(-static_cast<Signed>(magnitude > INFINITE));
  return static_cast<Signed>((number & ~is_nan) | (MOST & is_nan));  // no branch: GCC would not use vectors
}

template <class Signed, Signed INFINITE>
int64_t place(const Signed* row, int64_t count) {
  Signed largest = std::numeric_limits<Signed>::min();
  int64_t found = 0;
  for (int64_t begin = 0; begin < count; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, count);
    Signed own = std::numeric_limits<Signed>::min();
#pragma omp simd reduction(max : own)
    for (int64_t i = begin; i < end; ++i) own = std::max(own, key<Signed, INFINITE>(row[i]));
    if (own > largest) largest = own, found = begin;
  }
  while (key<Signed, INFINITE>(row[found]) != largest) ++found;
  return found;
}

template <class Signed, Signed INFINITE>
void places(const void* data, int64_t rows, int64_t count, int64_t stride, int64_t* found) {
  const Signed* numbers = static_cast<const Signed*>(data);
#pragma omp parallel for if (rows > 1 && rows * count > 100000)
  for (int64_t r = 0; r < rows; ++r) found[r] = place<Signed, INFINITE>(numbers + r * stride, count);
}

}  // namespace

// `infinite`: the bits of infinity, which tell bfloat16, float16 and float32 apart. `stride` counts numbers.
extern "C" void graphsrt_first_largest(int64_t infinite, const void* data, int64_t rows, int64_t count, int64_t stride,
                                       int64_t* found) {
  switch (infinite) {
    case 0x7f80: return places<int16_t, 0x7f80>(data, rows, count, stride, found);
    case 0x7c00: return places<int16_t, 0x7c00>(data, rows, count, stride, found);
    default: return places<int32_t, 0x7f800000>(data, rows, count, stride, found);
  }
}
