#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

namespace kvpool::attention {

/// Memory on cache lines that grows and is never given back; asking again loses what was there.
class Scratch {
 public:
  template <typename T>
  T* get(std::size_t n) {
    const std::size_t n_bytes = n * sizeof(T);
    if (n_bytes > capacity_) {
      capacity_ = std::max(n_bytes, 2 * capacity_);
      memory_.reset();
      memory_.reset(static_cast<std::byte*>(::operator new(capacity_, kAlignment)));
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t capacity_ = 0;
};

}  // namespace kvpool::attention
