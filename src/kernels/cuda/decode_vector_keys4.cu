#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_vector_keys4(const Geometry& geometry, int sets) {
  return choose_vector<4>(geometry, sets);
}
}  // namespace kvpool::cuda
