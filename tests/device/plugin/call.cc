#include "call.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "paddle/phi/core/compat/convert_utils.h"
#include "paddle/phi/core/generator.h"

namespace pretend_device {

using phi::DataType;
using phi::DenseTensor;

namespace {

template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<To>(from[i]);
  }
}

// Whether autograd kept only the shape of a tensor, since no gradient that is wanted depends on its values. The GPU's
// kernels do not read it then; some of the CPU's do.
bool lacks_memory(const DenseTensor& tensor) {
  if (tensor.dtype() != DataType::FLOAT32 && !is_half(tensor)) {
    return false;
  }
  const size_t needed = static_cast<size_t>(tensor.numel()) * phi::SizeOf(tensor.dtype());
  return tensor.Holder() == nullptr || tensor.capacity() < needed;
}

DenseTensor zeros(const phi::CPUContext& host, const phi::DDim& dims) {
  DenseTensor made;
  made.Resize(dims);
  std::memset(host.Alloc<float>(&made), 0, made.numel() * sizeof(float));
  return made;
}

}  // namespace

const phi::CPUContext& host_context(const phi::Place& device) {
  static const phi::CPUContext* const context = [&device] {
    auto* made = new phi::CPUContext(phi::CPUPlace());
    const auto* usual = phi::DeviceContextPool::Instance().Get(phi::CPUPlace());
    made->SetAllocator(&usual->GetAllocator());
    made->SetHostAllocator(&usual->GetHostAllocator());
    made->SetZeroAllocator(&usual->GetZeroAllocator());
    made->SetHostZeroAllocator(&usual->GetHostZeroAllocator());
    // Paddle would draw from the CPU's generator, which paddle.get_rng_state() does not give while the device is current.
    const phi::CustomPlace place(device.GetDeviceType(), device.GetDeviceId());
    made->SetGenerator(phi::DefaultCustomDeviceGenerator(place).get());
    made->SetHostGenerator(usual->GetHostGenerator());
    return made;
  }();
  return *context;
}

bool is_half(const DenseTensor& tensor) {
  return tensor.dtype() == DataType::FLOAT16 || tensor.dtype() == DataType::BFLOAT16;
}

DenseTensor widened(const phi::CPUContext& host, const DenseTensor& tensor) {
  DenseTensor wide;
  wide.Resize(tensor.dims());
  float* values = host.Alloc<float>(&wide);
  if (tensor.dtype() == DataType::FLOAT16) {
    convert(tensor.data<phi::dtype::float16>(), values, tensor.numel());
  } else {
    convert(tensor.data<phi::dtype::bfloat16>(), values, tensor.numel());
  }
  return wide;
}

const DenseTensor& Call::arg(const DenseTensor& input) {
  if (lacks_memory(input)) {
    tensors_.push_back(zeros(host_, input.dims()));
    return tensors_.back();
  }
  if (!is_half(input)) {
    return input;  // the device's memory is the host's
  }
  tensors_.push_back(widened(host_, input));
  return tensors_.back();
}

const paddle::optional<DenseTensor>& Call::arg(const paddle::optional<DenseTensor>& input) {
  if (!input) {
    return input;
  }
  optionals_.emplace_back(arg(*input));
  return optionals_.back();
}

std::vector<const DenseTensor*> Call::arg(const std::vector<const DenseTensor*>& inputs) {
  std::vector<const DenseTensor*> found;
  for (const DenseTensor* input : inputs) {
    found.push_back(input == nullptr ? nullptr : &arg(*input));
  }
  return found;
}

DenseTensor* Call::arg(DenseTensor* output) {
  if (output == nullptr) {
    return nullptr;  // nobody wants it, as with the gradient of a constant
  }
  tensors_.emplace_back();
  DenseTensor* aside = &tensors_.back();
  aside->set_meta(output->meta());
  if (is_half(*output)) {
    aside->set_type(DataType::FLOAT32);
  }
  outputs_.emplace_back(output, aside);
  return aside;
}

std::vector<DenseTensor*> Call::arg(const std::vector<DenseTensor*>& outputs) {
  std::vector<DenseTensor*> aside;
  for (DenseTensor* output : outputs) {
    aside.push_back(arg(output));
  }
  return aside;
}

void Call::give(DenseTensor* output, const DenseTensor& result) {
  const bool rounds = is_half(*output) && result.dtype() == DataType::FLOAT32;
  const DataType type = rounds ? output->dtype() : result.dtype();
  const bool in_place = output->initialized() && output->dtype() == type && output->numel() == result.numel();
  output->Resize(result.dims());
  // What is updated in place stays where it is: Paddle keeps Adam's powers of the betas on the host.
  void* memory = in_place ? output->data() : device_.Alloc(output, type);
  if (!rounds) {
    std::memcpy(memory, result.data(), result.numel() * phi::SizeOf(type));
  } else if (type == DataType::FLOAT16) {
    convert(result.data<float>(), static_cast<phi::dtype::float16*>(memory), result.numel());
  } else {
    convert(result.data<float>(), static_cast<phi::dtype::bfloat16*>(memory), result.numel());
  }
}

void Call::finish() {
  for (const auto& [output, aside] : outputs_) {
    if (aside->initialized()) {
      give(output, *aside);
    }
  }
}

const phi::Kernel& cpu_kernel(const std::string& name) {
  const auto& kernels = phi::KernelFactory::Instance().kernels()[name];
  const auto found = kernels.find(phi::KernelKey(phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, DataType::FLOAT32));
  if (found == kernels.end()) {
    std::fprintf(stderr, "pretend device: Paddle has no float32 kernel %s on the CPU\n", name.c_str());
    std::abort();
  }
  return found->second;
}

void add_kernel(const std::string& device_type, const std::string& name, phi::KernelFn function, void* variadic,
                const phi::Kernel& like) {
  const phi::Backend device = phi::TransToPhiBackend(phi::CustomPlace(device_type));
  phi::Kernel kernel(function, variadic);
  phi::KernelArgsDef& definitions = *kernel.mutable_args_def();
  definitions = like.args_def();
  for (auto& input : definitions.input_defs()) {
    input.SetBackend(phi::Backend::ALL_BACKEND);  // their memory is the host's, wherever they lie: none need be moved
  }
  for (auto& output : definitions.output_defs()) {
    if (output.backend == phi::Backend::CPU) {
      output.SetBackend(device);
    }
  }
  auto& kernels = phi::KernelFactory::Instance().kernels()[name];
  for (const DataType type : {DataType::FLOAT32, DataType::FLOAT16, DataType::BFLOAT16}) {
    kernels[phi::KernelKey(device, phi::DataLayout::ALL_LAYOUT, type)] = kernel;
  }
}

}  // namespace pretend_device
