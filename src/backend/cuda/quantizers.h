#pragma once

#include <mlx/array.h>

#include <map>
#include <memory>

#include "codec/vector_quantizer.h"
#include "kernels/cuda/blocks.h"

namespace kvpool::detail {

/// The quantizers of vecinfer formats in device memory. Each is brought there when it is first asked
/// for, and stays as long as somebody has it.
class DeviceQuantizers {
 public:
  struct Entry {
    cuda::Quantizer quantizer;
    mlx::core::array memory;  ///< That of the quantizer: ops that use it take it as an input.
  };

  const Entry& of(const std::shared_ptr<const codec::VectorQuantizer>& quantizer);

 private:
  struct Known {
    std::weak_ptr<const codec::VectorQuantizer> owner;
    Entry entry;
  };
  std::map<const codec::VectorQuantizer*, Known> known_;
};

}  // namespace kvpool::detail
