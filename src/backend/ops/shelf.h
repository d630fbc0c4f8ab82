#pragma once

#include <mlx/array.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "sequence/block_memory.h"

namespace kvpool::detail {

class ShelfBytes;

/// Places of one size as the rows of an array. A write makes the next version of the array, in
/// place if nobody reads an older one any more; who reads holds the version of that moment, so that
/// the order of evaluation does not matter.
///
/// The array grows by a 32nd. It is packed when much of it is free: places then move, and their
/// holders with them. Places and bytes are thread-safe; versions are the storage's one thread's.
class Shelf : public std::enable_shared_from_this<Shelf> {
 public:
  explicit Shelf(std::size_t place_bytes) noexcept : place_bytes_(place_bytes) {}

  std::shared_ptr<ShelfBytes> take();
  std::size_t resident_bytes() const;

  /// The latest version, (places, bytes / 4) of uint32; null if nothing was written.
  const std::optional<mlx::core::array>& version() const noexcept { return version_; }
  void replace(mlx::core::array next) { version_ = std::move(next); }
  /// Gives every place a row; before each write.
  void fit();
  /// Gives back the rows of free places, if they are many.
  void pack();

  /// (places, bytes) of uint8.
  mlx::core::array read(std::span<const std::uint32_t> places) const;
  void write(std::span<const std::uint32_t> places, const mlx::core::array& bytes);

 private:
  friend class ShelfBytes;
  void give_back(const ShelfBytes& bytes) noexcept;
  std::size_t words() const noexcept { return (place_bytes_ + 3) / 4; }

  const std::size_t place_bytes_;
  mutable std::mutex mutex_;
  std::vector<ShelfBytes*> holders_;  ///< A place; null if it is free.
  std::size_t n_taken_ = 0;
  std::size_t first_free_ = 0;  ///< None is before it.
  std::size_t n_rows_ = 0;      ///< Of the version.
  std::optional<mlx::core::array> version_;
};

class ShelfBytes final : public BlockBytes {
 public:
  explicit ShelfBytes(std::shared_ptr<Shelf> shelf) noexcept : shelf_(std::move(shelf)) {}
  ~ShelfBytes() override;

  Shelf& shelf() const noexcept { return *shelf_; }
  std::uint32_t place() const noexcept { return place_; }

 private:
  friend class Shelf;
  const std::shared_ptr<Shelf> shelf_;
  std::uint32_t place_ = kNone;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
};

/// Of a block of this backend.
inline const ShelfBytes& on_shelf(const std::shared_ptr<BlockBytes>& bytes) noexcept {
  return static_cast<const ShelfBytes&>(*bytes);
}

}  // namespace kvpool::detail
