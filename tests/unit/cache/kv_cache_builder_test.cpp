#include "kvpool/kv_cache_builder.h"

#include <gtest/gtest.h>

#include "../storage/testing.h"
#include "kvpool/standalone_kv_cache.h"

namespace kvpool {
namespace {

namespace mx = mlx::core;
using testing::error_of;

const StandaloneKVCache& as_standalone(const std::shared_ptr<KVCache>& cache) {
  return dynamic_cast<const StandaloneKVCache&>(*cache);
}

TEST(Builder, EachMethodIsItsFormatForKeysAndValues) {
  const struct {
    const char* method;
    int bits;
    const char* format;
  } cases[] = {{"fp16", 2, "raw"},   {"int8", 2, "int8"},   {"int4", 2, "int4"},
               {"int2", 4, "int2"},  {"kivi4", 2, "kivi4"}, {"kivi2", 4, "kivi2"},
               {"int", 8, "int8"},   {"int", 4, "int4"},    {"int", 2, "int2"},
               {"kivi", 4, "kivi4"}, {"kivi", 2, "kivi2"}};
  for (const auto& c : cases) {
    const auto cache = KVCacheBuilder().with_method(c.method).with_bits(c.bits).build();
    EXPECT_EQ(as_standalone(cache).config().key_format, c.format) << c.method << c.bits;
    EXPECT_EQ(as_standalone(cache).config().value_format, c.format) << c.method << c.bits;
    EXPECT_EQ(cache->size(), 0);
  }
}

TEST(Builder, SetsEachFieldAndLeavesTheOthers) {
  const auto expect = [](KVCacheBuilder& builder, auto set) {
    KVCacheConfig wanted;
    set(wanted);
    EXPECT_EQ(builder.config(), wanted);
    EXPECT_FALSE(builder.config() == KVCacheConfig{});
  };
  KVCacheBuilder a, b, c, d, e, f, g, h;
  expect(a.with_method("int8"), [](KVCacheConfig& config) { config.method = "int8"; });
  expect(b.with_head_dim(64), [](KVCacheConfig& config) { config.head_dim = 64; });
  expect(c.with_bits(4), [](KVCacheConfig& config) { config.bits = 4; });
  expect(d.with_group_size(64), [](KVCacheConfig& config) { config.group_size = 64; });
  expect(e.with_block_size(16), [](KVCacheConfig& config) { config.block_size = 16; });
  expect(f.with_window(0), [](KVCacheConfig& config) { config.window = 0; });
  expect(g.with_sink(8), [](KVCacheConfig& config) { config.sink = 8; });
  expect(h.with_check_finite(true), [](KVCacheConfig& config) { config.check_finite = true; });
}

TEST(Builder, BuildsWhatItWasToldTo) {
  KVCacheBuilder builder;
  builder.with_method("int4").with_head_dim(80).with_group_size(64).with_block_size(4);
  builder.with_window(6).with_sink(5).with_check_finite(true);
  for (const auto& cache : {builder.build(), KVCacheFactory::create(builder.config())}) {
    EXPECT_EQ(as_standalone(cache).head_dim(), 80);
    const PagedKVCacheConfig wanted{.key_format = "int4",
                                    .value_format = "int4",
                                    .group_size = 64,
                                    .window = 6,
                                    .sink = 5,
                                    .check_finite = true};
    EXPECT_EQ(as_standalone(cache).config(), wanted);
    cache->append(mx::ones({80}), mx::ones({80}));
    EXPECT_EQ(cache->memory_bytes(), 2 * 4 * 80 * 2) << "one block of 4 fp16 keys, one of values";
  }
  EXPECT_NE(builder.build(), builder.build());
}

TEST(Builder, NamesTheFieldThatIsWrong) {
  const auto error = [](auto set) {
    KVCacheConfig config;
    set(config);
    return error_of<std::invalid_argument>([&] { KVCacheFactory::create(config); });
  };
  const std::string methods =
      "KVCacheConfig: method must be fp16, int8, int4, int2, kivi4, kivi2, vecinfer1, vecinfer1.5, "
      "vecinfer2, vecinfer3 or vecinfer4, or int, kivi or vecinfer with such bits; got ";
  EXPECT_EQ(error([](auto& c) { c.method = "int3"; }), methods + "'int3'");
  EXPECT_EQ(error([](auto& c) { c.method = ""; }), methods + "''");
  EXPECT_EQ(error([](auto& c) { c.method = "raw"; }), methods + "'raw'");
  EXPECT_EQ(error([](auto& c) { c.bits = 8; }), methods + "'kivi' with bits 8");
  EXPECT_EQ(error([](auto& c) { c.bits = 0; }), methods + "'kivi' with bits 0");
  EXPECT_EQ(error([](auto& c) { c.method = "int", c.bits = 3; }), methods + "'int' with bits 3");
  for (const auto& [name, text] : {std::pair{"head_dim", error([](auto& c) { c.head_dim = 12; })},
                                   {"group_size", error([](auto& c) { c.group_size = 16; })},
                                   {"block_size", error([](auto& c) { c.block_size = 0; })},
                                   {"window", error([](auto& c) { c.window = -1; })},
                                   {"sink", error([](auto& c) { c.sink = -2; })}}) {
    EXPECT_NE(text.find(name), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace kvpool
