#pragma once

#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <memory>
#include <string>
#include <vector>

#include "kvpool/block_format.h"
#include "kvpool/block_pool.h"

namespace kvpool::testing {

namespace mx = mlx::core;

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

/// Whether shape, type and every bit but the sign of zeros agree; NaN equals NaN.
inline ::testing::AssertionResult same(const mx::array& a, const mx::array& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) {
    return ::testing::AssertionFailure() << "shape or type differ";
  }
  if (a.size() == 0 || mx::array_equal(a, b, true).item<bool>()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << a << "\nis not\n" << b;
}

inline std::shared_ptr<BlockPoolAllocator> pool_of(std::int64_t n_blocks, std::int64_t block_size = 16,
                                                   bool separate_kv = true) {
  return std::make_shared<BlockPoolAllocator>(PoolConfig{block_size, n_blocks, separate_kv});
}

/// The only block of an allocation of up to one block's slots.
inline Block one_block(BlockPoolAllocator& pool, std::int64_t n_tokens, Owner owner,
                       const char* format, Stream stream = Stream::kKey) {
  return pool.allocate(stream, n_tokens, owner, format).at(0);
}

/// Random rows of a format: normal floats, or codes of its bits.
inline mx::array random_rows(const mx::Shape& shape, const char* format) {
  const BlockFormat f = block_format(format);
  if (f.is_code()) return mx::random::randint(0, 1 << f.bits, shape, mx::uint8);
  return mx::astype(mx::random::normal(shape), f.dtype);
}

inline constexpr const char* kFormats[] = {"fp32", "fp16", "bf16", "int1", "int2", "int3",
                                           "int4", "int5", "int6", "int7", "int8"};

}  // namespace kvpool::testing
