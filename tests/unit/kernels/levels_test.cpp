#include <cstdlib>

#include "unit/kernels/testing.h"

namespace kvpool::kernels {
namespace {

TEST(Levels, ScalarIsAlwaysThereAndTheActiveOneRuns) {
  EXPECT_EQ(table_named("scalar").name, "scalar");
  const char* const forced = std::getenv("KVPOOL_KERNELS");
  const std::string name(active().name);
  EXPECT_TRUE(testing::has_level(name));
  if (forced != nullptr && *forced != '\0' && forced != kOps) {
    EXPECT_EQ(name, forced);
  }
}

TEST(Levels, AnUnknownOneIsRefusedWithThoseAllowed) {
  try {
    table_named("avx1024");
    FAIL();
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("no kernels 'avx1024'"), std::string::npos) << text;
    EXPECT_NE(text.find("allowed: ops, "), std::string::npos) << text;
    for (const Level& level : levels()) {
      EXPECT_NE(text.find(level.name), std::string::npos) << text;
    }
  }
}

TEST(LevelsDeathTest, TheEnvironmentForcesALevelAndAnUnknownOneIsAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto report_active = [](const char* name) {
    setenv("KVPOOL_KERNELS", name, 1);
    try {
      std::fprintf(stderr, "runs %s", std::string(active().name).c_str());
    } catch (const std::invalid_argument& error) {
      std::fprintf(stderr, "refused: %s", error.what());
    }
    std::exit(0);
  };
  EXPECT_EXIT(report_active("scalar"), ::testing::ExitedWithCode(0), "runs scalar");
  EXPECT_EXIT(report_active("quick"), ::testing::ExitedWithCode(0),
              "refused: .*no kernels 'quick'.*allowed: ops, scalar");
  // `ops` has no kernels; what still codes blocks on the host takes the best.
  EXPECT_EXIT(report_active("ops"), ::testing::ExitedWithCode(0), "runs [a-z0-9]+$");
}

TEST(Layouts, FollowFormatAndRole) {
  using enum codec::Code;
  EXPECT_EQ(layout_of({kKivi2}, codec::Role::kKeys), Layout::kChannel2);
  EXPECT_EQ(layout_of({kKivi2}, codec::Role::kValues), Layout::kAffine2);
  EXPECT_EQ(layout_of({kInt8}, codec::Role::kKeys), Layout::kAffine8);
  EXPECT_EQ(layout_of({kVecInfer3}, codec::Role::kKeys), Layout::kVector2);
  EXPECT_EQ(layout_of({kVecInfer3}, codec::Role::kValues), Layout::kVector4);
  EXPECT_EQ(layout_of({kVecInfer1}, codec::Role::kKeys), Layout::kVector8);
  EXPECT_EQ(layout_of({kVecInfer1_5}, codec::Role::kValues), Layout::kVector8Wide);
}

}  // namespace
}  // namespace kvpool::kernels
