#pragma once

#include "kernels/kernels.h"

namespace kvpool::kernels::avx512 {

/// AVX-512 F, BW, DQ, VL, VBMI and VNNI: Ice Lake, Zen 4 and later.
const KernelTable& table();

}  // namespace kvpool::kernels::avx512
