#include "storage/segments.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace mx = mlx::core;

namespace kvpool::detail {

namespace {

constexpr std::size_t kLargestSegment = std::size_t{16} << 20;
constexpr std::size_t kGrowthDivisor = 64;
constexpr std::size_t kWasteDivisor = 32;  ///< Of a segment, what is too short for one more place.

std::list<Segment>::iterator find(std::list<Segment>& segments, const Segment* segment) {
  return std::find_if(segments.begin(), segments.end(),
                      [segment](const Segment& s) { return &s == segment; });
}

}  // namespace

SegmentList::SegmentList(std::shared_ptr<MlxBufferPool> buffers) : buffers_(std::move(buffers)) {}

SegmentList::SegmentList(MakeMemory make) : make_(std::move(make)) {}

SegmentList::~SegmentList() {
  for (auto& [key, size] : sizes_) {
    while (!size.open.empty()) remove(size.open, size.open.begin());
    while (!size.full.empty()) remove(size.full, size.full.begin());
  }
}

void SegmentList::remove(std::list<Segment>& segments, std::list<Segment>::iterator segment) noexcept {
  const std::optional<MlxBuffer> buffer = segment->buffer;
  if (!buffer) changes_.push_back(segment->version);
  segments.erase(segment);
  if (buffer && buffer->live()) buffers_->release(*buffer);
}

bool SegmentList::has_free(std::size_t place_bytes) const {
  const auto size = sizes_.find({place_bytes, Stay::kLong});
  return size != sizes_.end() && !size->second.open.empty();
}

void SegmentList::add_segment(SizeClass& size, std::size_t place_bytes, Stay stay) {
  const std::size_t grown = std::min(size.bytes / kGrowthDivisor, kLargestSegment);
  std::size_t bytes = std::max(std::bit_ceil(place_bytes), std::bit_floor(grown));
  while (bytes <= size.bytes / 2 && bytes % place_bytes > bytes / kWasteDivisor) bytes *= 2;
  const std::size_t n_places = bytes / place_bytes;
  std::vector<std::uint32_t> free(n_places);
  std::iota(free.rbegin(), free.rend(), 0U);
  std::optional<MlxBuffer> buffer;
  if (buffers_ != nullptr) {
    buffer = buffers_->alloc(mx::Device::cpu, bytes, mx::uint8, {static_cast<mx::ShapeElem>(bytes)});
  }
  const mx::array memory = buffer ? buffer->array() : make_(bytes);
  if (!buffer) changes_.push_back(memory);
  const std::size_t capacity = buffer ? buffer->capacity() : memory.nbytes();
  size.open.push_back(Segment{buffer, memory, capacity, place_bytes, n_places, stay,
                              std::move(free)});
  size.bytes += capacity;
  resident_bytes_ += capacity;
}

Place SegmentList::take(std::size_t place_bytes, Stay stay) {
  SizeClass& size = sizes_[{place_bytes, stay}];
  if (size.open.empty()) add_segment(size, place_bytes, stay);
  Segment& segment = size.open.front();
  const Place place{&segment, segment.free.back()};
  segment.free.pop_back();
  if (segment.free.empty()) size.full.splice(size.full.end(), size.open, size.open.begin());
  return place;
}

void SegmentList::give_back(const Place& place) noexcept {
  Segment& segment = *place.segment;
  SizeClass& size = sizes_.find({segment.place_bytes, segment.stay})->second;
  if (segment.free.empty()) {
    size.open.splice(size.open.end(), size.full, find(size.full, &segment));
  }
  segment.free.push_back(place.index);
  if (segment.free.size() < segment.n_places) return;

  size.bytes -= segment.bytes;
  resident_bytes_ -= segment.bytes;
  remove(size.open, find(size.open, &segment));
}

}  // namespace kvpool::detail
