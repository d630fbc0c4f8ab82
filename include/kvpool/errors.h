#pragma once

#include <stdexcept>

namespace kvpool {

/// A pool has too few free blocks and cannot grow enough. Nothing has changed. Python: RuntimeError.
class BlockPoolExhaustedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An owner id is registered again while it is still active. Python: ValueError.
class OwnerAlreadyActiveError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// A buffer handle is used after its buffer went back to the pool. Python: ValueError.
class StaleBufferError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace kvpool
