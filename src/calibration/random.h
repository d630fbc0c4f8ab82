#pragma once

#include <cstdint>
#include <span>

namespace kvpool::calibration {

/// SplitMix64 (Steele, Lea, Flood 2014): the same numbers with every compiler and library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() noexcept {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }

  /// In [0, 1).
  double uniform() noexcept { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

  /// An index, with a chance that is its share of `weights`; any of them if all are 0.
  std::size_t draw(std::span<const double> weights) noexcept {
    double total = 0.0;
    for (const double weight : weights) total += weight;
    double left = uniform() * total;
    if (total <= 0.0) return static_cast<std::size_t>(next() % weights.size());
    std::size_t last = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] <= 0.0) continue;
      last = i;
      left -= weights[i];
      if (left < 0.0) break;
    }
    return last;
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvpool::calibration
