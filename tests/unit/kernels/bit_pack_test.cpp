#include "kernels/scalar/bit_pack.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <vector>

namespace kvpool::kernels::scalar {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint8_t kGuard = 0xA5;

/// Packs, and checks that no byte after the last is touched.
Bytes pack(const Bytes& codes, int bits) {
  const std::size_t n_bytes = (codes.size() * static_cast<std::size_t>(bits) + 7) / 8;
  Bytes packed(n_bytes + 2, kGuard);
  pack_bits(codes.data(), codes.size(), bits, packed.data());
  EXPECT_EQ(packed[n_bytes], kGuard);
  packed.resize(n_bytes);
  return packed;
}

Bytes unpack(const Bytes& packed, std::size_t n, int bits) {
  Bytes codes(n + 1, kGuard);
  unpack_bits(packed.data(), n, bits, codes.data());
  EXPECT_EQ(codes[n], kGuard);
  codes.resize(n);
  return codes;
}

RC_GTEST_PROP(BitPackProperty, UnpackingGivesTheLowBitsOfWhatWasPacked, ()) {
  const int bits = *rc::gen::inRange(1, 9);
  const auto n = *rc::gen::oneOf(rc::gen::element<std::size_t>(40, 64, 80, 96, 112, 128, 192, 256),
                                 rc::gen::inRange<std::size_t>(0, 300));
  const Bytes codes = *rc::gen::container<Bytes>(n, rc::gen::arbitrary<std::uint8_t>());
  const Bytes packed = pack(codes, bits);
  const Bytes unpacked = unpack(packed, n, bits);
  for (std::size_t i = 0; i < n; ++i) RC_ASSERT(unpacked[i] == (codes[i] & ((1 << bits) - 1)));
}

/// Lowest bit first, and zeros after the last code.
RC_GTEST_PROP(BitPackProperty, EachBitIsWhereItBelongs, ()) {
  const auto bits = *rc::gen::inRange<std::size_t>(1, 9);
  const Bytes codes = *rc::gen::arbitrary<Bytes>();
  const Bytes packed = pack(codes, static_cast<int>(bits));
  for (std::size_t bit = 0; bit < packed.size() * 8; ++bit) {
    const int expected = bit < codes.size() * bits ? codes[bit / bits] >> (bit % bits) & 1 : 0;
    RC_ASSERT((packed[bit / 8] >> (bit % 8) & 1) == expected);
  }
}

TEST(BitPack, KnownBytes) {
  EXPECT_EQ(pack({1, 0, 1, 1, 0, 0, 0, 1, 1}, 1), (Bytes{0x8D, 0x01}));
  EXPECT_EQ(pack({1, 2, 3, 0, 3}, 2), (Bytes{0x39, 0x03}));
  EXPECT_EQ(pack({7, 0, 5}, 3), (Bytes{0x47, 0x01}));
  EXPECT_EQ(pack({0xA, 0xB, 0xC}, 4), (Bytes{0xBA, 0x0C}));
  EXPECT_EQ(pack({0xFF, 0x01}, 8), (Bytes{0xFF, 0x01}));
}

}  // namespace
}  // namespace kvpool::kernels::scalar
