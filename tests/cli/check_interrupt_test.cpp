// Ctrl-C while a check computes a reference, which may take minutes.
#include <atomic>

#include "apps/fftune/check/check.hpp"
#include "cpu/open.hpp"
#include "device/parallel.hpp"
#include "support/catch.hpp"
#include "support/safetensors.hpp"
#include "support/temporary_folder.hpp"
#include "support/toy_op.hpp"

using namespace fftune;
using namespace fftune::tool;
using fftune::test::ToyOp;
using fftune::testing::SafetensorsWriter;
using fftune::testing::TemporaryFolder;

namespace {

/// The user interrupts while its reference is computed.
class InterruptedOp final : public ToyOp {
 public:
  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    ToyOp::reference(problem, stage, tensors, parallel);
    cancel = true;
    parallel.run(1, 1, [&](int) { ++tasks; });
  }

  mutable std::atomic<bool> cancel{false};
  mutable int tasks = 0;
};

struct Interrupted {
  InterruptedOp op;
  SourceSet sources{{}};
  Catalog catalog{{&op}, &sources};
  std::unique_ptr<Backend> backend = open_cpu();
  StatusLine status{ProgressMode::none};
  CheckSettings settings{.seeds = 1, .cancel = &op.cancel, .status = &status};
  Problem problem = ToyOp::problem(DType::f32, 7, 16, 24);

  void require_not_run(const CheckOutcome& outcome) const {
    CHECK(op.tasks == 0);
    CHECK(outcome.state == CheckState::not_run);
    CHECK(outcome.reason.empty());
  }
};

}  // namespace

TEST_CASE("an interrupt ends the reference of a record's check") {
  const Interrupted test;
  const auto outcomes = run_checks({{.problem = test.problem, .tokens = {7}}}, test.catalog,
                                   *test.backend, PresetLibrary(), test.settings);
  REQUIRE(outcomes.size() == 1);
  test.require_not_run(outcomes.begin()->second);
}

TEST_CASE("an interrupt ends the reference of a saved layer's check") {
  const Interrupted test;
  const TemporaryFolder folder;
  SafetensorsWriter writer;
  writer.add("a", "F32", {24, 16}, std::vector<float>(24 * 16, 1));
  writer.add("b", "F32", {16, 24}, std::vector<float>(16 * 24, 1));
  writer.write(folder.path() / "model.safetensors");
  std::vector<SavedInputs> saved;
  saved.emplace_back(builtin_catalog(), test.op,
                     SavedValues{.weights = folder.path() / "model.safetensors", .map = "a=a,b=b"});
  const auto checks = check_saved({test.problem}, saved, test.catalog, *test.backend,
                                  PresetLibrary(), test.settings);
  REQUIRE(checks.size() == 1);
  test.require_not_run(checks.front().random.outcome);
  test.require_not_run(checks.front().saved.outcome);
}
