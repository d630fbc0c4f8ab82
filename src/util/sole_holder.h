#pragma once

#include <atomic>
#include <memory>

namespace kvpool::detail {

/// Whether the caller's `own` pointers are all there are. If so, what former holders did to the
/// object, on whichever thread, is seen, and it may be changed in place; use_count() alone promises
/// neither.
template <typename T>
bool is_sole_holder(const std::shared_ptr<T>& pointer, long own = 1) noexcept {
  if (pointer.use_count() > own) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

}  // namespace kvpool::detail
