#include "attention/mask.h"

#include <algorithm>
#include <limits>

namespace kvpool::attention {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();

void apply_array(const Arguments& arguments, const QueryRow& row, const BlockRef& block,
                 float* scores) noexcept {
  const Mask& mask = arguments.mask;
  const std::int64_t start = static_cast<std::int64_t>(row.sequence) * mask.strides[0] +
                             row.head * mask.strides[1] + row.query * mask.strides[2] +
                             (block.position - mask.first_position) * mask.strides[3];
  if (mask.kind == Mask::Kind::kBool) {
    const bool* const attend = static_cast<const bool*>(mask.data) + start;
    for (int t = 0; t < block.n_tokens; ++t) {
      if (!attend[t * mask.strides[3]]) scores[t] = kHidden;
    }
  } else {
    const float* const bias = static_cast<const float*>(mask.data) + start;
    for (int t = 0; t < block.n_tokens; ++t) scores[t] += bias[t * mask.strides[3]];
  }
}

}  // namespace

Visible visible(const Arguments& arguments, std::int64_t position) noexcept {
  return {arguments.window > 0 ? position - arguments.window + 1 : -kFar,
          arguments.causal ? position + 1 : kFar};
}

void mask_scores(const Arguments& arguments, const QueryRow& row, const BlockRef& block,
                 float* scores) noexcept {
  if (arguments.mask.kind != Mask::Kind::kNone) apply_array(arguments, row, block, scores);
  const Visible keys =
      visible(arguments, arguments.sequences[row.sequence].query_position + row.query);
  const std::int64_t n = block.n_tokens;
  // Compared, not subtracted: the ends may be far.
  const std::int64_t first =
      keys.first <= block.position ? 0 : std::min(n, keys.first - block.position);
  const std::int64_t end =
      keys.end >= block.position + n ? n : std::max<std::int64_t>(0, keys.end - block.position);
  std::fill(scores, scores + first, kHidden);
  std::fill(scores + std::min(n, end), scores + n, kHidden);
}

}  // namespace kvpool::attention
