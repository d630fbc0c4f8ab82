#pragma once

#include "attention/attention.h"

namespace kvpool::attention {

/// The keys at positions [first, end) that a query at `position` sees, any mask array aside.
struct Visible {
  std::int64_t first;
  std::int64_t end;
};
Visible visible(const Arguments& arguments, std::int64_t position) noexcept;

/// The query that a row of scores belongs to.
struct QueryRow {
  std::size_t sequence;
  int head;
  int query;
};

/// Applies window, causality and the mask array to a query's scores with the keys of `block`.
void mask_scores(const Arguments& arguments, const QueryRow& row, const BlockRef& block,
                 float* scores) noexcept;

}  // namespace kvpool::attention
