#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "cuda/kernels.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda/open.hpp"
#include "cuda/ptx_hash.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/temporary_folder.hpp"

namespace fftune::cuda {
namespace {

using testing::TemporaryFolder;
using testing::test_kernels;

/// Null where NVRTC is missing; the reason is in the log.
std::unique_ptr<Compiler> compiler_for(const std::string& arch, const SourceSet& sources,
                                       const std::filesystem::path& cache = {}) {
  try {
    return make_cuda_compiler(arch, sources, {cache, {}});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    WARN(error.what());
    return nullptr;
  }
}

Program program_of(const char* file, const char* expression) {
  Program program;
  program.kernels.push_back({file, expression});
  KernelLaunch launch;
  launch.block = {128, 1, 1};
  program.steps.emplace_back(launch);
  return program;
}

}  // namespace

TEST_CASE("a template kernel compiles for each architecture without a device") {
  const auto sources = test_kernels();
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const auto compiler = compiler_for(arch, sources);
    if (compiler == nullptr) FFTUNE_SKIP("no NVRTC");
    const auto report = compiler->compile(program_of("test/scale.cu", "scale<128>"));
    CHECK(report.failure == "");
    CHECK_FALSE(report.cached);
    CHECK(report.seconds > 0);
    REQUIRE(report.kernels.size() == 1);
    CHECK(report.kernels[0].name == "scale<128>");
    CHECK(report.kernels[0].registers >= 8);
    CHECK(report.spill_bytes() == 0);
  }
}

TEST_CASE("kernels for one architecture alone compile for it") {
  const auto sources = test_kernels();
  const auto compiler = compiler_for("sm_90a", sources);
  if (compiler == nullptr) FFTUNE_SKIP("no NVRTC");
  for (const auto& [file, expression] :
       {std::pair("test/tma.cu", "tma<8>"), std::pair("test/cluster.cu", "cluster<2>"),
        std::pair("test/count.cu", "count<float>"), std::pair("test/shared.cu", "shared<50000>"),
        std::pair("test/shared.cu", "bounded<64>"), std::pair("test/fault.cu", "fault<64>")})
    CHECK(compiler->compile(program_of(file, expression)).failure == "");
}

TEST_CASE("a kernel that does not compile is a result with its place") {
  const auto sources = test_kernels();
  const auto compiler = compiler_for("sm_80", sources);
  if (compiler == nullptr) FFTUNE_SKIP("no NVRTC");
  CHECK(compiler->compile(program_of("test/broken.cu", "broken<1>")).failure ==
        "broken<1>: test/broken.cu:3: identifier \"nothing\" is undefined");
  CHECK(
      compiler->compile(program_of("test/scale.cu", "scaled_up<1>")).failure.find("scaled_up<1>") ==
      0);
  const auto too_much =
      compiler->compile(program_of("test/shared.cu", "static_shared<60000>")).failure;
  INFO(too_much);
  CHECK(too_much.find("too much shared data") != std::string::npos);
  CHECK(too_much.find('\n') == std::string::npos);
}

TEST_CASE("PTX has a hash that its source's lines and unused names do not change") {
  const auto hash_of = [](const std::string& before, const std::string& now) -> std::string {
    std::string text = test_kernels().text("test/scale.cu");
    const auto place = text.find(before);
    REQUIRE(place != std::string::npos);
    const auto sources = SourceSet({{"common/types.cuh", test_kernels().text("common/types.cuh")},
                                    {"common/scaled.cuh", test_kernels().text("common/scaled.cuh")},
                                    {"test/scale.cu", text.replace(place, before.size(), now)}});
    const auto compiler = compiler_for("sm_90a", sources);
    if (compiler == nullptr) return "";
    const auto report = compiler->compile(program_of("test/scale.cu", "scale<128>"));
    REQUIRE(report.failure == "");
    return report.kernels.at(0).ptx_hash;
  };
  const auto hash = hash_of("template", "template");
  if (hash.empty()) FFTUNE_SKIP("no NVRTC");
  CHECK(hash.size() == 16);
  CHECK(hash_of("template", "// a line more\nconstexpr int unused = 3;\ntemplate") == hash);
  CHECK(hash_of("scaled(x[i], by)", "scaled(by, x[i])") == hash);
  CHECK(hash_of("scaled(x[i], by)", "scaled(x[i], by + by)") != hash);
  CHECK(hash_of("template <int threads>", "template <unsigned threads>") == hash);  // another name
  CHECK(hash_of("__global__ void", "__global__ void __launch_bounds__(64)") != hash);
}

TEST_CASE("an image that is cut short has no PTX") {
  for (const std::string& image : {std::string(), std::string(63, 'x'), std::string(64, 'x')})
    CHECK_THROWS_AS(ptx_hash(image), Error);
}

TEST_CASE("an impossible launch is a failure of the program") {
  const auto sources = test_kernels();
  const auto compiler = compiler_for("sm_80", sources);
  if (compiler == nullptr) FFTUNE_SKIP("no NVRTC");
  auto program = program_of("test/scale.cu", "scale<128>");
  std::get<KernelLaunch>(program.steps[0]).shared_bytes = 1 << 20;
  const auto report = compiler->compile(program);
  CHECK(report.failure.find("scale<128>: 1048576 bytes of shared memory") == 0);
  CHECK(report.kernels.size() == 1);
}

TEST_CASE("the second compilation comes from the disk") {
  const TemporaryFolder folder;
  const auto sources = test_kernels();
  const auto program = program_of("test/scale.cu", "scale<64>");
  const auto first = compiler_for("sm_80", sources, folder.path());
  if (first == nullptr) FFTUNE_SKIP("no NVRTC");
  const auto built = first->compile(program);
  REQUIRE(built.failure == "");
  CHECK_FALSE(built.cached);
  const auto found = compiler_for("sm_80", sources, folder.path())->compile(program);
  CHECK(found.cached);
  CHECK(found.seconds == 0);
  CHECK(found.kernels.at(0).registers == built.kernels.at(0).registers);
  CHECK(found.kernels.at(0).name == "scale<64>");
  CHECK_FALSE(compiler_for("sm_86", sources, folder.path())->compile(program).cached);
  CHECK_FALSE(first->compile(program_of("test/scale.cu", "scale<32>")).cached);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "cubin"))
    std::ofstream(entry.path(), std::ios::trunc) << "damaged";
  const auto rebuilt = first->compile(program);
  CHECK_FALSE(rebuilt.cached);
  CHECK(rebuilt.failure == "");
  CHECK(first->compile(program).cached);
}

TEST_CASE("an edit of an included file misses the cache; a failure is not cached") {
  const TemporaryFolder folder;
  const auto compile = [&](const std::string& header) {
    const SourceSet sources(std::map<std::string, std::string>{
        {"a.cu",
         "#include \"a.cuh\"\ntemplate <int n> __global__ void k(int* x) { *x = value; }\n"},
        {"a.cuh", header}});
    const auto compiler = compiler_for("sm_80", sources, folder.path());
    return compiler ? compiler->compile(program_of("a.cu", "k<1>")) : CompileReport{};
  };
  const auto first = compile("constexpr int value = 1;\n");
  if (first.kernels.empty()) FFTUNE_SKIP("no NVRTC");
  CHECK_FALSE(compile("constexpr int value = 2;\n").cached);
  CHECK(compile("constexpr int value = 1;\n").cached);
  CHECK(compile("constexpr int other = 1;\n").failure != "");
  CHECK(compile("constexpr int other = 1;\n").failure != "");
}

TEST_CASE("threads compile at once") {
  const auto sources = test_kernels();
  const auto compiler = compiler_for("sm_80", sources);
  if (compiler == nullptr) FFTUNE_SKIP("no NVRTC");
  std::vector<std::string> failures(4, "not run");
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < failures.size(); ++i)
    threads.emplace_back([&, i] {
      const auto expression = "scale<" + std::to_string(32 * (i + 1)) + ">";
      failures[i] = compiler->compile(program_of("test/scale.cu", expression.c_str())).failure;
    });
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) CHECK(failure == "");
}

TEST_CASE("a kernel that several need at once is compiled by one of them") {
  const TemporaryFolder folder;
  const auto sources = test_kernels();
  if (compiler_for("sm_80", sources) == nullptr) FFTUNE_SKIP("no NVRTC");
  std::vector<std::unique_ptr<Compiler>> compilers;  // each with the cache as its process would
  for (int i = 0; i < 4; ++i) compilers.push_back(compiler_for("sm_80", sources, folder.path()));
  std::vector<CompileReport> reports(compilers.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < compilers.size(); ++i)
    threads.emplace_back(
        [&, i] { reports[i] = compilers[i]->compile(program_of("test/scale.cu", "scale<64>")); });
  for (auto& thread : threads) thread.join();
  for (const auto& report : reports) CHECK(report.failure == "");
  CHECK(std::count_if(reports.begin(), reports.end(),
                      [](const auto& report) { return !report.cached; }) == 1);
}

TEST_CASE("an architecture that NVRTC does not know is wrong input") {
  const auto sources = test_kernels();
  if (compiler_for("sm_80", sources) == nullptr) FFTUNE_SKIP("no NVRTC");
  for (const char* arch : {"sm_13", "sm_", "sm_80b", "banana", ""})
    CHECK_THROWS_AS(make_cuda_compiler(arch, sources, {}), Error);
}

TEST_CASE("a machine without NVRTC says what to install") {
  const auto complaint = [](const char* library) {
    return test::error_of(ErrorKind::unavailable,
                          [&] { open_nvrtc_among({library}, std::nullopt); });
  };
  CHECK(complaint("libnvrtc-not-here.so.13").find("install") != std::string::npos);
  // A library that is no NVRTC is passed over.
  CHECK(complaint("libc.so.6") != "");
}

TEST_CASE("an NVRTC newer than the driver is passed over") {
  try {
    open_nvrtc({});
  } catch (const Error&) {
    FFTUNE_SKIP("no NVRTC");
  }
  CHECK(test::error_of([] { open_nvrtc({}, 11); }).find("newer than the driver") !=
        std::string::npos);
}

}  // namespace fftune::cuda
