#include "kernels/kernels.h"
#include "kernels/neon/neon.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels {

std::span<const Level> levels() {
  static const std::array kLevels = {
      Level{"scalar", &scalar::table()},
      Level{"neon", &neon::table()},
  };
  return kLevels;
}

}  // namespace kvpool::kernels
