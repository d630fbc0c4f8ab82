#include "kvpool/weight_sketch.h"

#include <mlx/ops.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "calibration/random.h"
#include "util/concat.h"
#include "util/shape_text.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

mx::array signs(int n_rows, int n_columns, std::uint64_t seed) {
  calibration::Random random(seed);
  std::vector<float> values(static_cast<std::size_t>(n_rows) * static_cast<std::size_t>(n_columns));
  for (float& value : values) value = (random.next() >> 63) != 0 ? 1.0F : -1.0F;
  return mx::array(values.data(), {n_rows, n_columns}, mx::float32);
}

}  // namespace

mx::array weight_sketch(const mx::array& weight, int size) {
  if (weight.ndim() != 2 || weight.size() == 0 || !mx::issubdtype(weight.dtype(), mx::floating)) {
    throw std::invalid_argument(
        detail::concat("weight_sketch: weight must be (out, in) of a floating type, got ",
                       detail::shape_text(weight.shape())));
  }
  if (size < 1 || size > 4096) {
    throw std::invalid_argument(
        detail::concat("weight_sketch: size must be 1 to 4096, got ", size));
  }
  const mx::array left = signs(size, weight.shape(0), 1);
  const mx::array right = signs(size, weight.shape(1), 2);
  const mx::array rows = mx::matmul(left, mx::astype(weight, mx::float32));
  const auto root = static_cast<float>(std::sqrt(static_cast<double>(weight.size())));
  return mx::divide(mx::sum(mx::multiply(rows, right), 1), mx::array(root));
}

}  // namespace kvpool
