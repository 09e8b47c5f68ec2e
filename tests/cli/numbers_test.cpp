#include "apps/fftune/terminal/text.hpp"

#include <limits>

#include "support/catch.hpp"

using fftune::bytes_text;
using namespace fftune::tool;

TEST_CASE("numbers read as people write them") {
  CHECK(bytes_text(0) == "0 B");
  CHECK(bytes_text(1023) == "1023 B");
  CHECK(bytes_text(232448) == "227 KiB");
  CHECK(bytes_text(150754820096.0) == "140.4 GiB");
  CHECK(microseconds_text(0.5) == "0.500");
  CHECK(microseconds_text(12.3456) == "12.35");
  CHECK(microseconds_text(123456.7) == "123457");
  CHECK(microseconds_text(0) == "-");
  CHECK(microseconds_text(std::numeric_limits<double>::infinity()) == "-");
  CHECK(percent_text(0.8314) == "83.1%");
  CHECK(limit_share_text(0.8314) == "83.1%");
  CHECK(limit_share_text(1.049) == "104.9%");
  CHECK(limit_share_text(1.87) == "above the limit");
  CHECK(ratio_text(1.234) == "1.23x");
  CHECK(ratio_text(0.998) == "1.00x");
  CHECK(ratio_text(0.87) == "▼0.87x");
  CHECK(ratio_range_text(0.9, 1.2) == "0.90-1.20x");
  CHECK(ratio_range_text(0.7, 0.85) == "▼0.70-0.85x");
  CHECK(seconds_text(45.4) == "45s");
  CHECK(seconds_text(125) == "2m05s");
  CHECK(seconds_text(3725) == "1h02m");
  CHECK(counted(0, "file") == "0 files");
  CHECK(counted(1, "file") == "1 file");
}
