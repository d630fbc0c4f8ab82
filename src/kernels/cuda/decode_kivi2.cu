#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_kivi2(const Geometry& geometry, int sets) {
  return choose_format<Sealed::kKivi2>(geometry, sets);
}
}  // namespace kvpool::cuda
