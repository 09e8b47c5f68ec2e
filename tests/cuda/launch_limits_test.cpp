#include "cuda/launch_limits.hpp"

#include "support/catch.hpp"

namespace fftune::cuda {
namespace {

bool mentions(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a launch that the hardware forbids has a reason") {
  const auto ampere = facts_of_architecture("sm_80");
  const auto hopper = facts_of_architecture("sm_90a");
  KernelLaunch launch;
  launch.grid = {100, 2, 1};
  launch.block = {256, 1, 1};
  const KernelNeeds needs{64, 1024};
  REQUIRE(launch_failure(launch, needs, ampere).empty());

  SECTION("grid") {
    launch.grid.x = 0;
    CHECK(mentions(launch_failure(launch, needs, ampere), "grid"));
    launch.grid = {1, 65536, 1};
    CHECK(mentions(launch_failure(launch, needs, ampere), "grid"));
    launch.grid = {0x7fffffff, 65535, 65535};
    CHECK(launch_failure(launch, needs, ampere).empty());
  }
  SECTION("block") {
    launch.block = {512, 2, 2};
    CHECK(mentions(launch_failure(launch, needs, ampere), "block"));
    launch.block = {0xffffffff, 0xffffffff, 0xffffffff};
    CHECK(mentions(launch_failure(launch, needs, ampere), "block"));
  }
  SECTION("registers") {
    launch.block = {512, 1, 1};
    CHECK(launch_failure(launch, {128, 0}, ampere).empty());
    CHECK(mentions(launch_failure(launch, {129, 0}, ampere), "registers"));
  }
  SECTION("shared memory") {
    launch.shared_bytes = 162 * 1024;
    CHECK(launch_failure(launch, needs, ampere).empty());
    launch.shared_bytes += 16;
    CHECK(mentions(launch_failure(launch, needs, ampere), "shared"));
    CHECK(launch_failure(launch, needs, hopper).empty());
  }
  SECTION("clusters") {
    launch.cluster = {2, 1, 1};
    CHECK(mentions(launch_failure(launch, needs, ampere), "no clusters"));
    CHECK(launch_failure(launch, needs, hopper).empty());
    launch.grid.x = 101;
    CHECK(mentions(launch_failure(launch, needs, hopper), "multiple"));
    launch.cluster = {101, 1, 1};
    CHECK(mentions(launch_failure(launch, needs, hopper), "cluster"));
    launch.cluster = {0, 1, 1};
    CHECK(mentions(launch_failure(launch, needs, hopper), "cluster"));
  }
  SECTION("programmatic dependent launch") {
    launch.programmatic = true;
    CHECK(mentions(launch_failure(launch, needs, ampere), "programmatic"));
    CHECK(launch_failure(launch, needs, hopper).empty());
  }
}

}  // namespace fftune::cuda
