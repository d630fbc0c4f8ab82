#include "calibration/sensitivity.h"

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

Sensitivity sensitivity(const mx::array& queries, const mx::array& keys, const mx::array& values,
                        float scale, std::int64_t window) {
  const mx::ShapeElem n_batch = keys.shape(0);
  const mx::ShapeElem n_heads = keys.shape(1);
  const mx::ShapeElem length = keys.shape(2);
  const mx::ShapeElem dim = keys.shape(3);
  const mx::ShapeElem group = queries.shape(1) / n_heads;
  const mx::array q = mx::multiply(
      mx::reshape(mx::astype(queries, mx::float32), {n_batch, n_heads, group, length, dim}),
      mx::array(scale));
  const mx::array k = mx::expand_dims(mx::astype(keys, mx::float32), 2);
  const mx::array v = mx::expand_dims(mx::astype(values, mx::float32), 2);
  Sensitivity sums{mx::zeros({n_batch, n_heads, length}, mx::float32),
                   mx::zeros({n_batch, n_heads, length}, mx::float32),
                   mx::zeros({n_heads, dim}, mx::float32)};
  for (mx::ShapeElem first = 0; first < length; first += kQueries) {
    const mx::ShapeElem end = std::min(first + kQueries, length);
    const mx::array asked = slice_tokens(q, 3, first, end);
    const mx::array seen_keys = slice_tokens(k, 3, 0, end);
    const mx::array seen_values = slice_tokens(v, 3, 0, end);
    const mx::array scores = mx::matmul(asked, mx::swapaxes(seen_keys, -1, -2));
    const mx::array distance = mx::subtract(mx::expand_dims(mx::arange(first, end, mx::int32), 1),
                                            mx::arange(0, end, mx::int32));
    const mx::array weights =
        mx::softmax(mx::where(mx::greater_equal(distance, mx::array(0)), scores,
                              mx::array(-std::numeric_limits<float>::infinity())),
                    -1, true);
    const mx::array far =
        mx::greater_equal(distance, mx::array(static_cast<int>(std::min<std::int64_t>(
                                        window, std::numeric_limits<int>::max()))));
    const mx::array squares = mx::where(far, mx::square(weights), mx::array(0.0F));
    const mx::array outputs = mx::matmul(weights, seen_values);
    const auto norms = [](const mx::array& rows) { return mx::sum(mx::square(rows), -1, true); };
    const mx::array apart = mx::subtract(
        mx::add(norms(outputs), mx::swapaxes(norms(seen_values), -1, -2)),
        mx::multiply(mx::array(2.0F), mx::matmul(outputs, mx::swapaxes(seen_values, -1, -2))));
    const mx::array moved = mx::multiply(squares, mx::maximum(apart, mx::array(0.0F)));
    const auto add = [&](mx::array& to, const mx::array& by_query) {
      to = mx::add(to, mx::pad(mx::sum(by_query, {2, 3}), {{0, 0}, {0, 0}, {0, length - end}}));
    };
    add(sums.keys, mx::multiply(moved, norms(asked)));
    add(sums.values, squares);
    sums.channels =
        mx::add(sums.channels,
                mx::sum(mx::multiply(mx::sum(moved, -1, true), mx::square(asked)), {0, 2, 3}));
    mx::eval(sums.keys, sums.values, sums.channels);
  }
  return sums;
}

}  // namespace kvpool::calibration
