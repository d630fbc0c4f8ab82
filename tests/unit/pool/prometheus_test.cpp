#include <gmock/gmock.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "testing.h"

namespace kvpool {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

constexpr AllocationStats kStats{.n_blocks = 8,
                                 .n_allocations = 12,
                                 .n_frees = 7,
                                 .n_reused = 4,
                                 .n_exhausted = 1,
                                 .n_grown = 3,
                                 .n_retired = 2,
                                 .peak_blocks_in_use = 6,
                                 .fragmented_count = 2};

constexpr const char* kPage =
    R"(# HELP p_blocks_in_use Blocks that some owner holds; a shared block counts once.
# TYPE p_blocks_in_use gauge
p_blocks_in_use 5
# HELP p_blocks_total Blocks that the pool manages.
# TYPE p_blocks_total gauge
p_blocks_total 8
# HELP p_fragmentation Fraction of the managed blocks in use and not full.
# TYPE p_fragmentation gauge
p_fragmentation 0.25
# HELP p_peak_blocks_in_use Most blocks ever in use at once.
# TYPE p_peak_blocks_in_use gauge
p_peak_blocks_in_use 6
# HELP p_allocations_total Blocks handed out.
# TYPE p_allocations_total counter
p_allocations_total 12
# HELP p_frees_total Blocks given back.
# TYPE p_frees_total counter
p_frees_total 7
# HELP p_reused_total Allocations of a block that had been handed out before.
# TYPE p_reused_total counter
p_reused_total 4
# HELP p_exhausted_total Allocate calls that found too few free blocks.
# TYPE p_exhausted_total counter
p_exhausted_total 1
# HELP p_grown_total Blocks added by growth.
# TYPE p_grown_total counter
p_grown_total 3
# HELP p_retired_total Blocks retired by shrink.
# TYPE p_retired_total counter
p_retired_total 2
)";

std::vector<std::string> lines_of(const std::string& page) {
  std::vector<std::string> lines;
  std::istringstream stream(page);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// A line that is neither HELP nor TYPE must be a sample of the format.
void expect_samples(const std::string& page, std::size_t n_samples) {
  const std::regex sample(
      R"re([a-zA-Z_:][a-zA-Z0-9_:]*(\{pool="([^"\\]|\\\\|\\"|\\n)*"\})? [0-9.e+-]+)re");
  std::size_t n = 0;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("# HELP ") || line.starts_with("# TYPE ")) continue;
    EXPECT_TRUE(std::regex_match(line, sample)) << line;
    ++n;
  }
  EXPECT_EQ(n, n_samples);
  EXPECT_TRUE(page.ends_with('\n'));
}

TEST(Prometheus, OnePool) {
  EXPECT_EQ(kStats.to_prometheus("p"), kPage);
  expect_samples(kStats.to_prometheus("p"), 10);
}

TEST(Prometheus, PrefixUnlessSaid) {
  EXPECT_THAT(kStats.to_prometheus(), HasSubstr("\nveloxquant_block_pool_blocks_in_use 5\n"));
  EXPECT_THAT(render_prometheus({{"a", kStats}}),
              HasSubstr("\nkvpool_block_pool_blocks_in_use{pool=\"a\"} 5\n"));
}

TEST(Prometheus, SeveralPoolsMakeOneValidPage) {
  const std::string page =
      render_prometheus({{"a", kStats}, {"b", {.n_blocks = 3, .fragmented_count = 1}}}, "p");
  EXPECT_THAT(
      page, ::testing::StartsWith(
                R"(# HELP p_blocks_in_use Blocks that some owner holds; a shared block counts once.
# TYPE p_blocks_in_use gauge
p_blocks_in_use{pool="a"} 5
p_blocks_in_use{pool="b"} 0
# HELP p_blocks_total Blocks that the pool manages.
)"));
  EXPECT_THAT(page, HasSubstr("\np_fragmentation{pool=\"b\"} 0.333333333333333\n"));
  expect_samples(page, 20);
  const auto lines = lines_of(page);
  const auto starts = [&](const std::string& text) {
    return std::count_if(lines.begin(), lines.end(),
                         [&](const std::string& line) { return line.starts_with(text); });
  };
  EXPECT_EQ(starts("# HELP "), 10);
  EXPECT_EQ(starts("# TYPE "), 10);
}

TEST(Prometheus, NoPoolsMakeAPageOfNoSamples) { expect_samples(render_prometheus({}), 0); }

TEST(Prometheus, P12EscapesTheLabel) {
  const std::string page = render_prometheus({{"a\"b\\c\nd", kStats}}, "p");
  EXPECT_THAT(page, HasSubstr("\np_blocks_in_use{pool=\"a\\\"b\\\\c\\nd\"} 5\n"));
  expect_samples(page, 10);
}

TEST(Prometheus, OtherBytesOfALabelStay) {
  const std::string page = render_prometheus({{"{x}, y=\t\xc3\xa9", kStats}}, "p");
  EXPECT_THAT(page, HasSubstr("p_blocks_in_use{pool=\"{x}, y=\t\xc3\xa9\"} 5\n"));
}

TEST(Prometheus, NumbersAreFiniteAndExact) {
  constexpr std::int64_t kMany = 123'456'789'012'345;
  const std::string page =
      AllocationStats{.n_blocks = 0, .n_allocations = kMany, .n_frees = 0}.to_prometheus("p");
  EXPECT_THAT(page, HasSubstr("\np_allocations_total 123456789012345\n"));
  EXPECT_THAT(page, HasSubstr("\np_fragmentation 0\n"));
}

TEST(Prometheus, RefusesAPrefixThatIsNoMetricName) {
  for (const char* prefix : {"", "1a", "a-b", "a b", "\xc3\xa9", "a\n"}) {
    const std::string expected = std::string(", got '") + prefix + "'";
    EXPECT_THAT(error_of<std::invalid_argument>([&] { (void)kStats.to_prometheus(prefix); }),
                HasSubstr(expected));
    EXPECT_THAT(error_of<std::invalid_argument>([&] { (void)render_prometheus({}, prefix); }),
                HasSubstr("prefix must match [a-zA-Z_:][a-zA-Z0-9_:]*"));
  }
  EXPECT_THAT(kStats.to_prometheus("_:a1"), HasSubstr("\n_:a1_frees_total 7\n"));
}

TEST(Prometheus, RefusesTwoPoolsOfOneName) {
  EXPECT_THAT(error_of<std::invalid_argument>([] {
                (void)render_prometheus({{"a", kStats}, {"b", kStats}, {"a", kStats}});
              }),
              HasSubstr("two pools are named 'a'"));
}

}  // namespace
}  // namespace kvpool
