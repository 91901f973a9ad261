// The library of a kind of KV pool: new keys and values are written to their slots (kv_write), and queries attend
// (attention.h), called from Python (cpu.py) or from a captured step (replay.cpp).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/Parallel.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "attention.h"

namespace {

// A library serves one kind of pool, as all kinds together take long to compile: POOL is what it holds, and SUM what is
// computed in, float or double.
using Pool = POOL;

// The pool's form of a number. FP8 saturates; NaN stays NaN.
template <class To, class From>
inline To stored(From number, double scale) {
  if constexpr (std::is_same_v<To, Float8>) {
    using W = std::conditional_t<std::is_same_v<From, double>, double, float>;
    const W quotient = static_cast<W>(number) / static_cast<W>(scale);
    return To(static_cast<float>(quotient > W(448) ? W(448) : quotient < W(-448) ? W(-448) : quotient));
  } else {
    return static_cast<To>(number);
  }
}

template <class To, class From>
void write_rows(const Args& x, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = x.out_cache_loc[t];
    if (slot < 0) continue;
    for (int64_t h = 0; h < x.K; ++h) {
      const From* k = static_cast<const From*>(x.k) + t * x.k_stride_t + h * x.k_stride_h;
      const From* v = static_cast<const From*>(x.v) + t * x.v_stride_t + h * x.v_stride_h;
      To* to_k = reinterpret_cast<To*>(x.pool_k) + slot * x.pool_stride_s + h * x.pool_stride_h;
      To* to_v = reinterpret_cast<To*>(x.pool_v) + slot * x.pool_stride_s + h * x.pool_stride_h;
      for (int64_t d = 0; d < x.D; ++d) to_k[d] = stored<To>(k[d], x.k_scale);
      for (int64_t d = 0; d < x.Dv; ++d) to_v[d] = stored<To>(v[d], x.v_scale);
    }
  }
}

void write(const Args& x) {
  with_dtype(x.kv_dtype, [&](auto from) {
    at::parallel_for(0, x.T, 1 + 65536 / (x.K * (x.D + x.Dv)), [&](int64_t begin, int64_t end) {
      write_rows<Pool, decltype(from)>(x, begin, end);
    });
  });
}

void attend(const Args& x) {
  Attention<SUM, Pool>{x}.run();
  with_dtype(x.q_dtype, [&](auto tag) {
    using Q = decltype(tag);
    Q* out = static_cast<Q*>(x.out);
    std::fill(out + x.query_start_loc[x.B] * x.H * x.Dv, out + x.T * x.H * x.Dv, Q(0.0f));
  });
}

// The interpreter is let go while the kernel runs; C++ errors come back as Python ones.
template <class F>
PyObject* guarded(F&& f) {
  std::string message;
  PyObject* kind = nullptr;
  PyThreadState* state = PyEval_SaveThread();
  try {
    f();
  } catch (const std::invalid_argument& e) {
    kind = PyExc_ValueError, message = e.what();
  } catch (const std::bad_alloc&) {
    kind = PyExc_MemoryError, message = "radix_attention: out of memory";
  } catch (const std::exception& e) {
    kind = PyExc_RuntimeError, message = e.what();
  }
  PyEval_RestoreThread(state);
  if (kind) {
    PyErr_SetString(kind, message.c_str());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Arguments arrive as one flat list of integers (addresses, element strides, sizes) and floats; cpu.py is the caller.
struct Reader {
  PyObject* const* args;
  int64_t integer() { return PyLong_AsLongLong(*args++); }
  double real() { return PyFloat_AsDouble(*args++); }
  template <class P>
  P pointer() { return reinterpret_cast<P>(PyLong_AsVoidPtr(*args++)); }
};

void read_write_args(Reader& r, Args& x) {
  x.T = r.integer(), x.K = r.integer(), x.D = r.integer(), x.Dv = r.integer();
  x.S = r.integer();
  x.pool_k = r.pointer<char*>(), x.pool_v = r.pointer<char*>();
  x.pool_stride_s = r.integer(), x.pool_stride_h = r.integer();
  x.out_cache_loc = r.pointer<const int64_t*>();
  x.k = r.pointer<const void*>(), x.k_stride_t = r.integer(), x.k_stride_h = r.integer();
  x.v = r.pointer<const void*>(), x.v_stride_t = r.integer(), x.v_stride_h = r.integer();
  x.kv_dtype = r.integer();
  x.k_scale = r.real(), x.v_scale = r.real();
}

constexpr Py_ssize_t NUM_WRITE_ARGS = 19, NUM_ARGS = NUM_WRITE_ARGS + 22;

PyObject* py_kv_write(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != NUM_WRITE_ARGS) return PyErr_Format(PyExc_TypeError, "kv_write: %zd arguments", n);
  Args x{};
  Reader r{args};
  read_write_args(r, x);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] {
    check_locations(x);
    write(x);
  });
}

constexpr const char* BOUND = "graphsrt.radix_attention";

void call(const Args& bound, const void* q, const void* k, const void* v) {
  Args x = bound;
  x.q = q, x.k = k, x.v = v;
  check_batch(x);  // before anything is written
  if (x.k) {
    check_locations(x);
    write(x);
  }
  attend(x);
}

// As a captured step calls it: inputs are q, and k and v if there are any.
void call_from_step(const void* bound, void* const* inputs) {
  const Args& x = *static_cast<const Args*>(bound);
  call(x, inputs[0], x.k ? inputs[1] : nullptr, x.k ? inputs[2] : nullptr);
}

// All that a call needs, for others whose q, k and v lie elsewhere.
PyObject* py_bind(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != NUM_ARGS) return PyErr_Format(PyExc_TypeError, "bind: %zd arguments", n);
  auto made = std::make_unique<Args>();
  Args& x = *made;
  Reader r{args};
  read_write_args(r, x);
  x.q = r.pointer<const void*>(), x.q_dtype = r.integer(), x.q_stride_t = r.integer(), x.q_stride_h = r.integer();
  x.H = r.integer(), x.B = r.integer();
  x.req_to_token = r.pointer<const int32_t*>();
  x.max_reqs = r.integer(), x.max_ctx = r.integer(), x.req_stride = r.integer();
  x.req_pool_indices = r.pointer<const int64_t*>(), x.seq_lens = r.pointer<const int64_t*>();
  x.query_start_loc = r.pointer<const int64_t*>();
  x.sinks = r.pointer<const void*>(), x.sinks_dtype = r.integer();
  x.slopes = r.pointer<const void*>(), x.slopes_dtype = r.integer();
  x.out = r.pointer<void*>();
  x.window = r.integer(), x.chunk = r.integer(), x.scale = r.real(), x.softcap = r.real();
  if (PyErr_Occurred()) return nullptr;
  const auto destroy = [](PyObject* bound) { delete static_cast<Args*>(PyCapsule_GetPointer(bound, BOUND)); };
  return PyCapsule_New(made.release(), BOUND, destroy);
}

// call(bound, addresses of q, k and v)
PyObject* py_call(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 4) return PyErr_Format(PyExc_TypeError, "call: %zd arguments", n);
  const auto* x = static_cast<const Args*>(PyCapsule_GetPointer(args[0], BOUND));
  Reader r{args + 1};
  const auto *q = r.pointer<const void*>(), *k = r.pointer<const void*>(), *v = r.pointer<const void*>();
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] { call(*x, q, k, v); });
}

// native(bound): the addresses of a function and of its first argument; see replay.cpp
PyObject* py_native(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 1) return PyErr_Format(PyExc_TypeError, "native: %zd arguments", n);
  void* bound = PyCapsule_GetPointer(args[0], BOUND);
  if (!bound) return nullptr;
  return Py_BuildValue("KK", reinterpret_cast<unsigned long long>(call_from_step),
                       reinterpret_cast<unsigned long long>(bound));
}

PyMethodDef methods[] = {
    {"kv_write", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_kv_write)), METH_FASTCALL, nullptr},
    {"bind", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_bind)), METH_FASTCALL, nullptr},
    {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_call)), METH_FASTCALL, nullptr},
    {"native", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_native)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "radix_attention", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_radix_attention() { return PyModule_Create(&module_def); }
