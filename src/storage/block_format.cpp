#include "kvpool/block_format.h"

#include <stdexcept>

#include "util/concat.h"

namespace kvpool {

BlockFormat block_format(std::string_view tag) {
  namespace mx = mlx::core;
  if (tag == "fp32") return {mx::float32, 32};
  if (tag == "fp16") return {mx::float16, 16};
  if (tag == "bf16") return {mx::bfloat16, 16};
  if (tag.size() == 4 && tag.starts_with("int") && tag[3] >= '1' && tag[3] <= '8') {
    return {mx::uint8, tag[3] - '0'};
  }
  throw std::invalid_argument(detail::concat(
      "MLXBlockStorage: format must be fp32, fp16, bf16 or int1 to int8, got '", tag, "'"));
}

}  // namespace kvpool
