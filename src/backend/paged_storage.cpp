#include "kvpool/paged_storage.h"

#include <stdexcept>

#include "backend/backend.h"

namespace kvpool {

PagedStorage::PagedStorage(std::shared_ptr<BlockPoolAllocator> pool,
                           std::shared_ptr<MlxBufferPool> buffers)
    : pool_(std::move(pool)) {
  if (pool_ == nullptr) throw std::invalid_argument("PagedStorage: pool must not be null");
  if (buffers == nullptr) buffers = std::make_shared<MlxBufferPool>();
  backend_ = detail::make_backend(std::move(buffers));
}

std::string PagedStorage::level() const { return std::string(backend_->level()); }

std::int64_t PagedStorage::recover() { return backend_->recover(); }

std::size_t PagedStorage::resident_bytes() const { return backend_->resident_bytes(); }

}  // namespace kvpool
