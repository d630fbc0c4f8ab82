#include <mlx/fast.h>
#include <mlx/ops.h>
#include <mlx/utils.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "backend/ops/blocks.h"
#include "backend/ops/ops_backend.h"
#include "backend/ops/parts.h"

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

/// One row's queries and the tokens that some of them see.
struct RowRange {
  std::int64_t query;  ///< Position of the first query.
  std::int64_t n_queries;
  std::int64_t from, to;

  bool empty() const noexcept { return n_queries == 0 || from >= to; }
  /// Of the last query.
  std::int64_t window_start(std::int64_t window) const noexcept {
    return query + n_queries - window;
  }
};

RowRange range_of(const AttendRow& row, std::int64_t n_queries, const Visibility& visibility) {
  const auto blocks = row.sequence->blocks();
  RowRange range{row.query_position, n_queries, 0, 0};
  if (blocks.empty()) return range;
  range.from = blocks.front().position;
  range.to = blocks.back().end();
  if (visibility.window > 0) {
    range.from = std::max(range.from, range.query - visibility.window + 1);
  }
  if (visibility.causal) range.to = std::min(range.to, range.query + n_queries);
  return range;
}

/// What each query sees, as scaled_dot_product_attention takes it.
struct RowMask {
  std::string mode;                ///< "", "causal" or "array".
  std::optional<mx::array> array;  ///< bool or additive.
  std::optional<mx::array> seen;   ///< Whether a query sees a token at all; null: each does.
};

/// By position: bool, (1, 1, S, tokens).
mx::array positional_mask(const RowRange& range, const Visibility& visibility) {
  const auto positions = [](std::int64_t from, std::int64_t to) {
    return mx::arange(static_cast<int>(from), static_cast<int>(to), 1, mx::int32);
  };
  const mx::array query =
      mx::reshape(positions(range.query, range.query + range.n_queries), {1, 1, -1, 1});
  const mx::array key = mx::reshape(positions(range.from, range.to), {1, 1, 1, -1});
  const auto in_window = [&] {
    return mx::greater(key, mx::subtract(query, mx::array(static_cast<int>(visibility.window))));
  };
  if (!visibility.causal) return in_window();
  const mx::array before = mx::less_equal(key, query);
  return visibility.window > 0 ? mx::logical_and(before, in_window()) : before;
}

mx::array any_seen(const mx::array& mask) {
  if (mask.dtype() == mx::bool_) return mx::any(mask, -1, true);
  return mx::greater(mx::max(mask, -1, true), mx::array(-std::numeric_limits<float>::infinity()));
}

/// The row's share of a mask that broadcasts to (B, n_heads, S, all tokens).
mx::array own_mask(const mx::array& mask, std::int64_t row, const RowRange& range,
                   mx::Dtype dtype) {
  mx::Shape shape(4 - mask.ndim(), 1);
  shape.insert(shape.end(), mask.shape().begin(), mask.shape().end());
  mx::array own = mx::reshape(mask, shape);
  if (own.shape(0) > 1) own = cut(own, 0, row, row + 1);
  if (own.shape(3) > 1) own = cut(own, 3, range.from, range.to);
  return own.dtype() == mx::bool_ ? own : mx::astype(own, dtype);
}

RowMask mask_of(std::int64_t row, const RowRange& range, const Visibility& visibility,
                mx::Dtype dtype) {
  const std::int64_t window = visibility.window;
  const bool cut_by_window = window > 0 && range.window_start(window) > range.from;
  const bool cut_by_cause = visibility.causal && range.query + 1 < range.to;
  const bool is_plain = range.query >= range.from && range.query + range.n_queries == range.to;
  const bool soft_capped = visibility.soft_cap > 0.0F;
  RowMask mask;
  if (!visibility.mask && !cut_by_window && cut_by_cause && is_plain && !soft_capped) {
    mask.mode = "causal";
    return mask;
  }
  if (cut_by_window || cut_by_cause) mask.array = positional_mask(range, visibility);
  bool some_blind = (visibility.causal && range.query < range.from) ||
                    (window > 0 && range.window_start(window) >= range.to);
  if (visibility.mask) {
    const mx::array own = own_mask(*visibility.mask, row, range, dtype);
    some_blind = true;
    if (!mask.array) {
      mask.array = own;
    } else if (own.dtype() == mx::bool_) {
      mask.array = mx::logical_and(*mask.array, own);
    } else {
      const mx::array hidden(-std::numeric_limits<float>::infinity(), dtype);
      mask.array = mx::where(*mask.array, own, hidden);
    }
  }
  if (mask.array) mask.mode = "array";
  if (some_blind && mask.array) mask.seen = any_seen(*mask.array);
  return mask;
}

/// MLX's attention has no soft-cap. Keys and values are (1, n_kv_heads, tokens, dim).
mx::array soft_capped_attention(const mx::array& queries, const mx::array& keys,
                                const mx::array& values, float scale, float soft_cap,
                                const std::optional<mx::array>& mask,
                                const std::optional<mx::array>& sinks) {
  const mx::Dtype dtype = queries.dtype();
  const auto number = [dtype](float x) { return mx::array(x, dtype); };
  const int n_heads = queries.shape(1);
  const int n_queries = queries.shape(2);
  const mx::Shape by_kv_head{1, keys.shape(1), n_heads / keys.shape(1) * n_queries, -1};
  mx::array scores = mx::matmul(mx::reshape(mx::multiply(queries, number(scale)), by_kv_head),
                                mx::swapaxes(keys, 2, 3));
  scores = mx::reshape(scores, {1, n_heads, n_queries, -1});
  scores = mx::multiply(mx::tanh(mx::divide(scores, number(soft_cap))), number(soft_cap));
  if (mask) {
    scores = mask->dtype() == mx::bool_
                 ? mx::where(*mask, scores, number(-std::numeric_limits<float>::infinity()))
                 : mx::add(scores, *mask);
  }
  if (sinks) {
    const mx::array column =
        mx::broadcast_to(mx::reshape(*sinks, {1, n_heads, 1, 1}), {1, n_heads, n_queries, 1});
    scores = mx::concatenate({scores, column}, 3);
  }
  const mx::array weights = cut(mx::softmax(scores, -1, true), 3, 0, keys.shape(2));
  return mx::reshape(mx::matmul(mx::reshape(weights, by_kv_head), values),
                     {1, n_heads, n_queries, values.shape(3)});
}

}  // namespace

mx::array OpsBackend::attend(const LayerFormat& format, std::span<const AttendRow> rows,
                             const mx::array& queries, float scale, const Visibility& visibility) {
  // MLX's attention rounds scores to the queries' type on the CPU, not on other devices.
  const bool on_cpu = mx::to_stream({}).device == mx::Device::cpu;
  const mx::Dtype dtype =
      on_cpu ? mx::float32 : mx::promote_types(queries.dtype(), dtype_of(format.raw[0].format));
  std::optional<mx::array> sinks = visibility.sinks;
  if (sinks) sinks = mx::astype(*sinks, dtype);
  const mx::Shape out_shape{1, queries.shape(1), queries.shape(2), format.raw[1].head_dim};

  const OpsFormat coded = with_vectors(format);
  std::vector<mx::array> outputs;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const RowRange range = range_of(rows[i], queries.shape(2), visibility);
    if (range.empty()) {
      outputs.push_back(mx::zeros(out_shape, dtype));
      continue;
    }
    // Blocks are left in the basis that sealed ones are stored in: scores are the same in each.
    const std::span<const TokenBlock> blocks = rows[i].sequence->blocks();
    const bool turned[] = {any_turned(blocks, 0), any_turned(blocks, 1)};
    const auto tokens = [&](int role) {
      return mx::expand_dims(
          tokens_of(coded, role, blocks, range.from, range.to, dtype, turned[role]), 0);
    };
    const mx::array keys = tokens(0);
    const mx::array values = tokens(1);
    mx::array own = mx::astype(cut(queries, 0, row, row + 1), dtype);
    if (turned[0]) own = hadamard(own);
    const RowMask mask = mask_of(row, range, visibility, dtype);
    mx::array out = visibility.soft_cap > 0.0F
                        ? soft_capped_attention(own, keys, values, scale, visibility.soft_cap,
                                                mask.array, sinks)
                        : mx::fast::scaled_dot_product_attention(own, keys, values, scale,
                                                                 mask.mode, mask.array, sinks);
    if (turned[1]) out = hadamard(out);
    outputs.push_back(mask.seen ? mx::where(*mask.seen, out, mx::array(0.0F, dtype)) : out);
  }
  if (outputs.empty())
    return mx::zeros({0, out_shape[1], out_shape[2], out_shape[3]}, queries.dtype());
  return mx::astype(outputs.size() == 1 ? outputs.front() : mx::concatenate(outputs, 0),
                    queries.dtype());
}

}  // namespace kvpool::detail
