// Makes kernels of the device out of the CPU's float32 ones.
//
// Half-precision inputs are widened, the CPU's kernel computes in float32, and what comes out is rounded to the type of
// the output: what tensor cores and the reductions of GPU kernels do, but for the order of sums.

#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_factory.h"
#include "paddle/phi/core/kernel_utils.h"
#include "paddle/utils/optional.h"

namespace pretend_device {

// What the CPU's kernels compute with: temporary tensors on the host, random numbers of the device's own generator.
const phi::CPUContext& host_context(const phi::Place& device);

// Whether a tensor holds float16 or bfloat16.
bool is_half(const phi::DenseTensor& tensor);

// A float32 copy of a half-precision tensor.
phi::DenseTensor widened(const phi::CPUContext& host, const phi::DenseTensor& tensor);

// One call of a CPU kernel with the tensors of a call of the device's kernel.
//
// `arg` stands for each argument. Outputs are computed aside and reach the device's tensors in `finish`: a kernel that works
// in place thus reads all its inputs before anything is overwritten.
class Call {
 public:
  explicit Call(const phi::DeviceContext& device) : device_(device), host_(host_context(device.GetPlace())) {}

  const phi::CPUContext& host() const { return host_; }

  const phi::DenseTensor& arg(const phi::DenseTensor& input);
  const paddle::optional<phi::DenseTensor>& arg(const paddle::optional<phi::DenseTensor>& input);
  std::vector<const phi::DenseTensor*> arg(const std::vector<const phi::DenseTensor*>& inputs);
  phi::DenseTensor* arg(phi::DenseTensor* output);
  std::vector<phi::DenseTensor*> arg(const std::vector<phi::DenseTensor*>& outputs);

  // numbers, shapes and the like
  template <typename Attribute>
  const Attribute& arg(const Attribute& attribute) {
    return attribute;
  }

  // Gives the device's output the values of `result`, in the output's type.
  void give(phi::DenseTensor* output, const phi::DenseTensor& result);

  void finish();

 private:
  const phi::DeviceContext& device_;
  const phi::CPUContext& host_;
  // a deque: what is in it stays where it is when more is added
  std::deque<phi::DenseTensor> tensors_;
  std::deque<paddle::optional<phi::DenseTensor>> optionals_;
  std::vector<std::pair<phi::DenseTensor*, phi::DenseTensor*>> outputs_;
};

// The CPU's kernel of that name for float32; ends the process where Paddle has none.
const phi::Kernel& cpu_kernel(const std::string& name);

// A CPU kernel's function, `Function` being its type, as Paddle keeps it: called with any context.
template <typename Function>
class CPUFunction;

template <typename... Arguments>
class CPUFunction<void (*)(const phi::CPUContext&, Arguments...)> {
 public:
  explicit CPUFunction(const phi::Kernel& kernel) : function_(kernel.GetVariadicKernelFn<Kept>()) {}

  void operator()(const phi::CPUContext& host, Arguments... arguments) const { function_(host, arguments...); }

 private:
  using Kept = void (*)(const phi::DeviceContext&, Arguments...);

  Kept function_;
};

// Registers a kernel of the device for float32, float16 and bfloat16, with as many inputs and outputs as `like`.
void add_kernel(const std::string& device_type, const std::string& name, phi::KernelFn function, void* variadic,
                const phi::Kernel& like);

// The same, for a function of a CustomContext.
template <auto function>
void add_kernel(const std::string& device_type, const std::string& name, const phi::Kernel& like) {
  using Kernel = phi::KernelImpl<decltype(function), function>;
  add_kernel(device_type, name, &Kernel::Compute, reinterpret_cast<void*>(&Kernel::VariadicCompute), like);
}

// The device's kernel of one operator.
//
// `Function` is the type of the CPU's kernel; `ID` makes one class an operator, since several have the same type.
template <int ID, typename Function>
class Operator;

template <int ID, typename... Arguments>
class Operator<ID, void (*)(const phi::CPUContext&, Arguments...)> {
 public:
  static void add(const std::string& device_type, const std::string& name) {
    const phi::Kernel& kernel = cpu_kernel(name);
    float32_ = new Float32(kernel);
    add_kernel<&compute>(device_type, name, kernel);
  }

 private:
  using Float32 = CPUFunction<void (*)(const phi::CPUContext&, Arguments...)>;

  static void compute(const phi::CustomContext& device, Arguments... arguments) {
    Call call(device);
    (*float32_)(call.host(), call.arg(arguments)...);
    call.finish();
  }

  inline static const Float32* float32_ = nullptr;
};

}  // namespace pretend_device
