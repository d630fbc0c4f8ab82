#pragma once

#include "kernels/kernels.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels::neon {

/// Integer layouts only.
scalar::Decode key_decoder(Layout layout);
scalar::Decode value_decoder(Layout layout);

}  // namespace kvpool::kernels::neon
