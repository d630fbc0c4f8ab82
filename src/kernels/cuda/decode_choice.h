#pragma once

#include "kernels/cuda/decode.h"

namespace kvpool::cuda {

/// What prepare() asks of each format's file.
struct KernelChoice {
  const void* function = nullptr;
  int threads = 0;
  int shared_bytes = 0;
  int resident = 1;
  /// Blocks that one pair's merge has room for.
  int most_blocks = 1;
};

/// Of each sealed format; without a function where the geometry has none. Sets: of four query heads.
KernelChoice choose_raw(const Geometry&, int sets);
KernelChoice choose_int8(const Geometry&, int sets);
KernelChoice choose_int4(const Geometry&, int sets);
KernelChoice choose_int2(const Geometry&, int sets);
KernelChoice choose_kivi4(const Geometry&, int sets);
KernelChoice choose_kivi2(const Geometry&, int sets);
KernelChoice choose_vector_keys2(const Geometry&, int sets);
KernelChoice choose_vector_keys4(const Geometry&, int sets);
KernelChoice choose_vector_keys8(const Geometry&, int sets);

}  // namespace kvpool::cuda
