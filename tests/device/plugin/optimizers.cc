// Updates of SGD, Momentum, Adam and AdamW: the CPU's float32 ones, made on the master where the parameter has one
// (Micikevicius et al. 2018); the parameter is then the master, rounded.

#include <memory>
#include <string>

#include "call.h"
#include "kernels.h"
#include "paddle/phi/kernels/adam_kernel.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/momentum_kernel.h"
#include "paddle/phi/kernels/sgd_kernel.h"

namespace pretend_device {

using paddle::none;
using phi::CPUContext;
using phi::CustomContext;
using phi::DenseTensor;
using phi::Scalar;
using OptionalTensor = paddle::optional<DenseTensor>;

namespace {

// What an update reads and writes in place of the parameter.
class Parameter {
 public:
  Parameter(Call& call, const DenseTensor& param, const OptionalTensor& master, DenseTensor* param_out,
            DenseTensor* master_out)
      : before(master ? *master : call.arg(param)),
        after(call.arg(master ? master_out : param_out)),
        call_(call),
        rounded_(master ? param_out : nullptr) {}

  const DenseTensor& before;
  DenseTensor* const after;

  void finish() {
    if (rounded_ != nullptr) {
      call_.give(rounded_, *after);
    }
    call_.finish();
  }

 private:
  Call& call_;
  DenseTensor* const rounded_;
};

template <typename Function>
using Kept = std::unique_ptr<CPUFunction<Function>>;

Kept<decltype(&phi::SGDDenseKernel<float, CPUContext>)> cpu_sgd;
Kept<decltype(&phi::MomentumDenseKernel<float, CPUContext>)> cpu_momentum;
Kept<decltype(&phi::AdamDenseKernel<float, CPUContext>)> cpu_adam;
Kept<decltype(&phi::AdamwDenseKernel<float, CPUContext>)> cpu_adamw;

void sgd(const CustomContext& device, const DenseTensor& param, const DenseTensor& learning_rate,
         const DenseTensor& grad, const OptionalTensor& master, bool, DenseTensor* param_out, DenseTensor* master_out) {
  Call call(device);
  Parameter parameter(call, param, master, param_out, master_out);
  (*cpu_sgd)(call.host(), parameter.before, learning_rate, call.arg(grad), none, false, parameter.after, nullptr);
  parameter.finish();
}

void momentum(const CustomContext& device, const DenseTensor& param, const DenseTensor& grad, const DenseTensor& velocity,
              const DenseTensor& learning_rate, const OptionalTensor& master, float mu, bool nesterov,
              const std::string& decay_kind, float decay, bool, float gradient_scale, DenseTensor* param_out,
              DenseTensor* velocity_out, DenseTensor* master_out) {
  Call call(device);
  Parameter parameter(call, param, master, param_out, master_out);
  (*cpu_momentum)(call.host(), parameter.before, call.arg(grad), velocity, learning_rate, none, mu, nesterov, decay_kind,
                  decay, false, gradient_scale, parameter.after, call.arg(velocity_out), nullptr);
  parameter.finish();
}

void adam(const CustomContext& device, const DenseTensor& param, const DenseTensor& grad,
          const DenseTensor& learning_rate, const DenseTensor& moment1, const DenseTensor& moment2,
          const OptionalTensor& moment2_max, const DenseTensor& beta1_pow, const DenseTensor& beta2_pow,
          const OptionalTensor& master, const OptionalTensor& skip_update, const Scalar& beta1, const Scalar& beta2,
          const Scalar& epsilon, bool lazy, int64_t rows_of_a_thread, bool, bool global_beta_pow, bool amsgrad,
          DenseTensor* param_out, DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* moment2_max_out,
          DenseTensor* beta1_pow_out, DenseTensor* beta2_pow_out, DenseTensor* master_out) {
  Call call(device);
  Parameter parameter(call, param, master, param_out, master_out);
  (*cpu_adam)(call.host(), parameter.before, call.arg(grad), learning_rate, moment1, moment2, moment2_max, beta1_pow,
              beta2_pow, none, skip_update, beta1, beta2, epsilon, lazy, rows_of_a_thread, false, global_beta_pow, amsgrad,
              parameter.after, call.arg(moment1_out), call.arg(moment2_out), call.arg(moment2_max_out),
              call.arg(beta1_pow_out), call.arg(beta2_pow_out), nullptr);
  parameter.finish();
}

void adamw(const CustomContext& device, const DenseTensor& param, const DenseTensor& grad,
           const DenseTensor& learning_rate, const DenseTensor& moment1, const DenseTensor& moment2,
           const OptionalTensor& moment2_max, const DenseTensor& beta1_pow, const DenseTensor& beta2_pow,
           const OptionalTensor& master, const OptionalTensor& skip_update, const Scalar& beta1, const Scalar& beta2,
           const Scalar& epsilon, float lr_ratio, float decay, bool decays, bool lazy, int64_t rows_of_a_thread, bool,
           bool global_beta_pow, bool amsgrad, DenseTensor* param_out, DenseTensor* moment1_out, DenseTensor* moment2_out,
           DenseTensor* moment2_max_out, DenseTensor* beta1_pow_out, DenseTensor* beta2_pow_out,
           DenseTensor* master_out) {
  Call call(device);
  Parameter parameter(call, param, master, param_out, master_out);
  (*cpu_adamw)(call.host(), parameter.before, call.arg(grad), learning_rate, moment1, moment2, moment2_max, beta1_pow,
               beta2_pow, none, skip_update, beta1, beta2, epsilon, lr_ratio, decay, decays, lazy, rows_of_a_thread, false,
               global_beta_pow, amsgrad, parameter.after, call.arg(moment1_out), call.arg(moment2_out),
               call.arg(moment2_max_out), call.arg(beta1_pow_out), call.arg(beta2_pow_out), nullptr);
  parameter.finish();
}

// Keeps the CPU's update and registers ours.
template <auto ours, typename Function>
void add(const std::string& device_type, const std::string& name, Kept<Function>& cpu) {
  const phi::Kernel& kernel = cpu_kernel(name);
  cpu = std::make_unique<CPUFunction<Function>>(kernel);
  add_kernel<ours>(device_type, name, kernel);
}

}  // namespace

void add_optimizers(const std::string& device_type) {
  add<&sgd>(device_type, "sgd", cpu_sgd);
  add<&momentum>(device_type, "momentum", cpu_momentum);
  add<&adam>(device_type, "adam", cpu_adam);
  add<&adamw>(device_type, "adamw", cpu_adamw);
}

}  // namespace pretend_device
