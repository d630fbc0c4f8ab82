#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_kivi4(const Geometry& geometry, int sets) {
  return choose_format<Sealed::kKivi4>(geometry, sets);
}
}  // namespace kvpool::cuda
