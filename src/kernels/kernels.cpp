#include "kernels/kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "util/concat.h"

namespace kvpool::kernels {

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
  }
  return Layout::kFp32;
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
    if (!forced.empty() && forced != kOps) return table_named(forced);
    const KernelTable* best = nullptr;
    for (const Level& level : levels()) {
      if (level.table != nullptr) best = level.table;
    }
    return *best;
  }();
  return table;
}

}  // namespace kvpool::kernels
