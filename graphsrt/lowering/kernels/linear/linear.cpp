// y[M, N] = x[M, K] · w[N, K]ᵀ (+ bias) for few rows of x and many of w: the weights are read once, as they are stored
// (16 or 32 bits, or integers of 8 or 4 bits).
//
// A row of w and a row of x lie contiguous in memory, so an element of y is a dot product along both: vectors run along
// K, and are summed at the very end. The sum of an element is formed in the same order for every M, so a row's result
// does not depend on which others are in the batch. Many rows of bfloat16 are multiplied in another way (panels.h), in
// which that order is another one; it does not depend on how many they are either.
//
// This file divides the work (`part`), and has what is called from outside. How x and w become numbers that are
// multiplied, and the innermost loops, are in floats.h (float32), pairs.h (bfloat16 in hardware) and int4.h (integers).
//
// Regions that Inductor compiles call the C functions at the end; the dispatcher calls the rest.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "floats.h"
#include "int4.h"
#include "panels.h"
#include "../share.h"

namespace {

// ---- a product -----------------------------------------------------------------------------------------------------

// Rows n0..n1 of w with all rows of x. A product (FloatProduct, Int4Product) holds both, and adds to the sums of a tile
// what a block of columns gives; the first block begins them.
template <class Product, class Y>
void part(const Product& product, int64_t N, const Y* bias, Y* y, int64_t n0, int64_t n1) {
  alignas(64) thread_local Vec sums[MB * STRIDE];
  const int64_t K = product.w.K, M = product.x.M, block = product.x.block;
  for (int64_t m0 = 0; m0 < M; m0 += MB) {
    const int64_t m = std::min(MB, M - m0);
    const bool by_row = m * K <= 1 << 16;  // x stays in the second cache: read w as it lies
    for (int64_t w0 = n0; w0 < n1; w0 += WIDE) {
      const int64_t wide = std::min(WIDE, n1 - w0);
      if (K == 0)
        for (int64_t i = 0; i < m; ++i) std::fill_n(sums + i * STRIDE, wide, Vec(0.0f));
      const auto over = [&](auto side, auto&& meet) {
        constexpr int SIDE = decltype(side)::value;
        // And what comes next, unless that is nothing: then the same again.
        if (by_row) {
          in_tiles<SIDE>(wide, [&](auto rows, int64_t r) {
            const int64_t after = r + 2 * rows <= wide ? r + rows : r;
            for (int64_t k = 0; k < K; k += block)
              k + block < K ? meet(rows, r, k, r, k + block) : meet(rows, r, k, after, 0);
          });
        } else {
          for (int64_t k = 0; k < K; k += block)
            in_tiles<SIDE>(wide, [&](auto rows, int64_t r) {
              r + 2 * rows <= wide ? meet(rows, r, k, r + rows, k) : meet(rows, r, k, 0, k + block < K ? k + block : k);
            });
        }
      };
      if (m <= Product::FEW)
        as_constant<Product::FEW>(m, [&](auto rows_of_x) {
          constexpr int FOR = decltype(rows_of_x)::value;
          constexpr std::integral_constant<int, Product::side_by_side(FOR)> side;
          over(side, [&](auto rows, int64_t r, int64_t k, int64_t, int64_t) {
            product.template few<FOR, decltype(rows)::value>(w0 + r, m0, k, sums + r);
          });
        });
      else
        over(std::integral_constant<int, Product::NR>(),
             [&](auto rows, int64_t r, int64_t k, int64_t next_r, int64_t next_k) {
               product.template many<decltype(rows)::value>(w0 + r, m0, m, k, sums + r, w0 + next_r, next_k);
             });
      for (int64_t i = 0; i < m; ++i) {
        Y* out = y + (m0 + i) * N + w0;
        for (int64_t j = 0; j < wide; j += VL) {
          const int64_t count = std::min(VL, wide - j);
          Vec sum = totals(sums + i * STRIDE + j) * product.scales(w0 + j, count);
          if (bias) sum = sum + load_floats(bias + w0 + j, count);
          store_floats(sum, out + j, count);
        }
      }
    }
  }
}

template <class Product, class Format, class Y>
void multiply(const Format& w, const at::Tensor& x, int64_t N, const at::Tensor* bias, at::Tensor& y) {
  const int64_t M = N ? y.numel() / N : 0;
  const Product product(w, x.const_data_ptr<Y>(), M);
  const Y* b = bias ? bias->const_data_ptr<Y>() : nullptr;
  Y* out = y.mutable_data_ptr<Y>();
  constexpr int64_t UNIT = Product::UNIT;
  const int64_t bytes = reinterpret_cast<const char*>(w.at(N, 0)) - reinterpret_cast<const char*>(w.at(0, 0));
  const int64_t piece = std::max<int64_t>(1, 65536 * N / std::max<int64_t>(1, UNIT * bytes));
  share((N + UNIT - 1) / UNIT, piece, {w.at(0, 0), bytes}, [&](int64_t begin, int64_t end) {
    part(product, N, b, out, begin * UNIT, std::min(N, end * UNIT));
  });
}

#ifdef PAIRS_IN_HARDWARE
constexpr int64_t ROWS_FOR_PANELS = 256;  // of x; rearranging w pays from about here on

void multiply_in_panels(const at::Tensor& x, const at::Tensor& w, const at::Tensor* bias, at::Tensor& y) {
  const int64_t N = w.size(0), K = w.size(1), M = x.numel() / K;
  const Plain<BFloat16> of_w{w.const_data_ptr<BFloat16>(), K};
  const BFloat16 *of_x = x.const_data_ptr<BFloat16>(), *b = bias ? bias->const_data_ptr<BFloat16>() : nullptr;
  BFloat16* out = y.mutable_data_ptr<BFloat16>();
  share((N + PANEL - 1) / PANEL, 1, {of_w.data, N * K * 2}, [&](int64_t begin, int64_t end) {
    part_in_panels(of_x, of_w, b, out, M, N, begin * PANEL, std::min<int64_t>(N, end * PANEL));
  });
}
#endif

// From so many rows on, bfloat16 is oneDNN's to multiply: it rearranges w first, in each call.
int64_t rows_to_rearrange_for = std::numeric_limits<int64_t>::max();

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("linear: " + what); }

void check(bool fine, const char* what) {
  if (!fine) refuse(what);
}

// [.., N] for x [.., K], without a detour by the dispatcher: what surrounds a product of one row counts.
at::Tensor result_for(const at::Tensor& x, int64_t N) {
  c10::DimVector sizes(x.sizes());
  sizes.back() = N;
  return at::detail::empty_cpu(sizes, x.scalar_type());
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
  if (x.scalar_type() == at::kBFloat16 && M >= rows_to_rearrange_for)
    return at::linear(x, w, bias ? std::optional<at::Tensor>(*bias) : std::nullopt);
  at::Tensor y = result_for(x, N);
  with_activations(x.scalar_type(), [&](auto tag) {
    using Y = decltype(tag);
    const Plain<Y> of_w{w.const_data_ptr<Y>(), K};
#ifdef PAIRS_IN_HARDWARE
    if constexpr (std::is_same_v<Y, BFloat16>) {
      if (M >= ROWS_FOR_PANELS && K > 0 && K % 2 == 0) multiply_in_panels(x, w, bias, y);
      else multiply<PairProduct, Plain<Y>, Y>(of_w, x, N, bias, y);
    } else
#endif
      multiply<FloatProduct<Plain<Y>>, Plain<Y>, Y>(of_w, x, N, bias, y);
  });
  return y;
}

at::Tensor int8_linear(const at::Tensor& given, const at::Tensor& q, const at::Tensor& scales, const at::Tensor* bias) {
  const at::Tensor x = given.contiguous();
  const int64_t N = q.size(0), K = q.size(1);
  check(q.scalar_type() == at::kChar && q.is_contiguous() && x.size(-1) == K, "q must be int8 [N, K] for x [.., K]");
  check(scales.scalar_type() == at::kFloat && scales.is_contiguous() && scales.numel() == N,
        "a float32 scale for each row");
  at::Tensor y = result_for(x, N);
  with_activations(x.scalar_type(), [&](auto tag) {
    using Y = decltype(tag);
    const Int8 w{q.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), K};
    multiply<FloatProduct<Int8>, Int8, Y>(w, x, N, bias, y);
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
  at::Tensor y = result_for(x, N);
  with_activations(x.scalar_type(), [&](auto tag) {
    using Y = decltype(tag);
    const Int4 w{q.const_data_ptr<uint8_t>(), static_cast<const uint32_t*>(pairs.const_data_ptr()), K};
    multiply<Int4Product, Int4, Y>(w, x, N, bias, y);
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
}

// graphsrt::int8_linear and int4_linear are of any dtype, in Python; these are the kernels by themselves.
TORCH_LIBRARY_FRAGMENT(graphsrt, library) {
  library.def("int8_linear_kernel(Tensor x, Tensor q, Tensor scales, Tensor? bias=None) -> Tensor");
  library.def("int4_linear_kernel(Tensor x, Tensor q, Tensor pairs, Tensor? bias=None) -> Tensor");
  library.impl("int8_linear_kernel", [](const at::Tensor& x, const at::Tensor& q, const at::Tensor& scales,
                                 const MaybeTensor& bias) { return int8_linear(x, q, scales, pointer(bias)); });
  library.impl("int4_linear_kernel", [](const at::Tensor& x, const at::Tensor& q, const at::Tensor& pairs,
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

void graphsrt_rearrange_from(int64_t rows) { rows_to_rearrange_for = rows; }
}
