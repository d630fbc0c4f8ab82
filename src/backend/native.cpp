#include "backend/native.h"

#include <algorithm>
#include <numeric>

#include "backend/recover.h"
#include "kernels/kernels.h"

namespace mx = mlx::core;

namespace kvpool::detail {

NativeBytes::NativeBytes(std::shared_ptr<NativeBackend> backend, Place place) noexcept
    : backend_(std::move(backend)),
      place_(place),
      address_(place.segment->version.data<std::byte>() + place.offset()) {}

NativeBytes::~NativeBytes() { backend_->give_back(place_); }

void keep(Buffers& buffers, const std::shared_ptr<BlockBytes>& bytes) {
  const auto& buffer = native(bytes).buffer();
  if (!buffers.empty() && buffers.back() == buffer) return;
  if (std::find(buffers.begin(), buffers.end(), buffer) == buffers.end()) buffers.push_back(buffer);
}

NativeBackend::NativeBackend(std::shared_ptr<MlxBufferPool> buffers)
    : places_(std::move(buffers)), chain_({std::uint8_t{0}}, mx::uint8) {}

std::string_view NativeBackend::level() const { return kernels::active().name; }

std::shared_ptr<BlockBytes> NativeBackend::take(std::size_t bytes, Stay stay) {
  std::unique_lock guard(places_mutex_);
  const Place place = places_.take(bytes, stay);
  guard.unlock();
  try {
    return std::make_shared<NativeBytes>(shared_from_this(), place);
  } catch (...) {
    give_back(place);
    throw;
  }
}

void NativeBackend::give_back(const Place& place) noexcept {
  const std::lock_guard guard(places_mutex_);
  places_.give_back(place);
}

std::size_t NativeBackend::resident_bytes() const {
  const std::lock_guard guard(places_mutex_);
  return places_.resident_bytes();
}

mx::array NativeBackend::pending() {
  const std::lock_guard guard(chain_mutex_);
  return chain_;
}

std::int64_t NativeBackend::recover() {
  return recover_chain(pending(), [](const mx::array& link) {
    std::vector<std::size_t> all(link.inputs().size() - 1);
    std::iota(all.begin(), all.end(), std::size_t{1});
    return InputGroups{std::move(all)};
  });
}

}  // namespace kvpool::detail
