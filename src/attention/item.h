#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace kvpool::attention {

/// A share of the work: some queries of a sequence, for the heads of one KV head, over some of its
/// blocks. A row of it is a query of a head: the n_queries of the first head come first.
struct Item {
  std::size_t sequence;
  int kv_head;
  int first_query;
  int n_queries;
  std::size_t first_block;
  std::size_t last_block;
  /// The first item with these queries; the n_splits - 1 after it have the same.
  std::size_t first_split;
  std::size_t n_splits;
  /// Where attend_item() puts its result: n_rows() rows of partial_row_size() floats.
  float* partial;
  /// What the same thread is likely to take next, or null: its first keys are fetched meanwhile.
  const Item* next = nullptr;
  bool is_fetched = false;
};

/// One row's result over a part of the keys: `largest` score, sum of exp(score - largest), and the
/// sum of values so weighted.
struct PartialRow {
  float* largest;
  float* sum;
  float* values;
};
/// Floats of a row in a partial result, and the row's place there.
std::size_t partial_row_size(const Arguments& arguments) noexcept;
PartialRow partial_row(const Arguments& arguments, const Item& item, int row) noexcept;

/// Heads to a KV head.
inline int group_of(const Arguments& arguments) noexcept {
  return arguments.n_heads / arguments.n_kv_heads;
}
inline int n_rows(const Arguments& arguments, const Item& item) noexcept {
  return group_of(arguments) * item.n_queries;
}

/// Fills item.partial.
void attend_item(const Arguments& arguments, const kernels::KernelTable& kernels, const Item& item);

}  // namespace kvpool::attention
