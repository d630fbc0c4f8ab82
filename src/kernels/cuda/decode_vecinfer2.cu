#include "kernels/cuda/decode_kernel.cuh"

namespace kvpool::cuda {
KernelChoice choose_vecinfer2(const Geometry& geometry, int sets) {
  return choose_format<Sealed::kVecInfer2>(geometry, sets);
}
}  // namespace kvpool::cuda
