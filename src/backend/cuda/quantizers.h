#pragma once

#include <map>
#include <memory>
#include <utility>

#include "backend/cuda/device.h"
#include "codec/vector_quantizer.h"
#include "kernels/cuda/blocks.h"

namespace kvpool::detail {

/// The quantizers of vecinfer formats in device memory. Each is brought there when it is first asked
/// for, and stays as long as somebody has it.
class DeviceQuantizers {
 public:
  explicit DeviceQuantizers(std::shared_ptr<MemoryChanges> changes)
      : changes_(std::move(changes)) {}

  const cuda::Quantizer& of(const std::shared_ptr<const codec::VectorQuantizer>& quantizer);

 private:
  struct Known {
    std::weak_ptr<const codec::VectorQuantizer> owner;
    OpMemory memory;
    cuda::Quantizer quantizer;
  };
  Known upload(const std::shared_ptr<const codec::VectorQuantizer>& owner) const;

  const std::shared_ptr<MemoryChanges> changes_;
  std::map<const codec::VectorQuantizer*, Known> known_;
};

}  // namespace kvpool::detail
