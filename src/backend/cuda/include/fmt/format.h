#pragma once

#include <string>
#include <string_view>

/// MLX's CUDA headers include fmt, which its wheel does not carry, for the text of errors that
/// kvpool cannot raise. This stands in for it.
namespace fmt {

template <typename... Parts>
std::string format(std::string_view text, const Parts&...) {
  return std::string(text);
}

}  // namespace fmt
