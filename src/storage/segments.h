#pragma once

#include <mlx/array.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "kvpool/mlx_buffer_pool.h"
#include "storage/stay.h"

namespace kvpool::detail {

/// A buffer cut into places of one size, and the latest version of its contents.
struct Segment {
  MlxBuffer buffer;
  mlx::core::array version;
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
  explicit SegmentList(std::shared_ptr<MlxBufferPool> buffers);
  ~SegmentList();
  SegmentList(const SegmentList&) = delete;
  SegmentList& operator=(const SegmentList&) = delete;

  bool has_free(std::size_t place_bytes) const;
  /// Takes a place; adds a segment if none of this size is free. Throws what MlxBufferPool throws,
  /// changing nothing.
  Place take(std::size_t place_bytes, Stay stay = Stay::kLong);
  void give_back(const Place& place) noexcept;

  std::size_t resident_bytes() const noexcept { return resident_bytes_; }

 private:
  struct SizeClass {
    std::list<Segment> open;  ///< With a free place.
    std::list<Segment> full;
    std::size_t bytes = 0;
  };

  void add_segment(SizeClass& size, std::size_t place_bytes, Stay stay);
  void remove(std::list<Segment>& segments, std::list<Segment>::iterator segment) noexcept;

  const std::shared_ptr<MlxBufferPool> buffers_;
  std::map<std::pair<std::size_t, Stay>, SizeClass> sizes_;
  std::size_t resident_bytes_ = 0;
};

}  // namespace kvpool::detail
