#include "kernels/avx2/avx2.h"
#include "kernels/avx512/avx512.h"
#include "kernels/kernels.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels {
namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  if (!has_avx2()) return false;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

std::span<const Level> levels() {
  static const std::array kLevels = {
      Level{"scalar", &scalar::table()},
      Level{"avx2", has_avx2() ? &avx2::table() : nullptr},
      Level{"avx512", has_avx512() ? &avx512::table() : nullptr},
  };
  return kLevels;
}

}  // namespace kvpool::kernels
