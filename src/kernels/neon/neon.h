#pragma once

#include "kernels/kernels.h"

namespace kvpool::kernels::neon {

/// Advanced SIMD as every AArch64 CPU has it.
const KernelTable& table();

KeyKernels raw_keys(Layout layout);
ValueKernels raw_values(Layout layout);
KeyKernels integer_keys(Layout layout);
ValueKernels integer_values(Layout layout);

}  // namespace kvpool::kernels::neon
