#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "codec/codec.h"
#include "codec/vector_quantizer.h"

namespace kvpool::calibration {

/// How a head's rows are coded.
struct FittedTransform {
  codec::HeadTransform transform;
  std::vector<std::int8_t> rotation;  ///< What codec::set_rotation() made its rotation of, if any.
  /// What errors as large as what is coded would cost: of keys, each channel's squares by its cost;
  /// of values, all channels' alike.
  double cost = 0.0;
};

/// Values (n, dim): their mean is taken off; channels are divided by the root of their standard
/// deviation, since the errors of what goes through the Hadamard transform come back alike in all, and
/// are multiplied by the same: so their sum is least. What is coded has unit energy on average, so
/// that heads can share a codebook.
/// @param weights  (n,), >= 0, some above 0: what each row counts in means.
FittedTransform fit_values(std::span<const float> rows, std::span<const float> weights);

/// Keys (n, dim): their mean is taken off; channels are scaled by the root of what their errors
/// cost, so that an error of what is coded costs the same in each; and what is coded is rotated to
/// its principal axes, which are dealt to sub-vectors and mixed so that all of these vary alike: they
/// share a codebook. Unit energy as for values.
/// @param costs  (dim,), >= 0.
FittedTransform fit_keys(std::span<const float> rows, std::span<const float> weights,
                         std::span<const double> costs, int sub_dim);

/// Rows become what is coded of them.
void transform_rows(const codec::HeadTransform& transform, std::span<float> rows);

}  // namespace kvpool::calibration
