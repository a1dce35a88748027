// The device's own kernels. What it has none for, Paddle runs on the CPU, with copies there and back.

#pragma once

#include <string>

namespace pretend_device {

// Operators of forward and backward passes.
void add_kernels(const std::string& device_type);

// The optimizers' updates, with float32 masters where the parameter is half.
void add_optimizers(const std::string& device_type);

}  // namespace pretend_device
