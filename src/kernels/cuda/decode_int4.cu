#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_int4(const Geometry& geometry, int sets) {
  return choose_format<Sealed::kInt4>(geometry, sets);
}
}  // namespace kvpool::cuda
