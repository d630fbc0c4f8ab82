#pragma once

#include "kernels/kernels.h"

namespace kvpool::kernels::avx2 {

/// AVX2 with FMA and F16C: Haswell, Zen and later.
const KernelTable& table();

KeyKernels raw_keys(Layout layout);
ValueKernels raw_values(Layout layout);
KeyKernels integer_keys(Layout layout);
ValueKernels integer_values(Layout layout);
KeyKernels vector_keys(Layout layout);
ValueKernels vector_values(Layout layout);

}  // namespace kvpool::kernels::avx2
