#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_vector_keys8(const Geometry& geometry, int sets) {
  return choose_vector<8>(geometry, sets);
}
}  // namespace kvpool::cuda
