// One search by several ranks of this machine.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>

#include "apps/fftune/search/sweep_device.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune::testing;
using nlohmann::json;

namespace {

/// Why it cannot be tested here; empty if it can.
std::string missing(const Sandbox& sandbox) {
  if (!std::filesystem::exists("/usr/bin/mpirun")) return "there is no /usr/bin/mpirun";
  const auto alone = sandbox.fftune(
      "ffn --d 32 --h 64 --m 1 --device cpu --budget 1s "
      "--max-variants 1 --launcher mpi --out alone");
  return alone.err.find("built without MPI") == alone.err.npos ? "" : "built without MPI";
}

std::unique_ptr<Process> start(const Sandbox& sandbox, const std::string& words) {
  // As root, as in a container, Open MPI asks for more than once.
  return sandbox.start_by({"/usr/bin/mpirun", "--oversubscribe", "--enable-recovery", "-n", "4"},
                          words, {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"});
}

/// The process of a rank that searches in this sandbox; 0 if there is none.
pid_t process_of(const Sandbox& sandbox, int rank) {
  const std::string environment = "OMPI_COMM_WORLD_RANK=" + std::to_string(rank);
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != name.npos) continue;
    const auto own = std::string(1, '\0') + text_of(entry.path() / "environ");
    const auto words = text_of(entry.path() / "cmdline");
    const bool ours = own.find(std::string(1, '\0') + environment + '\0') != own.npos &&
                      own.find("HOME=" + sandbox.folder().string() + '\0') != own.npos;
    if (ours && words.find("--launcher") != words.npos) return std::stoi(name);
  }
  return 0;
}

json document_of(const std::string& out) {
  return json_of(out.substr(out.find('[')));
}

}  // namespace

TEST_CASE("ranks that share a host deal its devices out, if there are enough") {
  using fftune::tool::part_of_host;
  const std::vector<std::string> all{"cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"};
  fftune::tool::MpiRank self;
  CHECK(part_of_host(self, all) == all);
  self.host_ranks = 2;
  CHECK(part_of_host(self, all) == std::vector<std::string>{"cuda:0", "cuda:2", "cuda:4"});
  self.on_host = 1;
  CHECK(part_of_host(self, all) == std::vector<std::string>{"cuda:1", "cuda:3"});
  self.host_ranks = 5;
  self.on_host = 4;
  CHECK(part_of_host(self, all) == std::vector<std::string>{"cuda:4"});
  self.host_ranks = 6;
  CHECK(part_of_host(self, all) == all);
}

TEST_CASE("four ranks make one search of it") {
  const Sandbox sandbox;
  if (const auto why = missing(sandbox); !why.empty()) FFTUNE_SKIP(why);
  const auto done = start(sandbox,
                          "ffn --d 64 --h 128 --m 4 --device cpu --launcher mpi --budget 30s "
                          "--max-variants 8 --json")
                        ->wait();
  INFO(done.out << done.err);
  REQUIRE(done.code == 0);
  const json document = document_of(done.out);
  REQUIRE(document.size() == 1);
  CHECK(document[0]["problems"].size() == 1);
  CHECK_FALSE(sandbox.preset_file().empty());
}

TEST_CASE("a rank that is killed leaves its part to the others") {
  const Sandbox sandbox;
  if (const auto why = missing(sandbox); !why.empty()) FFTUNE_SKIP(why);
  const auto process = start(sandbox,
                             "ffn --d 512 --h 1024 --m 16,64,128 --device cpu --launcher mpi "
                             "--strategy exhaustive --budget 20s --json");
  pid_t rank = 0;
  for (int tries = 0; tries < 200 && rank == 0; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    rank = process_of(sandbox, 2);
  }
  REQUIRE(rank != 0);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  REQUIRE(process->running());
  kill(rank, SIGKILL);
  const auto done = process->wait();
  INFO(done.out << done.err);
  CHECK(done.err.find("cpu of rank 2 is lost, and its part goes to the others") != done.err.npos);
  const json document = document_of(done.out);
  REQUIRE(document.size() == 1);
  for (const auto& problem : document[0]["problems"]) CHECK_FALSE(problem["record"].is_null());
}

TEST_CASE("a launcher that is none is bad input") {
  const Sandbox sandbox;
  const auto done = sandbox.fftune("ffn --d 32 --h 64 --device cpu --launcher none");
  CHECK(done.code == 2);
  CHECK(done.err.find("--launcher 'none'") != done.err.npos);
}
