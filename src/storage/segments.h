#pragma once

#include <mlx/array.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvpool/mlx_buffer_pool.h"
#include "storage/stay.h"

namespace kvpool::detail {

/// A buffer cut into places of one size, and the latest version of its contents.
struct Segment {
  std::optional<MlxBuffer> buffer;  ///< None if the memory is `version`'s own.
  mlx::core::array version;
  std::size_t bytes;
  std::size_t place_bytes;
  std::size_t n_places;
  Stay stay;
  std::vector<std::uint32_t> free;  ///< Places not taken.
  std::uint64_t thread = 0;         ///< Whose work `version` waits for, to those who ask.
};

/// A place in a segment.
struct Place {
  Segment* segment;
  std::uint32_t index;

  std::size_t offset() const noexcept { return index * segment->place_bytes; }
};

/// Places by size, in segments that never move. A new segment is up to a 64th of what its size
/// holds already, so that few segments serve many blocks and little is held that no block needs; one
/// without a place taken goes back. Not thread-safe.
class SegmentList {
 public:
  /// Makes zeroed memory of so many bytes.
  using MakeMemory = std::function<mlx::core::array(std::size_t bytes)>;

  explicit SegmentList(std::shared_ptr<MlxBufferPool> buffers);
  /// Segments of memory that `make` makes. The next op must take take_changes() as inputs.
  explicit SegmentList(MakeMemory make);
  ~SegmentList();
  SegmentList(const SegmentList&) = delete;
  SegmentList& operator=(const SegmentList&) = delete;

  bool has_free(std::size_t place_bytes) const;
  /// Takes a place; adds a segment if none of this size is free. Throws what MlxBufferPool throws,
  /// changing nothing.
  Place take(std::size_t place_bytes, Stay stay = Stay::kLong);
  void give_back(const Place& place) noexcept;

  std::size_t resident_bytes() const noexcept { return resident_bytes_; }
  /// Memory made since the last call, which may not be ready, and memory given back, which ops
  /// before may still use.
  std::vector<mlx::core::array> take_changes() noexcept { return std::exchange(changes_, {}); }
  /// Forgets those that are ready, when no op is under way.
  void drop_changes() {
    std::erase_if(changes_, [](const mlx::core::array& memory) { return memory.is_available(); });
  }

 private:
  struct SizeClass {
    std::list<Segment> open;  ///< With a free place.
    std::list<Segment> full;
    std::size_t bytes = 0;
  };

  void add_segment(SizeClass& size, std::size_t place_bytes, Stay stay);
  void remove(std::list<Segment>& segments, std::list<Segment>::iterator segment) noexcept;

  const std::shared_ptr<MlxBufferPool> buffers_;
  const MakeMemory make_;
  std::vector<mlx::core::array> changes_;
  std::map<std::pair<std::size_t, Stay>, SizeClass> sizes_;
  std::size_t resident_bytes_ = 0;
};

}  // namespace kvpool::detail
