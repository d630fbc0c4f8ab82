// Any geometry: validate() refuses it, or its part has a size that holds and can be decoded.

#include <stdexcept>
#include <string>

#include "fuzz/input.h"

namespace kvpool::fuzz {
namespace {

int any_int(Input& input) {
  switch (input.between(0, 3)) {
    case 0:
      return input.number<std::int32_t>();
    case 1:
      return 8 * input.between(0, 40);
    default:
      return input.between(-2, 300);
  }
}

void run(Input input) {
  codec::PartGeometry geometry;
  geometry.format.code =
      static_cast<codec::Code>(input.between(0, 1) == 0 ? input.between(0, 7) : input.byte());
  geometry.format.group_size = input.between(0, 3) == 0 ? input.byte() : 32;
  geometry.format.hadamard = input.between(0, 1) == 0;
  geometry.role = input.between(0, 1) == 0 ? codec::Role::kKeys : codec::Role::kValues;
  geometry.block_size = any_int(input);
  geometry.head_dim = any_int(input);
  try {
    codec::validate(geometry);
  } catch (const std::invalid_argument& error) {
    require(*error.what() != '\0');
    return;
  }
  const std::size_t bytes = codec::part_bytes(geometry);
  const std::size_t n = elements(geometry.block_size, geometry.head_dim);
  require(bytes > 0 && bytes <= 16 * n);
  require(codec::block_bytes(geometry, 3) == 3 * bytes);
  if (n > 1 << 16) return;
  Part part(geometry, 0);
  std::vector<float> rows(n);
  codec::decode(geometry, part.data(), 0, geometry.block_size, rows.data());
  for (const float value : rows) require(value == 0.0F);
}

void run_names(Input input) {
  std::string name;
  for (int n = input.between(0, 8); n > 0; --n) name += static_cast<char>(input.byte());
  try {
    require(codec::name(codec::code_of(name)) == name);
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace
}  // namespace kvpool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvpool::fuzz::run(kvpool::fuzz::Input({data, size}));
  kvpool::fuzz::run_names(kvpool::fuzz::Input({data, size}));
  return 0;
}
