#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "attention/elements.h"
#include "attention/item.h"
#include "attention/mask.h"
#include "attention/scratch.h"

namespace kvpool::attention {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

/// Rows that share a decoded run when there are many queries.
constexpr int kRows = 128;
/// A share smaller than this costs more to hand out than to do.
constexpr std::int64_t kLeastTokens = 512;
/// Shares to a thread, so that a late thread is no bottleneck.
constexpr std::int64_t kSharesPerThread = 4;

struct BlockRange {
  std::size_t first;
  std::size_t last;
};

/// The blocks with a key that some of the queries see.
BlockRange visible_blocks(const Arguments& arguments, const SequenceRef& sequence, int first_query,
                          int n_queries) {
  const std::int64_t first = visible(arguments, sequence.query_position + first_query).first;
  const std::int64_t end =
      visible(arguments, sequence.query_position + first_query + n_queries - 1).end;
  const auto blocks = sequence.blocks;
  const auto begin = std::partition_point(blocks.begin(), blocks.end(), [&](const BlockRef& b) {
    return b.position + b.n_tokens <= first;
  });
  const auto stop = std::partition_point(begin, blocks.end(),
                                         [&](const BlockRef& b) { return b.position < end; });
  return {static_cast<std::size_t>(begin - blocks.begin()),
          static_cast<std::size_t>(stop - blocks.begin())};
}

/// An estimate that need not look at each block: too many if there are gaps between them.
std::int64_t about_tokens(std::span<const BlockRef> blocks) {
  if (blocks.empty()) return 0;
  const std::int64_t from_first_to_last =
      blocks.back().position + blocks.back().n_tokens - blocks.front().position;
  return std::min(from_first_to_last,
                  static_cast<std::int64_t>(blocks.size()) * blocks.front().block_size);
}

/// Tokens to a share: all of a sequence's unless the threads would go short of shares.
std::int64_t share_tokens(const Arguments& arguments, int tile, int n_threads) {
  if (n_threads == 1) return std::numeric_limits<std::int64_t>::max();
  std::int64_t total = 0;
  for (const SequenceRef& sequence : arguments.sequences) total += about_tokens(sequence.blocks);
  total *= arguments.n_kv_heads * ((arguments.n_queries + tile - 1) / tile);
  return std::max(kLeastTokens, total / (kSharesPerThread * n_threads));
}

void plan(const Arguments& arguments, int n_threads, std::vector<Item>& items) {
  const int group = group_of(arguments);
  const int tile = std::min(arguments.n_queries, std::max(1, kRows / group));
  const std::int64_t share = share_tokens(arguments, tile, n_threads);
  for (std::size_t s = 0; s < arguments.sequences.size(); ++s) {
    const SequenceRef& sequence = arguments.sequences[s];
    for (int query = 0; query < arguments.n_queries; query += tile) {
      const int n_queries = std::min(tile, arguments.n_queries - query);
      const BlockRange range = visible_blocks(arguments, sequence, query, n_queries);
      const std::size_t n_blocks = range.last - range.first;
      const std::int64_t n_tokens = about_tokens(sequence.blocks.subspan(range.first, n_blocks));
      const auto n_splits = static_cast<std::size_t>(std::max<std::int64_t>(
          1, std::min<std::int64_t>(n_tokens / share, static_cast<std::int64_t>(n_blocks))));
      for (int head = 0; head < arguments.n_kv_heads; ++head) {
        for (std::size_t i = 0; i < n_splits; ++i) {
          items.push_back({s, head, query, n_queries, range.first + n_blocks * i / n_splits,
                           range.first + n_blocks * (i + 1) / n_splits, items.size() - i, n_splits,
                           nullptr});
        }
      }
    }
  }
}

void place_partials(const Arguments& arguments, std::vector<Item>& items, Scratch& scratch) {
  std::size_t n_partial_rows = 0;
  for (const Item& item : items) {
    n_partial_rows += static_cast<std::size_t>(n_rows(arguments, item));
  }
  auto* partial = scratch.get<float>(n_partial_rows * partial_row_size(arguments));
  for (Item& item : items) {
    item.partial = partial;
    partial += static_cast<std::size_t>(n_rows(arguments, item)) * partial_row_size(arguments);
  }
}

/// Threads begin with the first items and take about as long for each.
void foresee(std::vector<Item>& items, int n_threads) {
  const auto distance = static_cast<std::size_t>(n_threads);
  for (std::size_t i = distance; i < items.size(); ++i) {
    items[i - distance].next = &items[i];
    items[i].is_fetched = true;
  }
}

/// Merges a row's splits into the first of them, with the sink, and writes the output.
void finish_row(const Arguments& arguments, std::span<const Item> splits, int row) {
  const Item& item = splits.front();
  const int head = item.kv_head * group_of(arguments) + row / item.n_queries;
  const int query = item.first_query + row % item.n_queries;
  const auto dim = static_cast<std::size_t>(arguments.value_dim);
  const PartialRow result = partial_row(arguments, item, row);

  float largest = kNoScore;
  for (const Item& split : splits) {
    largest = std::max(largest, *partial_row(arguments, split, row).largest);
  }
  const bool any = largest != kNoScore;
  float sum = 0.0F;
  if (any && arguments.sinks != nullptr) {
    largest = std::max(largest, arguments.sinks[head]);
    sum = std::exp(arguments.sinks[head] - largest);
  }
  for (const Item& split : splits) {
    const PartialRow part = partial_row(arguments, split, row);
    const float factor = any ? std::exp(*part.largest - largest) : 0.0F;
    sum += factor * *part.sum;
    for (std::size_t d = 0; d < dim; ++d) {
      const float value = factor * part.values[d];
      result.values[d] = &split == &item ? value : result.values[d] + value;
    }
  }
  for (std::size_t d = 0; d < dim; ++d) result.values[d] = any ? result.values[d] / sum : 0.0F;
  const Strides& strides = arguments.out_strides;
  store_elements(arguments.dtype, result.values, dim, arguments.out,
                 static_cast<std::int64_t>(item.sequence) * strides.batch + head * strides.head +
                     query * strides.query);
}

/// Merges the splits of an item's queries and writes their output.
void finish(const Arguments& arguments, std::span<const Item> items, const Item& item) {
  const auto splits = items.subspan(item.first_split, item.n_splits);
  for (int row = 0; row < n_rows(arguments, item); ++row) finish_row(arguments, splits, row);
}

}  // namespace

void attend(const Arguments& arguments, ThreadPool& pool, const kernels::KernelTable& kernels) {
  if (arguments.n_queries == 0 || arguments.sequences.empty()) return;
  thread_local std::vector<Item> items;
  thread_local Scratch partials;
  thread_local Scratch counts;
  items.clear();
  plan(arguments, pool.n_threads(), items);
  place_partials(arguments, items, partials);
  foresee(items, pool.n_threads());

  const std::span<const Item> shares(items);
  // By first split. Whoever ends the last of the splits merges them.
  auto* const n_done = counts.get<std::atomic<std::size_t>>(shares.size());
  for (std::size_t i = 0; i < shares.size(); ++i) new (n_done + i) std::atomic<std::size_t>(0);
  pool.for_each(shares.size(), [&](std::size_t i) {
    const Item& item = shares[i];
    attend_item(arguments, kernels, item);
    if (n_done[item.first_split].fetch_add(1, std::memory_order_acq_rel) + 1 == item.n_splits) {
      finish(arguments, shares, item);
    }
  });
}

}  // namespace kvpool::attention
