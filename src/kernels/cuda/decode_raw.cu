#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_raw(const Geometry& geometry, int sets) {
  return choose_format<Sealed::kNone>(geometry, sets);
}
}  // namespace kvpool::cuda
