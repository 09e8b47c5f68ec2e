// Plans for any number of tokens: which recipe serves which, and what choosing costs.
#include "runtime/token_plan.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <string>

#include "core/error.hpp"
#include "device/host_threads.hpp"
#include "kernels/ffn/ffn.hpp"
#include "registry/catalog.hpp"
#include "runtime/plan.hpp"
#include "store/example.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "support/seconds.hpp"
#include "support/temporary_folder.hpp"
#include "support/toy_op.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem layer(std::int64_t m) {
  return {"ffn", "fwd", DType::bf16, {{"m", m}, {"d", 1024}, {"h", 2048}}, {{"act", "silu"}}};
}

DeviceFacts hopper() {
  return facts_of_architecture("sm_90a");
}

/// The op's defaults at two token counts, as records.
PresetLibrary records_at(const std::vector<std::int64_t>& tokens,
                         const testing::TemporaryFolder& folder) {
  const auto facts = hopper();
  std::vector<PresetRecord> records;
  for (const auto m : tokens) {
    auto record = example::record(layer(m));
    const Recipe usual = default_recipe(ffn_op(), layer(m), facts);
    REQUIRE(usual.size() == record.stages.size());
    for (std::size_t i = 0; i < usual.size(); ++i) record.stages[i].variant = usual[i];
    records.push_back(record);
  }
  merge_preset_records(
      folder.path(), {facts.slug(), facts.name, facts.kind, facts.arch, facts.multiprocessors, {}},
      "ffn", records);
  return PresetLibrary::load({folder.path()});
}

/// Compiles every program to nothing, and counts.
class CountingBackend final : public HostBackend {
 public:
  explicit CountingBackend(DeviceFacts facts = {}) {
    if (!facts.name.empty()) facts_of_test = facts;
  }
  const DeviceFacts& facts() const override {
    return facts_of_test.name.empty() ? HostBackend::facts() : facts_of_test;
  }
  CompileResult compile(const Program& program) override {
    ++compiled;
    const auto bytes = workspace_bytes(program);
    return {std::make_shared<HostExecutable>([](void* const*, void*) {}, bytes), {}};
  }
  DeviceFacts facts_of_test;
  std::atomic<int> compiled{0};
};

Catalog toy_catalog(const Op& op) {
  return {{&op}, builtin_catalog().sources};
}

}  // namespace

TEST_CASE("segments cover every number of tokens, and a record serves its own") {
  const testing::TemporaryFolder folder;
  const std::vector<std::int64_t> recorded{64, 1024, 4096};
  const auto presets = records_at(recorded, folder);
  const auto segments = token_segments(builtin_catalog(), ffn_op(), layer(5000), hopper(), presets);
  std::int64_t next = 1;
  for (const auto& segment : segments) {
    CHECK(segment.first == next);
    CHECK(segment.last >= segment.first);
    next = segment.last + 1;
  }
  CHECK(next == 5001);
  for (const auto m : recorded) {
    const auto segment = std::find_if(segments.begin(), segments.end(),
                                      [&](const TokenSegment& each) { return m <= each.last; });
    REQUIRE(segment != segments.end());
    CHECK(segment->choice.recipe ==
          choose(builtin_catalog(), ffn_op(), layer(m), hopper(), presets).recipe);
  }
}

TEST_CASE("between two records the cost model decides, at one place") {
  const testing::TemporaryFolder folder;
  const auto presets = records_at({1024, 2048}, folder);
  const auto facts = hopper();
  const auto segments = token_segments(builtin_catalog(), ffn_op(), layer(2048), facts, presets);
  const auto second = std::find_if(segments.begin(), segments.end(),
                                   [](const TokenSegment& each) { return each.first > 1024; });
  REQUIRE(second != segments.end());
  const auto first = std::prev(second);
  const auto estimate = [&](const TokenSegment& segment, std::int64_t m) {
    return estimate_of(ffn_op(), layer(m), facts, segment.choice.recipe).value();
  };
  CAPTURE(second->first);
  CHECK(estimate(*second, second->first) < estimate(*first, second->first));
  CHECK(estimate(*first, second->first - 1) <= estimate(*second, second->first - 1));
}

TEST_CASE("a choice that does not serve all of its range is left to another there") {
  // With 114 SMs, tiles of 72 rows are for those numbers of tokens that fill waves with them.
  for (const auto& facts : products_of_architecture("sm_90a")) {
    const auto segments = token_segments(builtin_catalog(), ffn_op(), layer(600), facts, {});
    std::int64_t next = 1;
    for (const auto& segment : segments) {
      CHECK(segment.first == next);
      next = segment.last + 1;
      for (auto m = segment.first; m <= segment.last; ++m)
        for (const auto& variant : segment.choice.recipe)
          if (const auto reason = illegality(ffn_op(), layer(m), facts, variant); !reason.empty())
            FAIL(facts.name << ", m=" << m << ": " << reason);
    }
    CHECK(next == 601);
  }
}

TEST_CASE("a plan for any tokens compiles at once, and then each number is found at once") {
  CountingBackend backend;
  const ToyOp op;
  const TokenPlan plan(toy_catalog(op), backend, op, ToyOp::problem(DType::f32, 1000, 4, 4), {});
  const int before = backend.compiled;
  CHECK(before >= 1);
  void* buffers[4] = {};
  std::vector<std::byte> workspace(plan.workspace_bytes());
  plan.run(17, buffers, workspace.data(), nullptr);
  const int after_one = backend.compiled;
  plan.run(17, buffers, workspace.data(), nullptr);
  CHECK(backend.compiled == after_one);
  plan.prepare(18);
  CHECK(backend.compiled > after_one);
  CHECK_THROWS_AS(plan.prepare(1001), Error);
  CHECK_THROWS_AS(plan.prepare(0), Error);

  for (std::int64_t m = 1; m <= 1000; ++m) plan.prepare(m);
  const auto run_all = [&] {
    for (std::int64_t m = 1; m <= 1000; ++m) plan.run(m, buffers, workspace.data(), nullptr);
  };
  // Microseconds of one of a thousand.
  const double best =
      least_time_of(0.2 * slowness, [&] { return 1e3 * processor_seconds_of(run_all); });
  WARN("TokenPlan::run of a prepared number of tokens: " << best << " us");
  CHECK(best < 0.2 * slowness);
}

TEST_CASE("the workspace is enough for every number of tokens") {
  CountingBackend backend(hopper());
  for (const std::int64_t most : {1, 16, 300}) {
    const TokenPlan plan(builtin_catalog(), backend, ffn_op(), layer(most), {});
    for (std::int64_t m = 1; m <= most; ++m) CHECK_NOTHROW(plan.prepare(m));
  }
}

TEST_CASE("running compiles no kernel that making the plan has not") {
  // The kernels of every op with at most as many tokens, as the backend is given them.
  class KernelBackend final : public HostBackend {
   public:
    KernelBackend() : facts_(hopper()) {}
    const DeviceFacts& facts() const override { return facts_; }
    CompileResult compile(const Program& program) override {
      const std::lock_guard lock(mutex_);
      for (const auto& kernel : program.kernels) kernels.insert(kernel.file + kernel.expression);
      return {
          std::make_shared<HostExecutable>([](void* const*, void*) {}, workspace_bytes(program)),
          {}};
    }
    std::set<std::string> kernels;

   private:
    DeviceFacts facts_;
    std::mutex mutex_;
  };
  for (const Op* op : builtin_catalog().ops) {
    Problem problem{std::string(op->name()), op->passes().front(), DType::bf16, {}, {}};
    problem.dtype = op->dtypes_of_pass(DeviceKind::cuda, problem.pass).front();
    for (const auto& size : op->sizes())
      if (!size.rare) problem.sizes[size.name] = size.example;
    problem.sizes[std::string(op->token_size())] = 600;
    problem = canonical(*op, problem, DeviceKind::cuda);
    KernelBackend backend;
    CAPTURE(op->name());
    const TokenPlan plan(builtin_catalog(), backend, *op, problem, {});
    const auto known = backend.kernels;
    for (std::int64_t m = 1; m <= 600; m += m < 40 ? 1 : 7) plan.prepare(m);
    CHECK(backend.kernels == known);
  }
}

TEST_CASE(
    "where rows are as long as there are tokens, each number has what a plan of its own has") {
  const auto facts = hopper();
  const Op& op = builtin_catalog().op("masked-softmax");
  const auto problem = [&](std::int64_t s) {
    return canonical(op,
                     {"masked-softmax", "fwd", DType::bf16, {{"s", s}, {"b", 2}, {"heads", 4}}, {}},
                     DeviceKind::cuda);
  };
  const testing::TemporaryFolder folder;
  auto record = example::record(problem(512));
  record.stages.resize(1);
  record.stages.front().stages = {"forward"};
  record.stages.front().variant = default_recipe(op, problem(512), facts).front();
  record.stages.front().variant.config.set("evict_first", 1);  // the default has 0
  merge_preset_records(
      folder.path(), {facts.slug(), facts.name, facts.kind, facts.arch, facts.multiprocessors, {}},
      "masked-softmax", {record});
  const auto presets = PresetLibrary::load({folder.path()});
  const auto most = problem(9000);
  const auto segments = token_segments(builtin_catalog(), op, most, facts, presets);
  REQUIRE(segments.size() == 3);
  CHECK(segments[1].first == 512);
  CHECK(segments[1].last == 512);
  CHECK(segments[0].each);
  CHECK_FALSE(segments[1].each);
  for (const std::int64_t s : {1, 7, 64, 511, 512, 513, 514, 4096, 8999}) {
    CAPTURE(s);
    const auto& segment = segments[s < 512 ? 0 : s == 512 ? 1 : 2];
    const auto recipe = recipe_at(op, most, facts, segment, s);
    const auto own = s == 512 ? record.recipe() : default_recipe(op, problem(s), facts);
    CHECK(recipe == own);
  }
  CountingBackend backend(facts);
  const TokenPlan plan(builtin_catalog(), backend, op, most, presets);
  CHECK(backend.compiled < 64);
  for (std::int64_t s = 1; s <= 9000; s += 13) CHECK_NOTHROW(plan.prepare(s));
}

TEST_CASE("a choice far from its record names the sizes") {
  const auto problem = [](std::int64_t m, std::int64_t d, std::int64_t h) {
    return Problem{"ffn", "fwd", DType::bf16, {{"m", m}, {"d", d}, {"h", h}}, {}};
  };
  const auto words = [&](const Problem& asked, const Problem& record) {
    return far_words(ffn_op(), asked, record);
  };
  const auto record = problem(1024, 1024, 2048);
  CHECK(words(problem(1024, 1024, 2048), record).empty());
  CHECK(words(problem(4096, 1024, 2048), record).empty());
  CHECK(words(problem(256, 2048, 1024), record).empty());
  CHECK(words(problem(8192, 1024, 2048), record) == "m is 8 times the record's");
  CHECK(words(problem(1024, 1024, 16), record) == "h is 1/128 of the record's");
  CHECK(words(problem(1, 4096, 2048), record) ==
        "d is 4 times the record's, m is 1/1024 of the record's");
}

TEST_CASE("a plan's kernels are compiled side by side") {
  if (HostThreads().max_threads() == 1) FFTUNE_SKIP("one core");
  // Each compilation waits until another one is there.
  class WaitingBackend final : public HostBackend {
   public:
    const DeviceFacts& facts() const override { return facts_; }
    CompileResult compile(const Program&) override {
      std::unique_lock lock(mutex_);
      together = std::max(together, ++inside_);
      came_.notify_all();
      came_.wait_for(lock, std::chrono::seconds(5), [&] { return together > 1; });
      --inside_;
      return {std::make_shared<HostExecutable>([](void* const*, void*) {}, 0), {}};
    }
    int together = 0;

   private:
    DeviceFacts facts_ = hopper();
    std::mutex mutex_;
    std::condition_variable came_;
    int inside_ = 0;
  };
  WaitingBackend backend;
  const Recipe recipe = default_recipe(ffn_op(), layer(16), hopper());
  REQUIRE(recipe.size() > 1);
  const Plan plan(backend, ffn_op(), layer(16), recipe);
  CHECK(backend.together > 1);
}
