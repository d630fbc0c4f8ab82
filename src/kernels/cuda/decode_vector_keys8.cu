#include "kernels/cuda/decode_kernel.cuh"

namespace kvpool::cuda {
KernelChoice choose_vector_keys8(const Geometry& geometry, int sets) {
  return choose_vector<8>(geometry, sets);
}
}  // namespace kvpool::cuda
