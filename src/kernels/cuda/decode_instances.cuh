#pragma once

#include "kernels/cuda/decode_choice.h"
#include "kernels/cuda/decode_kernel.cuh"

namespace kvpool::cuda {

template <class C>
KernelChoice choose() {
  return {reinterpret_cast<const void*>(&decode_kernel<C>), C::kThreads, C::kSharedBytes,
          C::kResident, (C::kWarps * C::kMergeStride - C::kThreads) * 4 / C::kHeads};
}
template <Sealed kFormat, class T, int kGroup, int... kSubs>
KernelChoice choose_shape(int dim, int sets) {
  if (dim == 128) {
    if (sets == 1) return choose<Config<kFormat, T, 128, kGroup, 1, kSubs...>>();
#ifndef KVPOOL_CUDA_FEW
    return choose<Config<kFormat, T, 128, kGroup, 2, kSubs...>>();
#endif
  }
#ifndef KVPOOL_CUDA_FEW
  if (dim == 64) {
    return sets == 1 ? choose<Config<kFormat, T, 64, kGroup, 1, kSubs...>>()
                     : choose<Config<kFormat, T, 64, kGroup, 2, kSubs...>>();
  }
#endif
  return {};
}
template <Sealed kFormat>
KernelChoice choose_format(const Geometry& geometry, int sets) {
  const bool wide = is_affine(kFormat) || is_kivi(kFormat) ? geometry.group_size == 64 : false;
#ifdef KVPOOL_CUDA_FEW
  if (wide || geometry.raw == Element::kFp16) return {};
  return choose_shape<kFormat, __nv_bfloat16, 32>(geometry.head_dim, sets);
#else
  if constexpr (is_affine(kFormat) || is_kivi(kFormat)) {
    if (wide) {
      return geometry.raw == Element::kFp16
                 ? choose_shape<kFormat, __half, 64>(geometry.head_dim, sets)
                 : choose_shape<kFormat, __nv_bfloat16, 64>(geometry.head_dim, sets);
    }
  }
  return geometry.raw == Element::kFp16
             ? choose_shape<kFormat, __half, 32>(geometry.head_dim, sets)
             : choose_shape<kFormat, __nv_bfloat16, 32>(geometry.head_dim, sets);
#endif
}

template <int kKeySub, int kValueSub>
KernelChoice choose_codes(const Geometry& geometry, int sets) {
#ifndef KVPOOL_CUDA_FEW
  if (geometry.raw == Element::kFp16) {
    return choose_shape<Sealed::kVector, __half, 32, kKeySub, kValueSub>(geometry.head_dim, sets);
  }
#endif
  return choose_shape<Sealed::kVector, __nv_bfloat16, 32, kKeySub, kValueSub>(geometry.head_dim,
                                                                              sets);
}
template <int kKeySub>
KernelChoice choose_vector(const Geometry& geometry, int sets) {
  switch (geometry.value_sub) {
    case 2:
      return choose_codes<kKeySub, 2>(geometry, sets);
    case 4:
      return choose_codes<kKeySub, 4>(geometry, sets);
    case 8:
      return choose_codes<kKeySub, 8>(geometry, sets);
    default:
      return {};
  }
}

}  // namespace kvpool::cuda
