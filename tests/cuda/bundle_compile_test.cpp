// Kernels from a bundle instead of the run-time compiler.
#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "core/error.hpp"
#include "cuda/bundle.hpp"
#include "cuda/kernel_compiler.hpp"
#include "cuda/kernels.hpp"
#include "cuda/open.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace fftune::cuda {
namespace {

using testing::TemporaryFolder;
using testing::test_kernels;

const KernelSource scale_kernel{"test/scale.cu", "scale<128>"};

/// A bundle of scale<128> for sm_90a; false where NVRTC is missing.
bool write_bundle(const std::filesystem::path& path, const SourceSet& sources) {
  try {
    const auto builder = make_bundle_builder(sources, {});
    Program program;
    program.kernels.push_back(scale_kernel);
    const auto report = builder->add("sm_90a", program);
    CHECK(report.failure == "");
    CHECK(builder->kernels() == 1);
    CHECK(builder->add("sm_90a", program).kernels.empty());  // it is there
    std::ofstream(path, std::ios::binary) << builder->bytes();
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    WARN(error.what());
    return false;
  }
}

/// Such a bundle in a folder of its own, and origins that read it.
struct BundledScale {
  const TemporaryFolder folder;
  const SourceSet sources = test_kernels();
  const bool is_written = write_bundle(folder.path() / "kernels", sources);
  KernelOrigins origins;

  BundledScale() {
    if (is_written) origins.bundle = std::make_shared<const Bundle>(folder.path() / "kernels");
  }
};

/// NVRTC that is not there, and how often it was asked for.
struct MissingNvrtc {
  std::atomic<int> asked{0};
  std::shared_ptr<LazyNvrtc> lazy() {
    return std::make_shared<LazyNvrtc>([this]() -> std::shared_ptr<const Nvrtc> {
      ++asked;
      throw Error(ErrorKind::unavailable, "libnvrtc is not there");
    });
  }
};

}  // namespace

TEST_CASE("with a bundle no kernel is compiled and NVRTC is not looked for") {
  BundledScale bundled;
  if (!bundled.is_written) FFTUNE_SKIP("no NVRTC");
  MissingNvrtc nvrtc;
  bundled.origins.nvrtc = nvrtc.lazy();
  const KernelCompiler compiler(bundled.origins, "sm_90a", bundled.sources);
  const auto outcome = compiler.compile(scale_kernel);
  CHECK(outcome.failure == "");
  CHECK(outcome.cached);
  CHECK(outcome.seconds == 0);
  CHECK(outcome.kernel.image.size() > 100);
  CHECK(outcome.kernel.report.registers >= 8);
  CHECK(compiler.counters().compiled == 0);
  CHECK(compiler.counters().from_bundle == 1);
  CHECK(compiler.warnings().empty());
  CHECK(nvrtc.asked == 0);

  const auto missing = compiler.compile({"test/scale.cu", "scale<64>"});
  CHECK(missing.failure.find("scale<64>: the bundle '") == 0);
  CHECK(missing.failure.find("does not have this kernel; libnvrtc is not there") !=
        std::string::npos);
  CHECK(nvrtc.asked == 1);
}

TEST_CASE("a kernel that is not bundled is compiled where NVRTC is, unless that is switched off") {
  BundledScale bundled;
  if (!bundled.is_written) FFTUNE_SKIP("no NVRTC");
  auto& [folder, sources, is_written, origins] = bundled;
  origins.nvrtc = std::make_shared<LazyNvrtc>([] { return open_nvrtc({}); });
  origins.cache_folder = folder.path() / "cache";
  origins.no_jit = true;
  const KernelSource other{"test/scale.cu", "scale<64>"};
  {
    const KernelCompiler strict(origins, "sm_90a", sources);
    CHECK(strict.compile(scale_kernel).failure == "");
    const auto refused = strict.compile(other);
    CAPTURE(refused.failure);
    CHECK(refused.failure.find("compiling is switched off (FFTUNE_NO_JIT)") != std::string::npos);
    CHECK(refused.failure.find("does not have this kernel") != std::string::npos);
    CHECK(strict.counters().compiled == 0);
  }
  origins.no_jit = false;
  {
    const KernelCompiler compiler(origins, "sm_90a", sources);
    CHECK(compiler.compile(other).failure == "");
    CHECK(compiler.counters().compiled == 1);
    CHECK(compiler.counters().compile_seconds > 0);
  }
  origins.no_jit = true;
  const KernelCompiler cached(origins, "sm_90a", sources);
  CHECK(cached.compile(other).failure == "");
  CHECK(cached.counters().from_cache == 1);
  CHECK(cached.counters().compiled == 0);
}

TEST_CASE("a bundle of changed sources is called stale") {
  BundledScale bundled;
  if (!bundled.is_written) FFTUNE_SKIP("no NVRTC");
  const SourceSet changed(std::map<std::string, std::string>{
      {"test/scale.cu", "template <int n> __global__ void scale() {}\n"}});
  MissingNvrtc nvrtc;
  bundled.origins.nvrtc = nvrtc.lazy();
  const KernelCompiler compiler(bundled.origins, "sm_90a", changed);
  REQUIRE(compiler.warnings().size() == 1);
  CHECK(compiler.warnings().front().find("is stale") != std::string::npos);
  CHECK(compiler.compile(scale_kernel).failure.find("is stale: test/scale.cu has changed") !=
        std::string::npos);
  const KernelCompiler other(bundled.origins, "sm_80", bundled.sources);
  REQUIRE(other.warnings().size() == 1);
  CHECK(other.warnings().front().find("is for sm_90a, not sm_80") != std::string::npos);
}

}  // namespace fftune::cuda
