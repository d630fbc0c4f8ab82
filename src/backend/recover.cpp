#include "backend/recover.h"

#include <mlx/ops.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>
#include <vector>

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

/// MLX may report here, once, that other work has failed: that says nothing of this array.
bool can_be_evaluated(mx::array array) {
  try {
    array.eval();
    return true;
  } catch (const std::exception&) {
    return array.status() != mx::array::Status::unscheduled;
  }
}

/// An array that can be evaluated and holds NaN, whether as numbers or as a block's bytes.
mx::array not_a_number(const mx::array& like, mx::Stream stream) {
  const mx::array value = like.dtype() == mx::uint8
                              ? mx::array(255, mx::uint8)
                              : mx::array(std::numeric_limits<float>::quiet_NaN());
  return mx::contiguous(mx::full(like.shape(), value, like.dtype(), stream), false, stream);
}

/// @return whether any input was replaced.
bool replace_failing_inputs(mx::array& link, const InputGroups& groups) {
  const std::vector<mx::array> inputs = link.inputs();
  std::vector<mx::array> outputs = link.outputs();
  bool replaced = false;
  for (const std::vector<std::size_t>& group : groups) {
    if (std::ranges::all_of(group, [&](std::size_t i) { return can_be_evaluated(inputs[i]); })) {
      continue;
    }
    replaced = true;
    for (const std::size_t i : group) {
      const mx::array replacement = not_a_number(inputs[i], link.primitive().stream());
      for (mx::array& output : outputs) output.inputs()[i] = replacement;
    }
  }
  return replaced;
}

}  // namespace

std::int64_t recover_chain(mx::array last,
                           const std::function<InputGroups(const mx::array& link)>& groups_of) {
  std::vector<mx::array> links;
  for (mx::array link = std::move(last); link.status() == mx::array::Status::unscheduled;
       link = mx::array(link.inputs()[0])) {
    links.push_back(link);
  }
  std::int64_t n_replaced = 0;
  for (; !links.empty(); links.pop_back()) {
    mx::array& link = links.back();
    if (can_be_evaluated(link)) continue;
    if (replace_failing_inputs(link, groups_of(link))) ++n_replaced;
    if (!can_be_evaluated(link)) link.eval();
  }
  return n_replaced;
}

}  // namespace kvpool::detail
