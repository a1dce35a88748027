// The operators that a training computes in half precision. Some are needed in float32 as well, since Paddle (3.3.1) fails
// to run them on the CPU for a device: of a product with a constant, autograd keeps no more than the other factor's shape,
// and Paddle copies its missing memory; and an embedding's gradient it leaves on the CPU, where the loss scaler passes it by.

#include "kernels.h"

#include <algorithm>
#include <cmath>

#include "call.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/amp_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/concat_grad_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/dropout_grad_kernel.h"
#include "paddle/phi/kernels/dropout_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/embedding_grad_kernel.h"
#include "paddle/phi/kernels/expand_grad_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/flatten_grad_kernel.h"
#include "paddle/phi/kernels/flatten_kernel.h"
#include "paddle/phi/kernels/gelu_grad_kernel.h"
#include "paddle/phi/kernels/gelu_kernel.h"
#include "paddle/phi/kernels/layer_norm_grad_kernel.h"
#include "paddle/phi/kernels/layer_norm_kernel.h"
#include "paddle/phi/kernels/linear_v2_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/reduce_mean_grad_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/softmax_grad_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/split_kernel.h"
#include "paddle/phi/kernels/squeeze_kernel.h"
#include "paddle/phi/kernels/stack_kernel.h"
#include "paddle/phi/kernels/swiglu_grad_kernel.h"
#include "paddle/phi/kernels/swiglu_kernel.h"
#include "paddle/phi/kernels/transpose_grad_kernel.h"
#include "paddle/phi/kernels/transpose_kernel.h"
#include "paddle/phi/kernels/unsqueeze_kernel.h"
#include "paddle/phi/kernels/where_grad_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

namespace pretend_device {

// an operator's name and the function template of its kernel
#define ADD(NAME, KERNEL) ADD_AS(NAME, decltype(&phi::KERNEL<float, phi::CPUContext>))
#define ADD_AS(NAME, ...) Operator<__LINE__, __VA_ARGS__>::add(device_type, NAME)

// its header wants a part of Eigen that the wheel does not carry: input, weight, bias, gradient, whether the weight is
// transposed; their three gradients
using LinearV2Grad = void (*)(const phi::CPUContext&, const phi::DenseTensor&, const phi::DenseTensor&,
                              const phi::DenseTensor&, const phi::DenseTensor&, bool, phi::DenseTensor*,
                              phi::DenseTensor*, phi::DenseTensor*);

// Softmax of scores [batch, heads, rows, columns] in which row i sees the columns up to i. The CPU's kernel only says that
// it does not exist.
void fused_softmax(const phi::CustomContext& device, const phi::DenseTensor& scores, phi::DenseTensor* probabilities) {
  Call call(device);
  const phi::DenseTensor& from = call.arg(scores);
  phi::DenseTensor* to = call.arg(probabilities);
  const int64_t rows = scores.dims()[2];
  const int64_t columns = scores.dims()[3];
  const float* score = from.data<float>();
  float* probability = call.host().Alloc<float>(to);
  for (int64_t line = 0; line < scores.numel() / columns; ++line) {
    const int64_t seen = std::min(line % rows + 1, columns);
    const float largest = *std::max_element(score, score + seen);
    float sum = 0;
    for (int64_t column = 0; column < seen; ++column) {
      probability[column] = std::exp(score[column] - largest);
      sum += probability[column];
    }
    for (int64_t column = 0; column < columns; ++column) {
      probability[column] = column < seen ? probability[column] / sum : 0.0f;
    }
    score += columns;
    probability += columns;
  }
  call.finish();
}

// What is masked has a probability of 0, and so no gradient, as in any softmax.
void fused_softmax_grad(const phi::CustomContext& device, const phi::DenseTensor& probabilities,
                        const phi::DenseTensor& gradient, phi::DenseTensor* scores_gradient) {
  using Function = decltype(&phi::SoftmaxGradKernel<float, phi::CPUContext>);
  static const CPUFunction<Function> softmax_grad(cpu_kernel("softmax_grad"));
  Call call(device);
  softmax_grad(call.host(), call.arg(probabilities), call.arg(gradient), -1, call.arg(scores_gradient));
  call.finish();
}

void add_kernels(const std::string& device_type) {
  // arithmetic
  ADD("add", AddKernel);
  ADD("add_grad", AddGradKernel);
  ADD("subtract", SubtractKernel);
  ADD("subtract_grad", SubtractGradKernel);
  ADD("multiply", MultiplyKernel);
  ADD("multiply_grad", MultiplyGradKernel);
  ADD("divide", DivideKernel);
  ADD("divide_grad", DivideGradKernel);
  ADD("square", SquareKernel);
  ADD("square_grad", SquareGradKernel);
  ADD("rsqrt", RsqrtKernel);
  ADD("rsqrt_grad", RsqrtGradKernel);
  ADD("mean", MeanKernel);
  ADD("mean_grad", ReduceMeanGradKernel);
  ADD("scale", ScaleKernel);
  ADD("sum", SumKernel);
  ADD("where", WhereKernel);
  ADD("where_grad", WhereGradKernel);
  // layers
  ADD("embedding_grad", EmbeddingGradKernel);
  ADD("matmul", MatmulKernel);
  ADD("matmul_grad", MatmulGradKernel);
  ADD("linear_v2", LinearV2Kernel);
  ADD_AS("linear_v2_grad", LinearV2Grad);
  ADD("softmax", SoftmaxKernel);
  ADD("softmax_grad", SoftmaxGradKernel);
  add_kernel<&fused_softmax>(device_type, "fused_softmax_mask_upper_triangle", cpu_kernel("softmax"));
  add_kernel<&fused_softmax_grad>(device_type, "fused_softmax_mask_upper_triangle_grad", cpu_kernel("softmax_grad"));
  ADD("layer_norm", LayerNormKernel);
  ADD("layer_norm_grad", LayerNormGradKernel);
  ADD("gelu", GeluKernel);
  ADD("gelu_grad", GeluGradKernel);
  ADD("swiglu", SwiGLUKernel);
  ADD("swiglu_grad", SwiGLUGradKernel);
  ADD("dropout", DropoutRawKernel);
  ADD("dropout_grad", DropoutGradRawKernel);
  // shapes and types; Paddle would run them on the CPU as well, and starts threads for every copy there and back
  ADD("cast", CastKernel);
  ADD("concat", ConcatKernel);
  ADD("concat_grad", ConcatGradKernel);
  ADD("expand", ExpandKernel);
  ADD("expand_grad", ExpandGradKernel);
  ADD("flatten", FlattenKernel);
  ADD("flatten_grad", FlattenGradKernel);
  ADD("split", SplitKernel);
  ADD("squeeze", SqueezeKernel);
  ADD("stack", StackKernel);
  ADD("transpose", TransposeKernel);
  ADD("transpose_grad", TransposeGradKernel);
  ADD("unsqueeze", UnsqueezeKernel);
  // the loss scaler
  ADD("check_finite_and_unscale", CheckFiniteAndUnscaleKernel);
}

}  // namespace pretend_device
