#include "calibration/bit_allocation.h"

#include <algorithm>

namespace kvpool::calibration {
namespace {

/// For sums of bits that are rounded.
constexpr double kTolerance = 1e-9;
/// Halvings of the interval that the price lies in.
constexpr int kHalvings = 200;

class Parts {
 public:
  Parts(std::span<const double> costs, std::span<const double> bits) : costs_(costs), bits_(bits) {}

  std::size_t size() const noexcept { return costs_.size() / bits_.size(); }
  double cost(std::size_t part, std::size_t choice) const {
    return costs_[part * bits_.size() + choice];
  }

  /// What each part takes at a price: the cheapest, of equal ones that of fewest bits.
  std::vector<std::size_t> taken_at(double price) const {
    std::vector<std::size_t> taken(size());
    for (std::size_t part = 0; part < size(); ++part) {
      for (std::size_t c = 1; c < bits_.size(); ++c) {
        const std::size_t best = taken[part];
        if (cost(part, c) + price * bits_[c] < cost(part, best) + price * bits_[best]) {
          taken[part] = c;
        }
      }
    }
    return taken;
  }

  double bits_of(const std::vector<std::size_t>& taken) const {
    double sum = 0.0;
    for (const std::size_t choice : taken) sum += bits_[choice];
    return sum;
  }

  /// Gives what is left of `budget` to the parts that gain most by a bit.
  void spend(std::vector<std::size_t>& taken, double budget) const {
    for (;;) {
      const double left = budget - bits_of(taken);
      double most = 0.0;
      std::size_t best_part = 0;
      std::size_t best_choice = 0;
      for (std::size_t part = 0; part < size(); ++part) {
        for (std::size_t c = taken[part] + 1; c < bits_.size(); ++c) {
          const double more = bits_[c] - bits_[taken[part]];
          const double gain = (cost(part, taken[part]) - cost(part, c)) / more;
          if (more > left + kTolerance || gain <= most) continue;
          most = gain;
          best_part = part;
          best_choice = c;
        }
      }
      if (most <= 0.0) return;
      taken[best_part] = best_choice;
    }
  }

 private:
  std::span<const double> costs_;
  std::span<const double> bits_;
};

}  // namespace

std::vector<std::size_t> allocate_bits(std::span<const double> costs, std::span<const double> bits,
                                       double most) {
  const Parts parts(costs, bits);
  const double budget = most * static_cast<double>(parts.size());
  double low = 0.0;
  double high = costs.empty() ? 0.0 : *std::max_element(costs.begin(), costs.end());
  for (std::size_t c = 1; c < bits.size(); ++c) high = std::max(high, high / (bits[c] - bits[c - 1]));
  for (int i = 0; i < kHalvings; ++i) {
    const double price = 0.5 * (low + high);
    (parts.bits_of(parts.taken_at(price)) > budget + kTolerance ? low : high) = price;
  }
  std::vector<std::size_t> taken = parts.taken_at(high);
  parts.spend(taken, budget);
  return taken;
}

}  // namespace kvpool::calibration
