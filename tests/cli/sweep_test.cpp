// From a search to a preset to a check, on the CPU.
#include <sys/resource.h>

#include <chrono>
#include <csignal>
#include <sstream>
#include <string>
#include <thread>

#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune::testing;
using nlohmann::json;

TEST_CASE("tune writes a preset that is valid and passes the check") {
  const Sandbox sandbox;
  const Finished tuned =
      sandbox.fftune("ffn --d 32 --h 64 --m 1,4 --device cpu --budget 6s --max-variants 6 --json");
  INFO(tuned.err);
  REQUIRE(tuned.code == 0);
  const json document = json_of(tuned.out);
  CHECK(document.at(0).at("problems").size() == 2);
  const auto path = sandbox.preset_file();
  REQUIRE_FALSE(path.empty());
  CHECK(document.at(0).at("files").at(0).get<std::string>().find("ffn.json") != std::string::npos);

  const Finished valid = sandbox.fftune("presets validate");
  INFO(valid.out);
  CHECK(valid.code == 0);
  CHECK(valid.out.find("1 file, 2 readable records, 0 faults") != std::string::npos);

  const Finished checked = sandbox.fftune("check --device cpu --report report.xml -v");
  INFO(checked.out << checked.err);
  CHECK(checked.code == 0);
  CHECK(checked.out.find("2 records: 2 passed, 0 failed, 0 skipped") != std::string::npos);
  const std::string report = text_of(sandbox.folder() / "report.xml");
  CHECK(report.find("failures=\"0\"") != std::string::npos);
  // 1 and 4 with their neighbours, each once: 1, 2, 3, 4, 5.
  CHECK(report.find("tests=\"5\"") != std::string::npos);

  const Finished filtered = sandbox.fftune("check --device cpu --m 4 --seeds 1 --json");
  CHECK(filtered.code == 0);
  CHECK(json_of(filtered.out).at("records").size() == 1);
  CHECK(sandbox.fftune("check --device cpu --m 5").code == 2);
  CHECK(sandbox.fftune("check --device cpu --op nothing").code == 2);
}

TEST_CASE("the table tells winner, time and roofline; quiet leaves stderr empty") {
  const Sandbox sandbox;
  const Finished done =
      sandbox.fftune("ffn --d 32 --h 64 --m 2 --device cpu --budget 4s --max-variants 4 -q");
  INFO(done.err);
  REQUIRE(done.code == 0);
  CHECK(done.err.empty());
  for (const char* word : {"median µs", "roofline", "vs unfused", "winner", "wrote presets/"})
    CHECK(done.out.find(word) != std::string::npos);
}

TEST_CASE("notes on several element types say which they are of") {
  const Sandbox sandbox;
  // So little is tried that every problem has a note.
  const Finished done = sandbox.fftune(
      "ffn --d 32 --h 64 --m 1 --dtype f32,bf16 --device cpu --max-variants 1 --budget 2s "
      "--wait 0s --progress none");
  INFO(done.out);
  REQUIRE(done.code == 0);
  CHECK(done.out.find("\nm=1 f32,1 bf16: ended early") != std::string::npos);
}

TEST_CASE("a second sweep adds to the file of the first") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  CHECK(sandbox.tuned("8") == path);
  CHECK(json_of(sandbox.fftune("presets show --json").out).at(0).at("records").size() == 2);
}

TEST_CASE("bench puts the plan beside the floor and the baselines") {
  const Sandbox sandbox;
  const Finished done =
      sandbox.fftune("bench ffn --d 32 --h 64 --m 2 --device cpu --samples 3 --budget 1s --json");
  INFO(done.err);
  REQUIRE(done.code == 0);
  const json problem = json_of(done.out).at("problems").at(0);
  CHECK(problem.at("floor_us").get<double>() > 0);
  REQUIRE(problem.at("entries").size() >= 2);
  CHECK(problem.at("entries").at(0).at("name") == "fftune");
  for (const json& entry : problem.at("entries")) CHECK(entry.at("median_us").get<double>() > 0);
}

TEST_CASE("Ctrl-C ends a search with 130 and keeps what is known") {
  using namespace std::chrono_literals;
  const Sandbox sandbox;
  sandbox.tuned("1");
  const auto search = sandbox.start(
      "ffn --d 256 --h 512 --m 3,64,65,66 --device cpu --budget 10m --progress plain");
  // It is at work once it tells a phase after the set-up.
  CHECK(search->says("screen"));
  search->send(SIGINT);
  const Finished done = search->wait();
  INFO(done.err);
  CHECK(done.code == 130);
  CHECK(done.err.find("interrupted") != std::string::npos);
  const Finished valid = sandbox.fftune("presets validate");
  INFO(valid.out);
  CHECK(valid.code == 0);
  // No fault of the record before, and no note but that other processes were at work.
  std::istringstream lines(valid.out);
  for (std::string line; std::getline(lines, line);)
    CHECK((line.find("m=1") == std::string::npos ||
           line.find("measured while disturbed: ") != std::string::npos));
}

TEST_CASE("Ctrl-C twice ends a search at once, in the middle of a variant") {
  using namespace std::chrono_literals;
  const Sandbox sandbox;
  // One pass takes long, and its verification longer.
  const auto search =
      sandbox.start("ffn --d 1024 --h 4096 --m 2048 --device cpu --budget 10m --progress plain");
  CHECK(search->says("screen"));
  search->send(SIGINT);
  CHECK(search->says("interrupted"));  // two signals that wait are one
  search->send(SIGINT);
  const auto sent = std::chrono::steady_clock::now();
  const Finished done = search->wait();
  INFO(done.err);
  CHECK(done.code == 130);
  CHECK(std::chrono::steady_clock::now() - sent < 5s);
  CHECK(done.err.find("what was known is written") == std::string::npos);
}

TEST_CASE("a sweep in this process finds what one in a worker finds, and leaves no worker behind") {
  const Sandbox sandbox;
  for (const char* more : {"", " --in-process"}) {
    CAPTURE(more);
    const Finished done = sandbox.fftune(
        std::string("ffn --d 32 --h 64 --m 2 --device cpu --budget 4s --max-variants 4 -v") + more);
    INFO(done.err);
    CHECK(done.code == 0);
    const bool worked = done.err.find("a worker process is ready") != std::string::npos;
    CHECK(worked == (*more == '\0'));
  }
  // Nothing is listed in quarantine on a device where all went well.
  const Finished listed =
      sandbox.fftune("list ffn --device cpu --d 32 --h 64 --m 2 --explain --json");
  CHECK(json_of(listed.out).at("quarantined").empty());
}

TEST_CASE("a search may take its routing from a file, and a check does again") {
  const Sandbox sandbox;
  fftune::testing::write_text(sandbox.folder() / "data" / "ids.txt", "0 1\n3, -1\n0 2\n");
  const Finished tuned = sandbox.fftune(
      "moe-ffn --d 32 --h 16 --m 4 --experts 4 --top-k 2 --routing file:data/ids.txt --device cpu "
      "--budget 4s --max-variants 2 --json");
  INFO(tuned.out << tuned.err);
  REQUIRE(tuned.code == 0);
  const auto file = json_of(tuned.out).at(0).at("files").at(0).get<std::string>();
  const json preset = json_of(text_of(sandbox.folder() / file));
  CHECK(preset.at("records").at(0).at("problem").at("routing") == "file:data/ids.txt");
  const Finished checked = sandbox.fftune("check --device cpu --seeds 1");
  INFO(checked.out << checked.err);
  CHECK(checked.code == 0);
  CHECK(checked.out.find("routing=file:data/ids.txt") != std::string::npos);
  std::filesystem::remove(sandbox.folder() / "data" / "ids.txt");
  const Finished without = sandbox.fftune("check --device cpu --seeds 1");
  INFO(without.out << without.err);
  CHECK(without.code == 0);
  CHECK(without.err.find("data/ids.txt is not there") != std::string::npos);
}

TEST_CASE("a check has the lengths of each number of tokens") {
  const Sandbox sandbox;
  for (const char* of : {"--lengths yes", "--layout thd"}) {
    const Finished tuned = sandbox.fftune(
        "attention --s 9 --b 2 --heads 1 --dim 8 --device cpu --budget 2s --max-variants 1 " +
        std::string(of));
    INFO(tuned.err);
    REQUIRE(tuned.code == 0);
  }
  const Finished checked = sandbox.fftune("check --device cpu --seeds 1");
  INFO(checked.out << checked.err);
  CHECK(checked.code == 0);
  CHECK(checked.out.find("2 records: 2 passed") != std::string::npos);
}

TEST_CASE("list --explain names what is quarantined for the sources as they are") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  // As the sweep's journal spells the winner: its parameters in their order.
  const auto preset = nlohmann::ordered_json::parse(text_of(sandbox.preset_file()));
  const auto stage = preset.at("records").at(0).at("stages").at(0);
  std::string id = stage.at("family").get<std::string>();
  char mark = '/';
  for (const auto& [name, value] : stage.at("parameters").items()) {
    id += mark + name + "=" + std::to_string(value.get<long>());
    mark = ',';
  }
  const auto state = sandbox.folder() / ".local/state/fftune";
  const auto own = sandbox.preset_file().parent_path().filename();
  json line{{"op", "ffn"},
            {"id", id},
            {"problem", "ffn/fwd f32 act=silu d=32 h=64 m=1"},
            {"driver", ""},
            {"sources", stage.at("source_hash").get<std::string>()},
            {"date", "now"},
            {"cause", "killed by SIGSEGV"},
            {"released", false}};
  json stale = line;
  stale["sources"] = "of another day";
  stale["id"] = "cpu_plain/of=1";
  fftune::testing::write_text(state / own / "quarantine.jsonl",
                              line.dump() + "\n" + stale.dump() + "\n");
  const Finished listed = sandbox.fftune("list ffn --device cpu --d 32 --h 64 --m 1 --explain");
  INFO(listed.out);
  CHECK(listed.out.find("killed by SIGSEGV") != std::string::npos);
  CHECK(listed.out.find("cpu_plain/of=1") == std::string::npos);

  // A sweep does not run it, until it is asked to.
  const std::string sweep = "ffn --d 32 --h 64 --m 1 --device cpu --budget 30s -v --json";
  const auto winner = [&](const Finished& done) {
    INFO(done.err);
    REQUIRE(done.code == 0);
    return text_of(sandbox.preset_file());
  };
  winner(sandbox.fftune(sweep));
  CHECK(sandbox.fftune("list ffn --device cpu --d 32 --h 64 --m 1 --explain").out.find(id) !=
        std::string::npos);
  const Finished retried = sandbox.fftune(sweep + " --retry-quarantined");
  winner(retried);
  INFO(retried.err);
  CHECK(sandbox.fftune("list ffn --device cpu --d 32 --h 64 --m 1 --explain --json")
            .out.find("SIGSEGV") == std::string::npos);
}

TEST_CASE("a disk that is full while a record is written leaves the old preset, and says so") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  const std::string before = text_of(path);
  rlimit old{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &old) == 0);
  // Stands for the full disk: no file grows past what there is. Children inherit it.
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit tight = old;
  tight.rlim_cur = before.size() + 100;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &tight) == 0);
  const Finished full =
      sandbox.fftune("ffn --d 32 --h 64 --m 8 --device cpu --budget 4s --max-variants 4 -q");
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  INFO(full.err);
  CHECK(full.code == 2);
  CHECK(text_of(path) == before);
  CHECK(full.err.find("free some space") != std::string::npos);
}
