#include "storage/cpu_op.h"

#include <mlx/utils.h>

#include <stdexcept>

#include "util/concat.h"

namespace mx = mlx::core;

namespace kvpool::detail {

mx::Stream cpu_stream() {
  const mx::Stream current = mx::to_stream({});
  return current.device == mx::Device::cpu ? current : mx::default_stream(mx::Device::cpu);
}

void CpuOp::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::logic_error(concat("[", name(), "] runs on CPU streams"));
}

}  // namespace kvpool::detail
