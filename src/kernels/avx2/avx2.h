#pragma once

#include "kernels/kernels.h"

namespace kvpool::kernels::avx2 {

/// AVX2 with FMA and F16C: Haswell, Zen and later.
const KernelTable& table();

KeyKernels raw_keys(Layout layout);
ValueKernels raw_values(Layout layout);
KeyKernels affine_keys(Layout layout);
ValueKernels affine_values(Layout layout);
KeyKernels channel_keys(Layout layout);
KeyKernels vector_keys(Layout layout);
ValueKernels vector_values(Layout layout);

/// encode() of the integer layouts, and the transforms. AVX-512 has no use for wider ones.
using Encode = decltype(KeyKernels::encode);
Encode key_encoder(Layout layout);
Encode value_encoder(Layout layout);
void hadamard(float* rows, int n_rows, int dim);
void rotate(const float* matrix, float* rows, int n_rows, int dim);

}  // namespace kvpool::kernels::avx2
