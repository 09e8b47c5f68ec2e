#include "device/backend.hpp"

#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("a program spills what all its kernels spill") {
  CompileReport report;
  REQUIRE(report.spill_bytes() == 0);
  report.kernels.resize(3);
  report.kernels[0].spill_bytes = 16;
  report.kernels[2].spill_bytes = 4;
  REQUIRE(report.spill_bytes() == 20);
}
