// Linears whose weights are integers of 8 bits, with a scale for each row, or of 4 bits, with a scale and an offset for
// each 32 columns. As in linear.cpp, weights are read once, as they are stored, and a row's result does not depend on
// which others are in the batch.
#include "floats.h"
#include "int4.h"
#include "product.h"

namespace {

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

}  // namespace

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

AOTITorchError aoti_torch_cpu_int8_linear(AtenTensorHandle x, AtenTensorHandle q, AtenTensorHandle scales,
                                          AtenTensorHandle* bias, AtenTensorHandle* result) {
  return guarded(result, [&] { return int8_linear(tensor(x), tensor(q), tensor(scales), optional_tensor(bias)); });
}

AOTITorchError aoti_torch_cpu_int4_linear(AtenTensorHandle x, AtenTensorHandle q, AtenTensorHandle pairs,
                                          AtenTensorHandle* bias, AtenTensorHandle* result) {
  return guarded(result, [&] { return int4_linear(tensor(x), tensor(q), tensor(pairs), optional_tensor(bias)); });
}
}
