#include "tuning/journal/quarantine.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using fftune::testing::TemporaryFolder;

namespace {

DeviceFacts facts_of(const std::string& driver) {
  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.name = "Some Device";
  facts.driver = driver;
  return facts;
}

Problem problem_of(const std::string& op, std::int64_t m = 1) {
  Problem problem;
  problem.op = op;
  problem.pass = "fwd";
  problem.sizes = {{"m", m}};
  return problem;
}

}  // namespace

TEST_CASE("a variant stays in quarantine for its problem, device, driver and sources alone") {
  const TemporaryFolder folder;
  Quarantine(folder.path(), facts_of("1"))
      .add(problem_of("ffn"), "f/p=1", "hash", "killed by SIGSEGV");
  const Quarantine later(folder.path(), facts_of("1"));
  REQUIRE(later.find(problem_of("ffn"), "f/p=1", "hash"));
  CHECK(later.find(problem_of("ffn"), "f/p=1", "hash")->cause == "killed by SIGSEGV");
  CHECK_FALSE(later.find(problem_of("ffn", 2), "f/p=1", "hash"));
  CHECK(later.of(problem_of("ffn", 2)).empty());
  CHECK(later.of(problem_of("ffn")).size() == 1);
  CHECK_FALSE(later.find(problem_of("ffn"), "f/p=1", "other"));
  CHECK_FALSE(later.find(problem_of("rope"), "f/p=1", "hash"));
  CHECK_FALSE(later.find(problem_of("ffn"), "f/p=2", "hash"));
  CHECK(later.of("ffn").size() == 1);
  CHECK(Quarantine(folder.path(), facts_of("2")).of("ffn").empty());
}

TEST_CASE("it is let out, and a torn line costs itself alone") {
  const TemporaryFolder folder;
  Quarantine quarantine(folder.path(), facts_of("1"));
  quarantine.add(problem_of("ffn"), "f/p=1", "hash", "hung");
  std::ofstream(quarantine.path(), std::ios::app) << "{\"op\": \"ffn\", \"id";
  quarantine.add(problem_of("ffn"), "f/p=2", "hash", "hung");
  CHECK(Quarantine(folder.path(), facts_of("1")).of("ffn").size() == 2);
  quarantine.release(problem_of("ffn"), "f/p=1", "hash");
  CHECK_FALSE(quarantine.find(problem_of("ffn"), "f/p=1", "hash"));
  CHECK(Quarantine(folder.path(), facts_of("1")).of("ffn").size() == 1);
}

TEST_CASE("sixteen processes write one quarantine and nothing is lost") {
  const TemporaryFolder folder;
  for (int process = 0; process < 16; ++process) {
    if (fork() != 0) continue;
    Quarantine own(folder.path(), facts_of("1"));
    for (int i = 0; i < 20; ++i)
      own.add(problem_of("ffn"), "f/p=" + std::to_string(process * 20 + i), "hash", "hung");
    _exit(0);
  }
  int status = 0;
  while (wait(&status) > 0) CHECK(status == 0);
  CHECK(Quarantine(folder.path(), facts_of("1")).of("ffn").size() == 320);
}

TEST_CASE("a quarantine that cannot be written ends nothing") {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "file") << "";
  Quarantine quarantine(folder.path() / "file", facts_of("1"));
  quarantine.add(problem_of("ffn"), "f/p=1", "hash", "hung");
  CHECK(quarantine.find(problem_of("ffn"), "f/p=1", "hash"));
}

TEST_CASE("a variant that was quarantined under old names of its parameters is found by today's") {
  const TemporaryFolder folder;
  Quarantine(folder.path(), facts_of("1"))
      .add(problem_of("ffn"), "down_sm90/bm=128,schedule=2,consumers=1", "hash",
           "killed by SIGSEGV");
  const std::string id = "down_sm90/bm=128,schedule=swap_ab,mma_warpgroups=1";
  Quarantine quarantine(folder.path(), facts_of("1"));
  REQUIRE(quarantine.find(problem_of("ffn"), id, "hash"));
  quarantine.release(problem_of("ffn"), id, "hash");
  CHECK(Quarantine(folder.path(), facts_of("1")).of("ffn").empty());
}

TEST_CASE("an entry of before problems were named holds nobody") {
  const TemporaryFolder folder;
  const Quarantine quarantine(folder.path(), facts_of("1"));
  std::filesystem::create_directories(quarantine.path().parent_path());
  std::ofstream(quarantine.path())
      << R"({"op":"ffn","id":"f/p=1","sources":"hash","driver":"1","date":"","cause":"hung",)"
      << "\"released\":false}\n";
  CHECK(Quarantine(folder.path(), facts_of("1")).of("ffn").empty());
}
