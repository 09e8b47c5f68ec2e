// --help and fftune/ops.h: they are what the registry says.

#include <sstream>
#include <string>

#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune::testing;

TEST_CASE("fftune/ops.h is current: the target ops_header writes it") {
  const Finished done = Sandbox().fftune("--ops-header");
  REQUIRE(done.code == 0);
  CHECK(fftune::testing::text_of(FFTUNE_SOURCE_DIR "/lib/include/fftune/ops.h") == done.out);
}

TEST_CASE("fftune/ops.h tells every extent but those of views") {
  std::istringstream lines(fftune::testing::text_of(FFTUNE_SOURCE_DIR "/lib/include/fftune/ops.h"));
  std::string line, form;
  int extents = 0;
  while (std::getline(lines, line)) {
    if (line.find("with ") != std::string::npos) form = line;
    if (line.find("Pass ") != std::string::npos) form.clear();
    extents += line.find('[') != std::string::npos;
    const bool of_view = form.find("-row:") != std::string::npos ||
                         form.find("-outer:") != std::string::npos ||
                         form.find("-head:") != std::string::npos;
    INFO(form << " " << line);
    CHECK((of_view || line.find("[?") == std::string::npos));
    CHECK(line.find(", ?") == std::string::npos);
    CHECK(line.size() <= 100);
  }
  CHECK(extents > 200);
}

TEST_CASE("fftune/ops.h has what the registry says of ops with unusual extents") {
  const std::string header =
      fftune::testing::text_of(FFTUNE_SOURCE_DIR "/lib/include/fftune/ops.h");
  // By hand, from the documentation of the ops.
  for (const char* row :
       {"3  w_down  input   T  [d, h]", "x_scale       input   f32   [1]", "[experts, h, d]",
        "3  pages  input  i32  [b, ceil(s / page)]", "[m * top-k, h]", "updated  T    [b, vocab]",
        "mask_bits   output  i32  [b, 1, s, 4 * ceil(kv / 128)]", "offsets  input   i32  [b + 1]",
        "gate_up  input  T  [m, 2 * h]"}) {
    INFO(row);
    CHECK(header.find(row) != std::string::npos);
  }
}

TEST_CASE("the reference has the help of every command, and nothing else") {
  const Finished done = Sandbox().fftune("--reference");
  REQUIRE(done.code == 0);
  std::string page = done.out.substr(0, done.out.find("\n## "));
  CHECK(page.rfind("# The command line\n", 0) == 0);
  std::size_t commands = 0;
  std::istringstream lines(done.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("## `fftune", 0) != 0) continue;
    const std::string path = line.substr(4, line.size() - 5);  // "fftune list ffn"
    const bool root = path == "fftune";
    page += "\n" + line + "\n\n```\n" +
            Sandbox().fftune((root ? "" : path.substr(7) + " ") + "--help").out + "```\n";
    ++commands;
  }
  CHECK(commands > 90);
  CHECK(page == done.out);
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

TEST_CASE("one JSON object has the same: --version --json") {
  const Finished done = Sandbox().fftune("--version --json");
  CHECK(done.code == 0);
  const auto document = json_of(done.out);
  CHECK(document.at("fftune") == FFTUNE_VERSION);
  std::string lines;
  const auto ordered = nlohmann::ordered_json::parse(done.out);
  for (const auto& [name, version] : ordered.items())
    lines += name + " " + version.get<std::string>() + "\n";
  CHECK(lines == Sandbox().fftune("--version").out);
  const Finished alone = Sandbox().fftune("--json");
  CHECK(alone.code == 2);
  CHECK(alone.err.find("--version") != std::string::npos);
}
