#include "backend/cuda/cuda_backend.h"

#include <mlx/allocator.h>
#include <mlx/backend/cuda/cuda.h>
#include <mlx/utils.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "backend/cuda/cuda_op.h"
#include "backend/cuda/device.h"
#include "backend/recover.h"

namespace mx = mlx::core;

namespace kvpool::detail {

mx::Stream gpu_stream() {
  const mx::Stream current = mx::to_stream({});
  return current.device == mx::Device::gpu ? current : mx::default_stream(mx::Device::gpu);
}

DevicePlaces::DevicePlaces(std::function<std::optional<mx::array>()> latest)
    : latest_(std::move(latest)), places_(SegmentList::MakeMemory(device_bytes)) {}

Place DevicePlaces::take(std::size_t bytes, Stay stay) {
  const std::lock_guard guard(mutex_);
  return places_.take(bytes, stay);
}

void DevicePlaces::give_back(const Place& place) {
  const std::optional<mx::array> latest = latest_();
  const bool idle = !latest || latest->is_available();
  const std::lock_guard guard(mutex_);
  places_.give_back(place);
  // What no op uses any more goes at once, the rest after the next op.
  if (idle) places_.drop_changes();
}

std::size_t DevicePlaces::resident_bytes() const {
  const std::lock_guard guard(mutex_);
  return places_.resident_bytes();
}

std::vector<mx::array> DevicePlaces::take_changes() {
  const std::lock_guard guard(mutex_);
  return places_.take_changes();
}

DeviceBytes::DeviceBytes(std::shared_ptr<DevicePlaces> places, Place place)
    : places_(std::move(places)),
      place_(place),
      address_(device_address(place.segment->version) + place.offset()) {}

namespace {

/// An array that nobody reads, whose memory keeps `kept`.
template <class... Kept>
mx::array first_link(Kept... kept) {
  mx::allocator::Data data(mx::allocator::allocator().malloc(1),
                           [... kept = std::move(kept)](mx::allocator::Buffer buffer) {
                             mx::allocator::allocator().free(buffer);
                           });
  return mx::array(std::move(data), {1}, mx::uint8);
}

/// How decode attention takes it; kNone: not at all.
cuda::Sealed sealed_of(const cuda::PartFormat& part) {
  switch (part.geometry.format.code) {
    case codec::Code::kInt8:
      return cuda::Sealed::kInt8;
    case codec::Code::kInt4:
      return cuda::Sealed::kInt4;
    case codec::Code::kInt2:
      return cuda::Sealed::kInt2;
    case codec::Code::kKivi4:
      return cuda::Sealed::kKivi4;
    case codec::Code::kKivi2:
      return cuda::Sealed::kKivi2;
    default:
      // It cannot bring the sums of raw values into a rotated space.
      return part.quantizer.code_bits == 8 &&
                     (part.geometry.role == codec::Role::kKeys || part.quantizer.rotation == nullptr)
                 ? cuda::Sealed::kVector
                 : cuda::Sealed::kNone;
  }
}

}  // namespace

DeviceFormat CudaBackend::device_format(const LayerFormat& format) {
  DeviceFormat result;
  for (int role = 0; role < 2; ++role) {
    result.raw[role] = {format.raw[role]};
    result.sealed[role] = {format.sealed[role]};
    if (format.quantizers[role] == nullptr) continue;
    result.sealed[role].quantizer = quantizers_.of(format.quantizers[role]);
  }
  cuda::Geometry& geometry = result.geometry;
  geometry.n_heads = geometry.n_kv_heads = format.n_kv_heads;
  geometry.head_dim = format.raw[0].head_dim;
  geometry.block_size = format.raw[0].block_size;
  geometry.group_size = format.sealed[0].format.group_size;
  geometry.raw = format.raw[0].format.code == codec::Code::kFp32   ? cuda::Element::kFp32
                 : format.raw[0].format.code == codec::Code::kFp16 ? cuda::Element::kFp16
                                                                   : cuda::Element::kBf16;
  if (const cuda::Sealed code = sealed_of(result.sealed[0]);
      code == sealed_of(result.sealed[1]) &&
      format.sealed[0].format.group_size == format.sealed[1].format.group_size) {
    geometry.sealed = code;
  }
  if (geometry.sealed == cuda::Sealed::kVector) {
    geometry.key_sub = result.sealed[0].quantizer.sub_dim;
    geometry.value_sub = result.sealed[1].quantizer.sub_dim;
  }
  const bool seals = geometry.sealed != cuda::Sealed::kNone;
  result.decodes = format.raw[1].head_dim == geometry.head_dim && seals == format.seals(0) &&
                   seals == format.seals(1) && cuda::decodes(geometry);
  result.sealed[0].tiled = result.sealed[1].tiled = result.decodes && seals;
  return result;
}

std::shared_ptr<Backend> make_cuda_backend() {
  if (!mx::cu::is_available() || !cuda::run_here()) return nullptr;
  return CudaBackend::make();
}

std::shared_ptr<CudaBackend> CudaBackend::make() {
  // The places outlive the backend while kernels run.
  const auto self = std::make_shared<std::weak_ptr<CudaBackend>>();
  auto places = std::make_shared<DevicePlaces>([self]() -> std::optional<mx::array> {
    const auto backend = self->lock();
    return backend == nullptr ? std::nullopt : std::optional(backend->latest_link());
  });
  std::shared_ptr<CudaBackend> backend(new CudaBackend(std::move(places)));
  *self = backend;
  return backend;
}

CudaBackend::CudaBackend(std::shared_ptr<DevicePlaces> places)
    : places_(std::move(places)), chain_(first_link(places_, changes_)) {}

std::vector<mx::array> CudaBackend::take_changes() {
  std::vector<mx::array> all = places_->take_changes();
  std::ranges::move(changes_->take(), std::back_inserter(all));
  return all;
}

std::shared_ptr<BlockBytes> CudaBackend::take(std::size_t bytes, Stay stay) {
  const Place place = places_->take(bytes, stay);
  try {
    return std::make_shared<DeviceBytes>(places_, place);
  } catch (...) {
    places_->give_back(place);
    throw;
  }
}

std::size_t CudaBackend::resident_bytes() const { return places_->resident_bytes(); }

std::int64_t CudaBackend::recover() {
  arena_.reset();  // What the device has of the tables is sent anew.
  last_append_.reset();
  return recover_chain(pending(), [](const mx::array& link) {
    return static_cast<const CudaOp&>(link.primitive()).given();
  });
}

mx::array CudaBackend::latest_link() const {
  const std::lock_guard guard(chain_mutex_);
  return chain_;
}

}  // namespace kvpool::detail
