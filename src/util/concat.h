#pragma once

#include <string>
#include <type_traits>

namespace kvpool::detail {

/// The parts as one text; numbers in decimal.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

}  // namespace kvpool::detail
