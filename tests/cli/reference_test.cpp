// docs/cli.md is what --help says.
#include "sandbox.hpp"
#include "support/catch.hpp"

using fftune::testing::Finished;
using fftune::testing::Sandbox;

TEST_CASE("docs/cli.md is current: the target cli_reference writes it") {
  const Finished done = Sandbox().fftune("--reference");
  REQUIRE(done.code == 0);
  CHECK(fftune::testing::text_of(FFTUNE_SOURCE_DIR "/docs/cli.md") == done.out);
}

TEST_CASE("help is good at every level, and documents the exit codes") {
  const Sandbox sandbox;
  for (const char* words : {"--help", "-h", "ffn --help", "list ffn --help", "presets --help",
                            "presets diff -h", "check --help", "bench ffn --help"}) {
    const Finished done = sandbox.fftune(words);
    INFO(words);
    CHECK(done.code == 0);
    CHECK(done.err.empty());
    CHECK(done.out.find("Exit codes: 0 good") != std::string::npos);
  }
}

TEST_CASE("the version page names fftune and its libraries") {
  const Finished done = Sandbox().fftune("--version");
  CHECK(done.code == 0);
  CHECK(done.out.rfind("fftune " FFTUNE_VERSION "\n", 0) == 0);
  for (const char* library : {"CLI11", "fmt", "nlohmann-json", "spdlog"})
    CHECK(done.out.find(library) != std::string::npos);
}
