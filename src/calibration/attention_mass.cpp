#include "calibration/attention_mass.h"

#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <limits>

namespace mx = mlx::core;

namespace kvpool::calibration {
namespace {

/// Queries at a time: bounds the memory that scores take.
constexpr mx::ShapeElem kQueries = 256;

mx::array slice_tokens(const mx::array& array, int axis, mx::ShapeElem first, mx::ShapeElem end) {
  mx::Shape start(array.ndim(), 0);
  mx::Shape stop = array.shape();
  start[static_cast<std::size_t>(axis)] = first;
  stop[static_cast<std::size_t>(axis)] = end;
  return mx::slice(array, std::move(start), std::move(stop));
}

}  // namespace

mx::array attention_mass(const mx::array& queries, const mx::array& keys, float scale,
                         std::int64_t window) {
  const mx::ShapeElem n_batch = keys.shape(0);
  const mx::ShapeElem n_heads = keys.shape(1);
  const mx::ShapeElem length = keys.shape(2);
  const mx::ShapeElem dim = keys.shape(3);
  const mx::ShapeElem group = queries.shape(1) / n_heads;
  const mx::array q = mx::multiply(
      mx::reshape(mx::astype(queries, mx::float32), {n_batch, n_heads, group, length, dim}),
      mx::array(scale));
  const mx::array k = mx::expand_dims(mx::astype(keys, mx::float32), 2);
  mx::array mass = mx::zeros({n_batch, n_heads, length}, mx::float32);
  for (mx::ShapeElem first = 0; first < length; first += kQueries) {
    const mx::ShapeElem end = std::min(first + kQueries, length);
    const mx::array scores = mx::matmul(slice_tokens(q, 3, first, end),
                                        mx::swapaxes(slice_tokens(k, 3, 0, end), -1, -2));
    const mx::array distance = mx::subtract(mx::expand_dims(mx::arange(first, end, mx::int32), 1),
                                            mx::arange(0, end, mx::int32));
    const mx::array seen = mx::greater_equal(distance, mx::array(0));
    const mx::array weights = mx::softmax(
        mx::where(seen, scores, mx::array(-std::numeric_limits<float>::infinity())), -1, true);
    const mx::array far =
        mx::greater_equal(distance, mx::array(static_cast<int>(std::min<std::int64_t>(
                                        window, std::numeric_limits<int>::max()))));
    const mx::array got = mx::sum(mx::where(far, weights, mx::array(0.0F)), {2, 3});
    mass = mx::add(mass, mx::pad(got, {{0, 0}, {0, 0}, {0, length - end}}));
    mass.eval();
  }
  return mass;
}

}  // namespace kvpool::calibration
