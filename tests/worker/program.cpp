// The program of these tests that is not the test: a worker, or a sweep with its supervisor.
//   worker WAY                  serves on the CPU
//   slow WAY, throttled WAY     the same, 1.3 times slower: always, or from some time on
//   leaving WAY ID              the same for a while; whoever comes after it under this id cannot
//   idle WAY ID                 the same, but that it leaves before it does anything
//   gpu WAY ORDINAL             serves on this GPU
//   vanishing WAY ORDINAL ID    the same; whoever comes after it under this id sees no GPU
//   sweep WAY STATE RESULT      searches, always with --resume, and writes the winner to RESULT
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "cuda/open.hpp"
#include "tuning/journal/journal.hpp"
#include "tuning/journal/quarantine.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/serve.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;

int main(int count, char** words) {
  if (count < 3) return 2;
  const std::string role = words[1], way = words[2];
  const auto& sources = test::misbehaving_sources();
  const test::MisbehavingOp op(way);
  const Catalog catalog{{&op}, &sources};
  if (role == "worker") return serve_worker(catalog, 1, test::open_quick_cpu);
  if (role == "slow")
    return serve_worker(catalog, 1, [] { return test::open_paced_cpu([](int) { return 1.3; }); });
  if (role == "throttled")
    return serve_worker(catalog, 1, [] {
      return test::open_paced_cpu([](int samples) { return samples < 60 ? 1 : 1.3; });
    });
  if (role == "leaving" || role == "idle") {
    if (std::ifstream(words[3])) return 1;
    std::ofstream(words[3]) << "was here";
    if (role == "idle")
      return serve_worker(
          catalog, 1, [] { return test::open_paced_cpu([](int) { return 1; }, [] { _exit(1); }); });
    return serve_worker(catalog, 1, [] {
      return test::open_paced_cpu([](int samples) {
        if (samples > 60) _exit(1);
        return 1;
      });
    });
  }
  const auto open_gpu = [&] { return open_cuda(std::stoi(words[3]), sources, {}); };
  if (role == "gpu") return serve_worker(catalog, 1, open_gpu);
  if (role == "vanishing") {
    if (std::ifstream(words[4])) setenv("CUDA_VISIBLE_DEVICES", "", 1);
    std::ofstream(words[4]) << "was here";
    return serve_worker(catalog, 1, open_gpu);
  }
  if (role == "nonsense") {
    LineChannel(worker_channel_descriptor).send("{\"reply\": \"done\", \"value\": 7}");
    return 0;
  }
  if (count < 5) return 2;
  WorkerEvaluator evaluator({"/proc/self/exe", "worker", way});
  auto journal = Journal::open(words[3], evaluator.facts(), "toy", true);
  Quarantine quarantine(words[3], evaluator.facts());
  TuneOptions options;
  options.journal = &journal;
  options.quarantine = &quarantine;
  options.budget_seconds = 3600;
  const auto result = tune(catalog, evaluator, test::misbehaving_problem(), options);
  if (!result.record) return 1;
  std::ofstream(words[4]) << result.record->stages[0].variant.id() << " "
                          << result.record->stages[0].failed;
  return 0;
}
