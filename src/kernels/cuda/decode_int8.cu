#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_int8(const Geometry& geometry, int sets) {
  return choose_format<Sealed::kInt8>(geometry, sets);
}
}  // namespace kvpool::cuda
