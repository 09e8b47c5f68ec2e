#include "cuda/open.hpp"

#include "core/error.hpp"
#include "cuda/shared_library.hpp"
#include "device/sources.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"

namespace fftune::cuda {

TEST_CASE("a machine without a device says why") {
  const auto devices = list_cuda_devices({});
  if (!devices.found.empty()) FFTUNE_SKIP("there is a device");
  REQUIRE_FALSE(devices.unavailable.empty());
  for (const auto& reason : devices.unavailable) {
    CHECK(reason.rfind("CUDA: ", 0) == 0);
    CHECK(reason.find('\n') == std::string::npos);
  }
  const SourceSet sources({});
  CHECK(test::error_of(ErrorKind::unavailable, [&] { open_cuda(0, sources, {}); }) != "");
}

TEST_CASE("libraries are looked for below a toolkit's root") {
  const auto candidates = library_candidates({"libc.so.6"}, {"/nowhere"});
  REQUIRE_FALSE(candidates.empty());
  CHECK(candidates[0] == "libc.so.6");
  for (const auto& candidate : candidates) CHECK(candidate.rfind("/nowhere", 0) != 0);
  CHECK_FALSE(SharedLibrary::open("libfftune-not-here.so"));
  const auto library = SharedLibrary::open("libc.so.6");
  REQUIRE(library);
  CHECK(library->find("no_such_symbol") == nullptr);
  void (*function)() = nullptr;
  CHECK_THROWS_AS(library->load(function, "no_such_symbol"), Error);
}

}  // namespace fftune::cuda
