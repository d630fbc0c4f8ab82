#pragma once

#include "kernels/kernels.h"

namespace kvpool::kernels::avx512 {

using Decode = void (*)(const PartShape&, const std::byte* part, int first_token, int n_tokens,
                        float* rows);

/// decode() of the integer layouts.
Decode key_decoder(Layout layout);
Decode value_decoder(Layout layout);

}  // namespace kvpool::kernels::avx512
