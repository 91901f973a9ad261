// What products of all formats share: how the work is divided among threads and tiles (`part`), and tensors.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>

#include "../share.h"
#include "tile.h"

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

// ---- tensors -------------------------------------------------------------------------------------------------------

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
