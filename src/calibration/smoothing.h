#pragma once

#include <span>

#include "codec/codec.h"
#include "codec/vector_quantizer.h"

namespace kvpool::calibration {

/// How a head's rows (n, dim) are coded: their mean is taken off; keys are divided by the root of
/// the largest magnitude of each channel (VecInfer's lambda), so that a few loud channels do not
/// take all the codes; and what is coded has unit energy on average, so that heads can share a
/// codebook.
/// @param weights  (n,), >= 0, some above 0: what each row counts in the mean and the energy.
codec::HeadTransform fit_transform(codec::Role role, std::span<const float> rows,
                                   std::span<const float> weights);

/// Rows become what is coded of them.
void transform_rows(const codec::HeadTransform& transform, std::span<float> rows);

}  // namespace kvpool::calibration
