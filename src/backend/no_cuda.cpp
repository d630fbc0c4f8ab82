#include "backend/backend.h"

namespace kvpool::detail {

std::shared_ptr<Backend> make_cuda_backend() { return nullptr; }

}  // namespace kvpool::detail
