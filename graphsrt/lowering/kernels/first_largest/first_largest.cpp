// The first of the largest numbers of each row, NaN being the largest of all; -0 and 0 are equal.
//
// Numbers compare as their bits do, read as integers with a sign, so that 16 bits need not become floats first.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <bit>
#include <cmath>
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

// What bits stand for: those of infinity tell which dtype they are of.
template <int32_t INFINITE>
double number(int32_t bits) {
  if constexpr (INFINITE == 0x7f800000) return std::bit_cast<float>(bits);
  else if constexpr (INFINITE == 0x7f80) return std::bit_cast<float>(bits << 16);
  else {  // float16: five bits of exponent, ten of fraction
    const int32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = std::ldexp(exponent ? 1024 + fraction : fraction, std::max(exponent, 1) - 25);
    if (exponent == 31) size = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    return bits < 0 ? -size : size;
  }
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
void places(const void* data, int64_t rows, int64_t count, int64_t stride, int64_t* found, double* largest) {
  const Signed* numbers = static_cast<const Signed*>(data);
#pragma omp parallel for if (rows > 1 && rows * count > 100000)
  for (int64_t r = 0; r < rows; ++r) {
    found[r] = place<Signed, INFINITE>(numbers + r * stride, count);
    largest[r] = number<INFINITE>(numbers[r * stride + found[r]]);
  }
}

// first_largest(infinite, data, rows, count, stride, places, numbers): of each row of `data` where its largest number
// is, and that number; True if all these are finite. All are integers: the bits of infinity, which tell bfloat16,
// float16 and float32 apart, and addresses; `stride` counts numbers.
PyObject* py_first_largest(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 7) return PyErr_Format(PyExc_TypeError, "first_largest: %zd arguments", n);
  const int64_t infinite = PyLong_AsLongLong(args[0]), rows = PyLong_AsLongLong(args[2]);
  const int64_t count = PyLong_AsLongLong(args[3]), stride = PyLong_AsLongLong(args[4]);
  const void* data = PyLong_AsVoidPtr(args[1]);
  auto* found = static_cast<int64_t*>(PyLong_AsVoidPtr(args[5]));
  auto* largest = static_cast<double*>(PyLong_AsVoidPtr(args[6]));
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  switch (infinite) {
    case 0x7f80: places<int16_t, 0x7f80>(data, rows, count, stride, found, largest); break;
    case 0x7c00: places<int16_t, 0x7c00>(data, rows, count, stride, found, largest); break;
    default: places<int32_t, 0x7f800000>(data, rows, count, stride, found, largest);
  }
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(std::all_of(largest, largest + rows, [](double x) { return std::isfinite(x); }));
}

PyMethodDef methods[] = {{"first_largest", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_first_largest)),
                          METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "first_largest", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_first_largest() { return PyModule_Create(&module_def); }
