// A management library without a device, for the tests: what it says is what they set.
#pragma once

#include <string>

namespace fftune::testing {

struct FakeNvml {
  std::string known_bus = "0000:00:00.0";
  unsigned processes = 1;
  unsigned clock_mhz = 1980;
  unsigned max_clock_mhz = 1980;
  unsigned long long slowdowns = 0;
  std::string failing_call;  // this call returns NVML_ERROR_NOT_SUPPORTED
  int initialised = 0;
};

}  // namespace fftune::testing
