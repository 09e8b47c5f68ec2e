#include "layers/layer_rules.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "support/catch.hpp"

using namespace fftune::testing;
namespace fs = std::filesystem;

TEST_CASE("every source keeps to its layer") {
  const fs::path root = FFTUNE_SOURCE_DIR;
  const std::set<std::string> sources{".hpp", ".h", ".cpp", ".cu", ".cuh"};
  int files = 0;
  for (const char* folder : {"lib", "kernels", "tuning", "apps"})
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (!sources.count(entry.path().extension().string())) continue;
      ++files;
      std::ifstream stream(entry.path());
      const std::string text{std::istreambuf_iterator<char>(stream), {}};
      for (const auto& broken : broken_rules(fs::relative(entry.path(), root).string(), text))
        FAIL_CHECK(broken);
    }
  REQUIRE(files > 30);
}

namespace {

std::size_t broken(const std::string& path, const std::string& source) {
  return broken_rules(path, source).size();
}

}  // namespace

TEST_CASE("layers include downwards") {
  REQUIRE(broken("lib/core/a.cpp", "#include \"core/config.hpp\"\n#include <vector>\n") == 0);
  REQUIRE(broken("lib/core/a.cpp", "#include \"device/facts.hpp\"\n") == 1);
  REQUIRE(broken("lib/device/a.cpp", "#include \"registry/op.hpp\"\n") == 1);
  REQUIRE(broken("lib/cpu/a.cpp", "#include \"cuda/driver.hpp\"\n") == 1);
  REQUIRE(broken("lib/registry/a.cpp", "#include \"store/record.hpp\"\n") == 1);
  REQUIRE(broken("lib/store/a.cpp", "#include \"registry/variant.hpp\"\n") == 0);
  REQUIRE(broken("lib/store/a.cpp", "#include \"runtime/plan.hpp\"\n") == 1);
  REQUIRE(broken("lib/runtime/a.cpp", "#include \"kernels/ffn/ffn.hpp\"\n") == 1);
  REQUIRE(broken("lib/verify/a.cpp", "#include \"tuning/tuner.hpp\"\n") == 1);
  REQUIRE(broken("lib/include/fftune/fftune.hpp", "#include \"core/error.hpp\"\n") == 1);
  REQUIRE(broken("apps/fftune/a.cpp", "#include \"tuning/tuner.hpp\"\n") == 0);
  REQUIRE(broken("apps/fftune/a.cpp", "#include \"cuda/open.hpp\"\n") == 0);
  REQUIRE(broken("apps/fftune/a.cpp", "#include \"cuda/driver.hpp\"\n") == 1);
}

TEST_CASE("kernels and tuning do not know each other, nor tuning the backends") {
  REQUIRE(broken("kernels/ffn/a.cpp", "#include \"tuning/tuner.hpp\"\n") == 1);
  REQUIRE(broken("kernels/ffn/a.cpp", "#include \"kernels/gemm/launch.hpp\"\n") == 0);
  REQUIRE(broken("kernels/common/a.cpp", "#include \"kernels/gemm/launch.hpp\"\n") == 1);
  REQUIRE(broken("tuning/a.cpp", "#include \"kernels/ffn/ffn.hpp\"\n") == 1);
  REQUIRE(broken("tuning/a.cpp", "#include \"cuda/open.hpp\"\n") == 1);
  REQUIRE(broken("tuning/a.cpp", "#include \"device/backend.hpp\"\n") == 0);
}

TEST_CASE("what measures does not know what decides, and both serve ranks and tuning") {
  REQUIRE(broken("lib/measure/a.cpp", "#include \"verify/input_data.hpp\"\n") == 0);
  REQUIRE(broken("lib/measure/a.cpp", "#include \"runtime/plan.hpp\"\n") == 1);
  REQUIRE(broken("lib/measure/a.cpp", "#include \"tuning/search/group.hpp\"\n") == 1);
  REQUIRE(broken("lib/ranks/a.cpp", "#include \"measure/statistics.hpp\"\n") == 0);
  REQUIRE(broken("lib/ranks/a.cpp", "#include \"tuning/tuner.hpp\"\n") == 1);
  REQUIRE(broken("lib/runtime/a.cpp", "#include \"ranks/rank_search.hpp\"\n") == 1);
  REQUIRE(broken("tuning/search/a.cpp", "#include \"measure/statistics.hpp\"\n") == 0);
}

TEST_CASE("within tuning, what runs variants does not know what decides") {
  REQUIRE(broken("tuning/strategies/a.cpp", "#include \"tuning/evaluate/evaluator.hpp\"\n") == 1);
  REQUIRE(broken("tuning/search/a.cpp", "#include \"tuning/tuner.hpp\"\n") == 1);
  REQUIRE(broken("tuning/search/a.cpp", "#include \"tuning/evaluate/evaluator.hpp\"\n") == 0);
  REQUIRE(broken("tuning/decide/a.cpp", "#include \"tuning/search/group.hpp\"\n") == 0);
  REQUIRE(broken("tuning/evaluate/a.cpp", "#include \"tuning/worker/supervisor.hpp\"\n") == 1);
  REQUIRE(broken("tuning/tuner.cpp", "#include \"tuning/decide/verdict.hpp\"\n") == 0);
}

TEST_CASE("within the tool, what commands share knows no command") {
  const auto includes = [](const char* folder, const char* header) {
    return broken(fmt::format("apps/fftune/{}/a.cpp", folder),
                  fmt::format("#include \"apps/fftune/{}\"\n", header));
  };
  CHECK(includes("terminal", "command_line/command.hpp") == 1);
  CHECK(includes("presets", "search/tune.hpp") == 1);
  CHECK(includes("presets", "command_line/command.hpp") == 0);
  CHECK(includes("search", "bench/bench_run.hpp") == 1);
  CHECK(includes("search", "presets/records.hpp") == 0);
  REQUIRE(broken("apps/fftune/main.cpp", "#include \"apps/fftune/commands.hpp\"\n") == 0);
}

TEST_CASE("includes are spelled from a root") {
  REQUIRE(broken("lib/core/a.cpp", "#include \"config.hpp\"\n") == 1);
  REQUIRE(broken("lib/core/a.cpp", "#include \"../core/config.hpp\"\n") == 1);
  REQUIRE(broken("extra/a.cpp", "#include \"core/config.hpp\"\n") == 1);
}

TEST_CASE("other projects' headers have their few users") {
  REQUIRE(broken("apps/fftune/command_line/parse.cpp", "#include <CLI/CLI.hpp>\n") == 0);
  REQUIRE(broken("apps/fftune/a.cpp", "#include <CLI/CLI.hpp>\n") == 1);
  REQUIRE(broken("apps/fftune/a.cpp", "#include <nlohmann/json.hpp>\n") == 1);
  REQUIRE(broken("tuning/a.cpp", "#include <CLI/CLI.hpp>\n") == 1);
  REQUIRE(broken("tuning/log.cpp", "#include <spdlog/spdlog.h>\n") == 0);
  REQUIRE(broken("tuning/a.cpp", "#include <spdlog/spdlog.h>\n") == 1);
  REQUIRE(broken("lib/cuda/a.cpp", "#include <spdlog/spdlog.h>\n") == 1);
  REQUIRE(broken("apps/fftune/search/sweep_device.cpp", "#include <mpi.h>\n") == 1);
  REQUIRE(broken("lib/store/json_value.cpp", "#include <nlohmann/json.hpp>\n") == 0);
  REQUIRE(broken("lib/store/a.cpp", "#include <nlohmann/json.hpp>\n") == 1);
  REQUIRE(broken("tuning/tuner.cpp", "#include <nlohmann/json.hpp>\n") == 1);
  REQUIRE(broken("lib/cuda/a.cpp", "#include <cuda.h>\n#include <nvrtc.h>\n") == 0);
  for (const char* header : {"cuda.h", "cuda_runtime.h", "nvrtc.h", "cublasLt.h"}) {
    CAPTURE(header);
    REQUIRE(broken("lib/runtime/a.cpp", std::string("#include <") + header + ">\n") == 1);
  }
  REQUIRE(broken("lib/runtime/a.cpp", "#include \"cuda/open.hpp\"\n") == 0);
  REQUIRE(broken("lib/verify/a.cpp", "#include <cblas.h>\n") == 1);
}

TEST_CASE("device sources include device sources alone") {
  REQUIRE(broken("kernels/ffn/a.cu", "#include \"common/mma.cuh\"\n") == 0);
  REQUIRE(broken("kernels/gemm/a.cuh", "#include \"gemm/tile.cuh\"\n") == 0);
  for (const char* include : {"<cstdint>", "<cuda_bf16.h>", "\"core/config.hpp\"",
                              "\"common/mma.hpp\"", "\"ffn/other.cuh\"", "\"mma.cuh\""}) {
    CAPTURE(include);
    REQUIRE(broken("kernels/ffn/a.cu", std::string("#include ") + include + "\n") == 1);
  }
}

TEST_CASE("the environment is read, and the process left, in one place") {
  REQUIRE(broken("lib/runtime/environment.cpp", "auto x = std::getenv(\"HOME\");") == 0);
  REQUIRE(broken("lib/store/a.cpp", "auto x = std::getenv(\"HOME\");") == 1);
  REQUIRE(broken("lib/store/a.cpp", "auto x = secure_getenv(\"HOME\");") == 1);
  REQUIRE(broken("lib/store/a.cpp", "// std::getenv(\"HOME\")\n") == 0);
  REQUIRE(broken("apps/fftune/main.cpp", "std::exit(3);") == 0);
  REQUIRE(broken("apps/fftune/terminal/interrupt.cpp", "_exit(130);") == 0);
  for (const char* call : {"exit(1);", "std::abort();", "_exit(1);", "std::quick_exit(1);"}) {
    CAPTURE(call);
    REQUIRE(broken("apps/fftune/tune.cpp", call) == 1);
  }
}

TEST_CASE("files are opened in one place") {
  for (const char* line :
       {"std::ifstream in(path);", "int f = ::open(path, O_RDONLY | O_CLOEXEC);",
        "openat(folder, name, O_RDWR);", "auto* f = std::fopen(path, \"rb\");",
        "std::ofstream(path) << text;", "void* p = mmap(nullptr, n, PROT_READ, MAP_SHARED, f, 0);",
        "mkstemp(name);", "std::filesystem::copy_file(a, b);"}) {
    CAPTURE(line);
    CHECK(broken("lib/store/a.cpp", line) == 1);
    CHECK(broken("apps/fftune/a.cpp", line) == 1);
    CHECK(broken("tuning/journal/a.cpp", line) == 1);
    CHECK(broken("lib/core/file_access.cpp", line) == 0);
  }
  CHECK(broken("lib/store/a.cpp", "// an ifstream\nauto library = SharedLibrary::open(name);") ==
        0);
}

TEST_CASE("the library names no op") {
  REQUIRE(broken("lib/runtime/a.cpp", "if (op == \"ffn\") return;") == 1);
  REQUIRE(broken("lib/runtime/a.cpp", "// the op \"ffn\"\n") == 0);
  REQUIRE(broken("lib/saved/inputs.cpp", "if (op == \"ffn\") return;") == 1);
  REQUIRE(broken("lib/saved/names.cpp", "return {\"ffn\"};") == 0);
  REQUIRE(broken("kernels/ffn/ffn.cpp", "return \"ffn\";") == 0);
}
