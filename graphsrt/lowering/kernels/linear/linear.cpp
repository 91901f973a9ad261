// y[M, N] = x[M, K] · w[N, K]ᵀ (+ bias) for few rows of x and many of w: the weights are read once, as they are stored.
//
// A row of w and a row of x lie contiguous in memory, so an element of y is a dot product along both: vectors run along
// K, and are summed at the very end. The sum of an element is formed in the same order for every M, so a row's result
// does not depend on which others are in the batch. Many rows of bfloat16 are multiplied in another way (panels.h), in
// which that order is another one; it does not depend on how many they are either.
//
// How the work is divided is in product.h. How x and w become numbers that are multiplied, and the innermost loops, are
// in floats.h (float32) and pairs.h (bfloat16 in hardware). Weights of 8 and 4 bits: integers.cpp.
#include <ATen/ops/linear.h>

#include <limits>

#include "floats.h"
#include "pairs.h"
#include "panels.h"
#include "product.h"

namespace {

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

}  // namespace

// What the dispatcher calls.
TORCH_LIBRARY_IMPL(graphsrt, CPU, library) {
  library.impl("dense_linear", [](const at::Tensor& x, const at::Tensor& w, const MaybeTensor& bias) {
    return linear(x, w, pointer(bias));
  });
}

// What compiled regions call: no dispatcher, no boxing. inductor.py declares it.
extern "C" {

AOTITorchError aoti_torch_cpu_dense_linear(AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias,
                                           AtenTensorHandle* result) {
  return guarded(result, [&] { return linear(tensor(x), tensor(w), optional_tensor(bias)); });
}

void graphsrt_rearrange_from(int64_t rows) { rows_to_rearrange_for = rows; }
}
