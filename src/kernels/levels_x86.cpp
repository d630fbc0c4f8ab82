#include <cpuid.h>

#include "kernels/avx2/avx2.h"
#include "kernels/avx512/avx512.h"
#include "kernels/kernels.h"
#include "kernels/scalar/scalar.h"

namespace kvpool::kernels {
namespace {

/// Clang 14 does not know f16c by name.
bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
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
