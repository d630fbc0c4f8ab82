#pragma once

#include <mlx/array.h>
#include <mlx/stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/cuda/blocks.h"

namespace kvpool::detail {

/// Where an array that is evaluated, or whose evaluation is under way, lies in device memory.
std::byte* device_address(const mlx::core::array& array);

/// Zeroed device memory of at least `bytes`, as MLX counts it. Its address is known at once; the
/// first op that uses it takes it as an input, to come after the zeros.
mlx::core::array device_bytes(std::size_t bytes);

/// What the next op must take as inputs, and with it keep until it has run: memory that it is the
/// first to use, and memory that only those before it use. Thread-safe.
class MemoryChanges {
 public:
  void add(mlx::core::array memory);
  std::vector<mlx::core::array> take();

 private:
  std::mutex mutex_;
  std::vector<mlx::core::array> changes_;
};

/// Device memory that ops use beside blocks. Whoever keeps `changes` keeps it until the ops are done.
class OpMemory {
 public:
  /// Zeroed.
  OpMemory(std::shared_ptr<MemoryChanges> changes, std::size_t bytes);
  /// A copy of `bytes`, which must not be empty.
  OpMemory(std::shared_ptr<MemoryChanges> changes, const std::vector<std::uint8_t>& bytes);
  OpMemory(OpMemory&& other) noexcept = default;
  OpMemory& operator=(OpMemory&& other) noexcept;
  ~OpMemory() { give_up(); }

  std::byte* address() const noexcept { return address_; }
  std::size_t size() const noexcept { return size_; }

 private:
  OpMemory(std::shared_ptr<MemoryChanges> changes, mlx::core::array memory);
  void give_up() noexcept;

  std::shared_ptr<MemoryChanges> changes_;  ///< Null: it was moved.
  mlx::core::array memory_;
  std::byte* address_;
  std::size_t size_;
};

/// Multiprocessors of the device in use.
int n_processors();

/// The kernels of one op, which run one after the other. The first input is the chain's link: each
/// kernel comes after those that had it before, and before those that have it after. It is kept
/// until they have run.
class KernelQueue {
 public:
  KernelQueue(mlx::core::Stream stream, const std::vector<mlx::core::array>& inputs,
              const std::vector<mlx::core::array>& outputs);

  template <class Params>
  void run(const cuda::Launch<Params>& launch) {
    Params params = launch.params;
    void* arguments[] = {&params};
    add(launch.function, launch.grid, launch.block, launch.shared_bytes, arguments);
  }
  void run(const cuda::DecodeLaunch& launch);

  /// Keeps `held` until the kernels have run.
  template <class Held>
  void hold(Held held) {
    hold_until_done([held = std::move(held)] {});
  }

 private:
  const mlx::core::array& link() const noexcept { return inputs_.front(); }
  void add(const void* function, dim3 grid, unsigned block, unsigned shared_bytes,
           void** arguments);
  void hold_until_done(std::function<void()> last);

  const mlx::core::Stream stream_;
  bool first_ = true;
  const std::vector<mlx::core::array>& inputs_;
  const std::vector<mlx::core::array>& outputs_;
};

}  // namespace kvpool::detail
