#pragma once

#include <mlx/array.h>

#include <string>

namespace kvpool::detail {

/// "(2, 3, 5)"
inline std::string shape_text(const mlx::core::Shape& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + ")";
}

}  // namespace kvpool::detail
