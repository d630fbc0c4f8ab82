#include "kvpool/vecinfer_codebooks.h"

#include <gtest/gtest.h>
#include <mlx/transforms.h>

#include <cmath>
#include <functional>

#include "codec/vector_quantizer.h"
#include "unit/cache/codebooks.h"

namespace mx = mlx::core;

namespace kvpool {
namespace {

constexpr codec::VectorCode kCode{4, 8};

VecInferStream good() { return testing::codebook_stream(kCode, 2, 3, 64); }

std::string refusal(const std::string& format, const VecInferStream& keys,
                    const VecInferStream& values) {
  try {
    VecInferCodebooks(format, keys, values);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(VecInferCodebooks, GiveEachHeadItsCodebookAndTransform) {
  const VecInferStream keys = good();
  const VecInferStream values = good();
  const VecInferCodebooks books("vecinfer2", keys, values);
  EXPECT_EQ(books.format(), "vecinfer2");
  EXPECT_EQ(books.n_layers(), 2);
  EXPECT_EQ(books.n_kv_heads(), 3);
  EXPECT_EQ(books.head_dim(), 64);
  const codec::VectorQuantizer& layer = *books.layer(1).values;
  ASSERT_EQ(layer.codebooks.size(), 3U);
  mx::array scales = values.scales;
  mx::array mean = values.mean;
  mx::array centroids = values.centroids;
  mx::eval(scales, mean, centroids);
  for (std::size_t head = 0; head < 3; ++head) {
    EXPECT_EQ(layer.codebooks[head]->scale, scales.data<float>()[3 + head]);
    EXPECT_EQ(layer.transforms[head].mean[5], mean.data<float>()[(3 + head) * 64 + 5]);
    EXPECT_EQ(layer.codebooks[head]->centroids[1000],
              centroids.data<std::int8_t>()[(3 + head) * 1024 + 1000]);
    EXPECT_EQ(layer.codebooks[head]->planes[2 * 256 + 250],
              layer.codebooks[head]->centroids[250 * 4 + 2]);
  }
  EXPECT_THROW(books.layer(2), std::out_of_range);
}

TEST(VecInferCodebooks, LayersMayHaveDifferentCodesWithinTheFormatsBits) {
  const VecInferStream mixed = testing::codebook_stream({{2, 8}, {8, 8}}, 3, 64);
  const VecInferStream even = good();
  const VecInferCodebooks books("vecinfer3", mixed, even);
  EXPECT_EQ(books.average_bits(), 2.25);
  EXPECT_EQ(books.layer(0).keys->codebooks[2]->code(), (codec::VectorCode{2, 8}));
  EXPECT_EQ(books.layer(1).keys->codebooks[0]->code(), (codec::VectorCode{8, 8}));
  EXPECT_EQ(books.layer(1).values->codebooks[0]->code(), kCode);
  EXPECT_NE(refusal("vecinfer2", mixed, even).find("these codebooks 2.25"), std::string::npos);
  // The numbers of book 3, the first of layer 1, come after those of three of 512.
  mx::array centroids = mixed.centroids;
  centroids.eval();
  EXPECT_EQ(books.layer(1).keys->codebooks[0]->centroids[7],
            centroids.data<std::int8_t>()[3 * 512 + 7]);
}

TEST(VecInferCodebooks, RotationsAreMadeOrthonormal) {
  const VecInferCodebooks books("vecinfer2", good(), good());
  const codec::HeadTransform& transform = books.layer(1).keys->transforms[2];
  for (const std::size_t i : {0U, 7U, 63U}) {
    for (const std::size_t j : {0U, 7U, 63U}) {
      double product = 0.0;
      for (std::size_t d = 0; d < 64; ++d) {
        EXPECT_EQ(transform.back[i * 64 + d], transform.rotation[d * 64 + i]);
        product += double{transform.back[i * 64 + d]} * transform.back[j * 64 + d];
      }
      EXPECT_NEAR(product, i == j ? 1.0 : 0.0, 1e-6);
    }
  }
}

TEST(VecInferCodebooks, HeadsAndLayersMayShare) {
  VecInferStream shared = good();
  shared.codebook_of = mx::zeros({2, 3}, mx::int32);
  const VecInferCodebooks books("vecinfer2", shared, shared);
  EXPECT_EQ(books.layer(0).keys->codebooks[0], books.layer(1).keys->codebooks[2]);
}

TEST(VecInferCodebooks, RefuseWhatDoesNotFitAndSayWhat) {
  EXPECT_EQ(refusal("vecinfer2", good(), good()), "");
  EXPECT_NE(refusal("int4", good(), good()).find("format must be vecinfer1"), std::string::npos);
  EXPECT_NE(refusal("vecinfer5", good(), good()).find("unknown format"), std::string::npos);
  EXPECT_NE(refusal("vecinfer1", good(), good()).find("vecinfer1 has 1.0"), std::string::npos);
  const std::pair<std::string, std::function<void(VecInferStream&)>> changes[] = {
      {"codes must be (6, 2)", [](auto& s) { s.codes = mx::zeros({5, 2}, mx::int32); }},
      {"codes must be 8 bits of 2, 4 or 8 channels",
       [](auto& s) {
         s.codes = mx::full({6, 2}, 4, mx::int32);
       }},
      {"the heads of layer 0 have different codes",
       [](auto& s) {
         s.codes = mx::array({4, 8, 4, 8, 2, 8, 4, 8, 4, 8, 4, 8}, {6, 2}, mx::int32);
         s.centroids = mx::slice(s.centroids, {0}, {5 * 1024 + 512});
       }},
      {"centroids must be (6144)", [](auto& s) { s.centroids = mx::slice(s.centroids, {0}, {6143}); }},
      {"rotation must be (2, 3, 64, 64)",
       [](auto& s) {
         s.rotation = mx::zeros({2, 3, 64, 63}, mx::int8);
       }},
      {"rotation: row 0 depends on those before it",
       [](auto& s) {
         s.rotation = mx::zeros({2, 3, 64, 64}, mx::int8);
       }},
      {"rotation: row 1 depends on those before it",
       [](auto& s) {
         s.rotation = mx::ones({2, 3, 64, 64}, mx::int8);
       }},
      {"of another type", [](auto& s) { s.centroids = mx::astype(s.centroids, mx::int32); }},
      {"got -128",
       [](auto& s) {
         s.centroids = mx::full({6144}, -128, mx::int8);
       }},
      {"scale must be finite", [](auto& s) { s.scales = mx::zeros({6}); }},
      {"codebook_of must be 0 to 5",
       [](auto& s) {
         s.codebook_of = mx::full({2, 3}, 6, mx::int32);
       }},
      {"codebook_of must be 0 to 5, got -1",
       [](auto& s) {
         s.codebook_of = mx::full({2, 3}, -1, mx::int32);
       }},
      {"smooth must be finite and above 0",
       [](auto& s) {
         s.smooth = mx::zeros({2, 3, 64});
       }},
      {"smooth must be (2, 3, a multiple of 8",
       [](auto& s) {
         s.smooth = mx::ones({2, 3, 60});
       }},
      {"mean must be (2, 3, 64)",
       [](auto& s) {
         s.mean = mx::zeros({2, 3, 72});
       }},
      {"mean must be finite",
       [](auto& s) {
         s.mean = mx::full({2, 3, 64}, INFINITY);
       }},
  };
  for (const auto& [text, change] : changes) {
    VecInferStream changed = good();
    change(changed);
    EXPECT_NE(refusal("vecinfer2", changed, good()).find("keys: "), std::string::npos) << text;
    const std::string got = refusal("vecinfer2", good(), changed);
    EXPECT_NE(got.find(text), std::string::npos) << text << " in: " << got;
  }
  EXPECT_NE(refusal("vecinfer2", good(), testing::codebook_stream(kCode, 2, 3, 128))
                .find("values have 2 layers of 3 heads of 128"),
            std::string::npos);
}

TEST(VecInferCodebooks, IdentityIsThatOfTheNumbers) {
  const VecInferStream keys = good();
  const VecInferStream values = good();
  const auto identity = [](const VecInferStream& k, const VecInferStream& v) {
    return VecInferCodebooks("vecinfer2", k, v).identity();
  };
  const std::uint64_t one = identity(keys, values);
  EXPECT_EQ(identity(keys, values), one);
  EXPECT_NE(identity(values, keys), one);
  VecInferStream changed = keys;
  changed.mean = keys.mean + mx::array(1e-6F);
  EXPECT_NE(identity(changed, values), one);
  changed = keys;
  changed.hadamard = false;
  EXPECT_NE(identity(changed, values), one);
  changed = keys;
  changed.rotation = std::nullopt;
  EXPECT_NE(identity(changed, values), one);
  EXPECT_NE(one, 0U);
}

TEST(VecInferCodebooks, RandomOnesFollowTheSeed) {
  for (const char* format : {"vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3", "vecinfer4"}) {
    const auto books = VecInferCodebooks::random(format, 2, 4, 80, 7);
    EXPECT_EQ(books.n_kv_heads(), 4);
    EXPECT_EQ(books.identity(), VecInferCodebooks::random(format, 2, 4, 80, 7).identity());
    EXPECT_NE(books.identity(), VecInferCodebooks::random(format, 2, 4, 80, 8).identity());
  }
  EXPECT_THROW(VecInferCodebooks::random("vecinfer2", 1, 1, 60, 1), std::invalid_argument);
  EXPECT_THROW(VecInferCodebooks::random("vecinfer2", 0, 1, 64, 1), std::invalid_argument);
}

}  // namespace
}  // namespace kvpool
