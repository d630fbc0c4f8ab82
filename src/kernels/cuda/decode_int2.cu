#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_int2(const Geometry& geometry, int sets) {
  return choose_format<Sealed::kInt2>(geometry, sets);
}
}  // namespace kvpool::cuda
