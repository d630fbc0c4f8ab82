#include "kernels/kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "util/concat.h"

namespace kvpool::kernels {
namespace {

Layout vector_layout(codec::VectorCode code) noexcept {
  if (code.code_bits == 12) return Layout::kVector8Wide;
  if (code.sub_dim == 8) return Layout::kVector8;
  return code.sub_dim == 4 ? Layout::kVector4 : Layout::kVector2;
}

}  // namespace

Layout layout_of(codec::Format format, codec::Role role) noexcept {
  const bool keys = role == codec::Role::kKeys;
  switch (format.code) {
    using enum codec::Code;
    case kFp32:
      return Layout::kFp32;
    case kFp16:
      return Layout::kFp16;
    case kBf16:
      return Layout::kBf16;
    case kInt8:
      return Layout::kAffine8;
    case kInt4:
      return Layout::kAffine4;
    case kInt2:
      return Layout::kAffine2;
    case kKivi4:
      return keys ? Layout::kChannel4 : Layout::kAffine4;
    case kKivi2:
      return keys ? Layout::kChannel2 : Layout::kAffine2;
    case kVecInfer1:
    case kVecInfer1_5:
    case kVecInfer2:
    case kVecInfer3:
    case kVecInfer4:
      return vector_layout(codec::vector_code(format.code, role));
  }
  return Layout::kFp32;
}

PartShape shape_of(const codec::PartGeometry& geometry) noexcept {
  const codec::VectorQuantizer* const quantizer = geometry.format.quantizer;
  return {geometry.block_size, geometry.head_dim, geometry.format.group_size,
          quantizer == nullptr
              ? nullptr
              : quantizer->codebooks[static_cast<std::size_t>(geometry.kv_head)].get()};
}

const KernelTable& table_named(std::string_view name) {
  std::string allowed(kOps);
  std::string missing;
  for (const Level& level : levels()) {
    if (level.name == name && level.table != nullptr) return *level.table;
    std::string& list = level.table != nullptr ? allowed : missing;
    if (!list.empty()) list += ", ";
    list += level.name;
  }
  std::string text =
      detail::concat("KVPOOL_KERNELS: no kernels '", name, "' here; allowed: ", allowed);
  if (!missing.empty()) text += detail::concat(" (this CPU lacks ", missing, ")");
  throw std::invalid_argument(text);
}

std::string forced_level() {
  const char* const forced = std::getenv("KVPOOL_KERNELS");
  return forced != nullptr ? forced : "";
}

const KernelTable& active() {
  static const KernelTable& table = []() -> const KernelTable& {
    const std::string forced = forced_level();
    if (!forced.empty() && forced != kOps && forced != kCuda) return table_named(forced);
    const KernelTable* best = nullptr;
    for (const Level& level : levels()) {
      if (level.table != nullptr) best = level.table;
    }
    return *best;
  }();
  return table;
}

}  // namespace kvpool::kernels
