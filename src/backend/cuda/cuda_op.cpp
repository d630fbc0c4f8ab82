#include "backend/cuda/cuda_op.h"

#include <stdexcept>

#include "util/concat.h"

namespace mx = mlx::core;

namespace kvpool::detail {

void CudaOp::eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::logic_error(concat("[", name(), "] runs on GPU streams"));
}

KernelQueue CudaOp::extend(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  outputs[0].copy_shared_buffer(inputs[0]);
  return {stream(), inputs, outputs};
}

KernelQueue CudaOp::overwrite(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_shared_buffer(inputs[i + 1]);
  return {stream(), inputs, outputs};
}

}  // namespace kvpool::detail
