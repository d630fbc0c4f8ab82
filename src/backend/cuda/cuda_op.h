#pragma once

#include <mlx/primitives.h>

#include <vector>

#include "backend/cuda/device.h"
#include "backend/recover.h"

namespace kvpool::detail {

/// A primitive that is only ever put on a GPU stream. Its first input is the link of the chain.
class CudaOp : public mlx::core::Primitive {
 public:
  using Primitive::Primitive;
  void eval_cpu(const std::vector<mlx::core::array>& inputs,
                std::vector<mlx::core::array>& outputs) final;

  /// The inputs that callers gave, as recover() takes them.
  virtual InputGroups given() const { return {}; }

 protected:
  /// For an op of the chain: the first output becomes the next link.
  KernelQueue extend(const std::vector<mlx::core::array>& inputs,
                     std::vector<mlx::core::array>& outputs);
  /// For an op beside the chain, which no op of the chain must overtake: output i takes the memory
  /// of input i + 1.
  KernelQueue overwrite(const std::vector<mlx::core::array>& inputs,
                        std::vector<mlx::core::array>& outputs);
};

}  // namespace kvpool::detail
