#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/block_pool.h"

namespace kvpool::testing {

inline std::vector<BlockId> ids(const std::vector<Block>& blocks) {
  std::vector<BlockId> result;
  for (const Block& block : blocks) result.push_back(block.block_id());
  return result;
}

inline std::vector<Block> joined(std::vector<Block> first, const std::vector<Block>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// What `call` says when it throws an `Error`; a failed test and "" when it does not.
template <typename Error, typename Call>
std::string error_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "no error";
  return "";
}

/// All that a pool shows about the owners named.
struct Picture {
  AllocationStats stats;
  std::vector<AllocationStats> history;
  std::vector<std::int64_t> n_free;
  std::map<Owner, std::vector<std::pair<std::uint64_t, std::int64_t>>> holdings;

  bool operator==(const Picture&) const = default;
};

inline Picture picture(const BlockPoolAllocator& pool, const std::vector<Owner>& owners) {
  Picture result{pool.stats(), pool.history(), {pool.n_free(Stream::kKey)}, {}};
  result.n_free.push_back(pool.n_free(Stream::kValue));
  for (const Owner owner : owners) {
    for (const Block& block : pool.blocks_for(owner)) {
      result.holdings[owner].emplace_back(block.generation(), block.n_used());
    }
  }
  return result;
}

/// `before` after one allocate() that found too few blocks.
inline Picture with_one_exhausted(Picture before) {
  ++before.stats.n_exhausted;
  before.history.push_back(before.stats);
  return before;
}

/// free + in use = blocks.
inline void expect_balanced(const BlockPoolAllocator& pool) {
  std::int64_t n_free = pool.n_free(Stream::kKey);
  if (pool.config().separate_kv) n_free += pool.n_free(Stream::kValue);
  const AllocationStats stats = pool.stats();
  EXPECT_EQ(n_free + stats.blocks_in_use(), stats.n_blocks);
}

}  // namespace kvpool::testing
