#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvpool::calibration {

/// Chooses bits for each of some parts so that their mean is at most `most` and the sum of what they
/// cost is low: all pay one price for a bit (Shoham, Gersho 1988), and what is left over goes to the
/// parts that gain most by a bit.
/// @param costs  (n_parts, n_choices), >= 0.
/// @param bits  (n_choices,), rising; the first at most `most`.
/// @return of each part, which choice.
std::vector<std::size_t> allocate_bits(std::span<const double> costs, std::span<const double> bits,
                                       double most);

}  // namespace kvpool::calibration
