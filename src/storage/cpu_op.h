#pragma once

#include <mlx/primitives.h>
#include <mlx/stream.h>

#include <vector>

namespace kvpool::detail {

/// The CPU stream in use, or the CPU's default one: MLX's memory is one for all devices.
mlx::core::Stream cpu_stream();

/// A primitive that is only ever put on a CPU stream.
class CpuOp : public mlx::core::Primitive {
 public:
  using Primitive::Primitive;
  void eval_gpu(const std::vector<mlx::core::array>& inputs,
                std::vector<mlx::core::array>& outputs) final;
};

}  // namespace kvpool::detail
