// Memory of a supervisor during a sweep of ten thousand variants.
#include <unistd.h>

#include <fstream>
#include <vector>

#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "tuning/journal/journal.hpp"
#include "tuning/tuner.hpp"
#include "tuning/worker/worker_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

double resident_mib() {
  std::ifstream statm("/proc/self/statm");
  double pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

/// The memory at each thousandth variant that was screened.
struct MemorySink : ProgressSink {
  void update(const Progress& progress) override {
    if (progress.phase != Phase::screen) return;
    while (progress.done >= 1000 * static_cast<int>(mib.size() + 1)) mib.push_back(resident_mib());
  }
  std::vector<double> mib;
};

}  // namespace

TEST_CASE("the memory of a supervisor is flat over a sweep of ten thousand variants") {
  const testing::TemporaryFolder folder;
  const SourceSet no_sources{{}};
  const MisbehavingOp op("crowd");
  const Catalog catalog{{&op}, &no_sources};
  WorkerEvaluator evaluator({WORKER_OF_TESTS, "worker", "crowd"});
  auto journal = Journal::open(folder.path(), evaluator.facts(), "toy", false);
  MemorySink sink;
  TuneOptions options;
  options.journal = &journal;
  options.progress = &sink;
  options.budget_seconds = 3600;
  const auto result = tune(catalog, evaluator, misbehaving_problem(), options);
  REQUIRE(result.record);
  CHECK(result.record->stages[0].measured == crowd_variants);
  REQUIRE(sink.mib.size() == 10);
  INFO(sink.mib.front() << " MiB after a thousand, " << sink.mib.back() << " MiB at the end");
#ifndef __SANITIZE_ADDRESS__  // which keeps what is freed
  // A variant leaves its samples and its bits behind: some hundred bytes.
  CHECK(sink.mib.back() - sink.mib.front() < 9 * 1000 * 400.0 / (1 << 20) + 2);
#endif
}
