#include "kernels/cuda/decode_instances.cuh"

namespace kvpool::cuda {
KernelChoice choose_vector_keys2(const Geometry& geometry, int sets) {
  return choose_vector<2>(geometry, sets);
}
}  // namespace kvpool::cuda
