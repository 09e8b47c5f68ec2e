// The next id from logits: random problems against the reference, known rows, and the distribution
// of many draws.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "kernels/common/sampling.cuh"
#include "kernels/sample/sample.hpp"
#include "support/fuzz_cases.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem problem_of(DeviceKind kind, DType dtype, std::int64_t m, std::int64_t vocab,
                   Options options, std::int64_t best = 0) {
  std::map<std::string, std::int64_t> sizes{{"m", m}, {"vocab", vocab}};
  if (best > 0) sizes["best"] = best;
  return canonical(sample_op(), {"sample", "fwd", dtype, std::move(sizes), std::move(options)},
                   kind);
}

Problem random_problem(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [m, vocab] = draw.matrix(most_elements, sample::most_ids);
  Options options{{"choose", draw.of({"argmax", "sample", "filtered"})}};
  if (draw.below(2)) options["logprobs"] = "yes";
  if (draw.below(3) == 0) options["softcap"] = draw.of({"30", "8"});
  const std::int64_t best = draw.below(3) ? 0 : std::min<std::int64_t>(vocab, 1 + draw.below(40));
  return problem_of(kind, draw.of(sample_op().dtypes(kind)), m, vocab, options, best);
}

/// The tensors of a call on the CPU.
struct Call {
  std::vector<float> logits, temperature, top_p, min_p;
  std::vector<std::int64_t> seeds;
  std::vector<std::int32_t> steps, top_k, ids;
  std::vector<float> logit, logprob, best_logprobs;
  std::vector<std::int32_t> best_ids;

  Call(std::int64_t rows, std::vector<float> row)
      : temperature(static_cast<std::size_t>(rows), 1),
        top_p(temperature.size(), 1),
        min_p(temperature.size(), 0),
        seeds(temperature.size(), 7),
        steps(temperature.size()),
        top_k(temperature.size()),
        ids(temperature.size()),
        logit(temperature.size()),
        logprob(temperature.size()) {
    for (std::int64_t i = 0; i < rows; ++i) {
      logits.insert(logits.end(), row.begin(), row.end());
      steps[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
    }
  }

  void run(Options options, std::int64_t best = 0) {
    const auto backend = open_cpu();
    const auto rows = std::ssize(ids);
    options["logprobs"] = "yes";
    const Problem problem = problem_of(DeviceKind::cpu, DType::f32, rows, std::ssize(logits) / rows,
                                       std::move(options), best);
    best_ids.assign(static_cast<std::size_t>(rows * best), -1);
    best_logprobs.assign(best_ids.size(), 0);
    const Family& family = family_of(sample_op(), "cpu_choose");
    const auto compiled = backend->compile(family.program(problem, backend->facts(), {}));
    REQUIRE(compiled.report.failure == "");
    const std::map<std::string, void*> named{
        {"logits", logits.data()},     {"temperature", temperature.data()},
        {"seeds", seeds.data()},       {"steps", steps.data()},
        {"top_k", top_k.data()},       {"top_p", top_p.data()},
        {"min_p", min_p.data()},       {"ids", ids.data()},
        {"logit", logit.data()},       {"logprob", logprob.data()},
        {"best_ids", best_ids.data()}, {"best_logprobs", best_logprobs.data()}};
    std::vector<void*> tensors;
    for (const TensorSpec& tensor : sample_op().tensors(problem))
      tensors.push_back(named.at(tensor.name));
    std::vector<std::byte> workspace(compiled.executable->workspace_bytes() + 1);
    compiled.executable->enqueue(tensors.data(), workspace.data(), backend->stream());
    backend->synchronize();
  }
};

/// The probability that a chi-square variate with this number of degrees of freedom exceeds the
/// value, by Wilson and Hilferty.
double chi_square_tail(double value, double degrees) {
  const double z =
      (std::cbrt(value / degrees) - (1 - 2 / (9 * degrees))) / std::sqrt(2 / (9 * degrees));
  return 0.5 * std::erfc(z / std::sqrt(2.0));
}

/// Counts of ids have the expected distribution; ids with a probability of 0 are never drawn.
void check_distribution(const std::vector<std::int32_t>& ids, const std::vector<double>& expected) {
  std::vector<double> counts(expected.size());
  for (const std::int32_t id : ids) ++counts.at(static_cast<std::size_t>(id));
  double chi_square = 0, degrees = -1;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(i, counts[i], expected[i]);
    if (expected[i] == 0) {
      REQUIRE(counts[i] == 0);
      continue;
    }
    const double wanted = expected[i] * static_cast<double>(ids.size());
    chi_square += (counts[i] - wanted) * (counts[i] - wanted) / wanted;
    ++degrees;
  }
  CAPTURE(chi_square, degrees);
  CHECK(chi_square_tail(chi_square, degrees) > 1e-4);
  CHECK(chi_square_tail(chi_square, degrees) < 1 - 1e-4);
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature,
                            const std::vector<bool>& kept = {}) {
  std::vector<double> result(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i)
    if (kept.empty() || kept[i])
      sum += result[i] = std::exp(static_cast<double>(logits[i]) / temperature);
  for (double& value : result) value /= sum;
  return result;
}

constexpr std::int64_t draws = 1'000'000;

}  // namespace

TEST_CASE("sample: whole vocabularies are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(1);
  for (const std::int64_t vocab : {32000, 128256, 151936, 262144})
    for (const char* choose : {"argmax", "sample", "filtered"})
      for (const std::int64_t m : {1, 3, 64})
        verify_variants(*backend, sample_op(),
                        problem_of(DeviceKind::cuda, DType::bf16, m, vocab,
                                   {{"choose", choose}, {"logprobs", "yes"}}, m == 3 ? 20 : 0),
                        random, 0);
}

TEST_CASE("sample: a verification takes no other id, and none that there is not") {
  const auto backend = open_cpu();
  const Family& family = family_of(sample_op(), "cpu_choose");
  for (const char* choose : {"argmax", "sample", "filtered"})
    for (const std::int32_t other : {1, 99, -1000}) {
      const Problem problem = problem_of(DeviceKind::cpu, DType::f32, 3, 100, {{"choose", choose}});
      Program program = family.program(problem, backend->facts(), {});
      const auto ids = tensor_index(sample_op().tensors(problem), "ids");
      program.steps.emplace_back(HostFunction([=](const HostCall& call) {
        auto& id = static_cast<std::int32_t*>(call.tensors[ids])[1];
        id = other < 0 ? other : (id + other) % 100;
      }));
      Verifier verifier(*backend, sample_op(), problem, 1);
      const auto result = verifier.verify(0, 1, {backend->compile(program).executable});
      CAPTURE(choose, other, result.failure);
      CHECK(result.failure.starts_with("ids: 1 of 3 elements are wrong, the first [1, 0]"));
    }
}

TEST_CASE("sample: the best id is the first of equal ones, and NaN is above every number") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const auto best = [](std::vector<float> row) {
    Call call(1, std::move(row));
    call.run({});
    return call.ids.front();
  };
  CHECK(best({1, 3, 3, 2}) == 1);
  CHECK(best({-infinity, -infinity}) == 0);
  CHECK(best({1, infinity, infinity}) == 1);
  CHECK(best({1, nan, infinity, nan}) == 1);
  CHECK(best({-0.0f, 0.0f}) == 0);
  std::vector<float> wide(20000, -1);
  wide[8191] = wide[8192] = wide[19999] = 5;
  CHECK(best(wide) == 8191);
}

TEST_CASE("sample: no temperature and no logit is too small or too large for the best id to win") {
  // Each row's largest logit is last, and too far from the others for any other draw.
  const std::vector<std::vector<float>> rows{
      {1, 2, 3, 8}, {-8, -3, -2, -1}, {0, 0, 0, 8}, {2e38f, 1e38f, -3e38f, 3e38f}, {-1, 0, -2, 1}};
  const auto temperature = GENERATE(1e-45f, 1e-39f, 2.9e-39f, 1e-38f, 1e-30f, 1e-6f, 0.01f);
  for (const std::vector<float>& row : rows)
    for (const std::string choose : {"sample", "filtered"}) {
      Call call(20, row);
      std::fill(call.temperature.begin(), call.temperature.end(), temperature);
      if (choose == "filtered") {
        std::fill(call.top_p.begin(), call.top_p.end(), 0.9f);
        std::fill(call.min_p.begin(), call.min_p.end(), 0.1f);
      }
      call.run({{"choose", choose}});
      INFO(choose << " at " << temperature << " of " << row[0] << ", ..., " << row[3]);
      CHECK(call.ids == std::vector<std::int32_t>(20, 3));
    }
}

TEST_CASE("sample: large logits are drawn by large temperatures") {
  Call call(4000, {3e38f, 3e38f, 0, -3e38f});
  std::fill(call.temperature.begin(), call.temperature.end(), 1e38f);
  call.run({{"choose", "sample"}});
  const auto share = [&](std::int32_t id) {
    return static_cast<double>(std::count(call.ids.begin(), call.ids.end(), id)) / 4000;
  };
  const double others = 1 / (2 + std::exp(-3) + std::exp(-6));
  CHECK(std::abs(share(0) - others) < 0.05);
  CHECK(std::abs(share(1) - others) < 0.05);
  CHECK(std::abs(share(2) - others * std::exp(-3)) < 0.02);
}

TEST_CASE("sample: log-probabilities are those of log_softmax, before the temperature") {
  Call call(2, {1, 2, 3, -100});
  call.temperature = {0, 5};
  call.run({{"choose", "sample"}});
  const double sum = std::exp(1.0) + std::exp(2.0) + std::exp(3.0);
  CHECK(call.ids[0] == 2);
  CHECK(std::abs(call.logprob[0] - (3 - std::log(sum))) < 1e-6);
  CHECK(std::abs(call.logprob[1] - (call.logit[1] - std::log(sum))) < 1e-6);
}

TEST_CASE("sample: the best ids are in their order, of equal ones the first, NaN above all") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  Call call(2, {1, 3, -100, 3, 2, -infinity});
  call.temperature = {0, 5};
  call.run({{"choose", "sample"}}, 5);
  const double sum = std::exp(1.0) + 2 * std::exp(3.0) + std::exp(2.0);
  for (const std::size_t row : {std::size_t{0}, std::size_t{1}}) {
    const std::vector<std::int32_t> right{1, 3, 4, 0, 2};
    CHECK(std::equal(right.begin(), right.end(), call.best_ids.begin() + 5 * row));
    for (std::size_t i = 0; i < right.size(); ++i)
      CHECK(std::abs(call.best_logprobs[5 * row + i] -
                     (call.logits[static_cast<std::size_t>(right[i])] - std::log(sum))) < 1e-5);
  }
  Call nan(1, {0.0f, std::numeric_limits<float>::quiet_NaN(), -0.0f, 7});
  nan.run({}, 4);
  CHECK(nan.best_ids == std::vector<std::int32_t>{1, 3, 0, 2});
  CHECK_THROWS_WITH(problem_of(DeviceKind::cpu, DType::f32, 1, 4, {}, 5),
                    ContainsSubstring("best=5 exceeds vocab=4"));
}

TEST_CASE("sample: a verification takes no other best id than one of an equal logit") {
  const auto backend = open_cpu();
  const Family& family = family_of(sample_op(), "cpu_choose");
  for (const int change : {0, 1, 2}) {
    const Problem problem = problem_of(DeviceKind::cpu, DType::f32, 3, 100, {}, 4);
    Program program = family.program(problem, backend->facts(), {});
    const auto ids = tensor_index(sample_op().tensors(problem), "best_ids");
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      auto* const own = static_cast<std::int32_t*>(call.tensors[ids]) + 4;
      if (change == 0) std::swap(own[1], own[2]);
      if (change == 1) own[3] = own[2];
      if (change == 2) own[0] = 100;
    }));
    Verifier verifier(*backend, sample_op(), problem, 1);
    const auto result = verifier.verify(0, 1, {backend->compile(program).executable});
    CAPTURE(change, result.failure);
    CHECK(result.failure.starts_with("best_ids: "));
  }
}

TEST_CASE("sample: a million draws have the distribution of the softmax") {
  const std::vector<float> row{0.5f, -1, 2, 1.75f, -3, 0, 0, 1, -0.25f, 2.5f, -7};
  Call call(draws, row);
  std::fill(call.temperature.begin(), call.temperature.end(), 0.75f);
  call.run({{"choose", "sample"}});
  check_distribution(call.ids, softmax(row, 0.75));
  const auto first = call.ids;
  call.run({{"choose", "sample"}});
  CHECK(call.ids == first);  // the same seeds and steps
  std::fill(call.seeds.begin(), call.seeds.end(), 8);
  call.run({{"choose", "sample"}});
  CHECK(call.ids != first);
  check_distribution(call.ids, softmax(row, 0.75));
  // A step for all, and a seed for each.
  for (std::size_t i = 0; i < call.ids.size(); ++i)
    call.seeds[i] = static_cast<std::int64_t>(i), call.steps[i] = 3;
  call.run({{"choose", "sample"}});
  check_distribution(call.ids, softmax(row, 0.75));
}

TEST_CASE("sample: a million filtered draws have the distribution of what is kept") {
  const std::vector<float> row{0.5f, -1, 2, 1.75f, -3, 0, 0, 1, -0.25f, 2.5f, 0};
  struct Case {
    std::int32_t top_k;
    float top_p, min_p;
    std::vector<int> kept;
  };
  // In descending order: 2.5, 2, 1.75, 1, 0.5, 0 three times, -0.25, -1, -3; probabilities 0.36,
  // 0.22, 0.17, 0.08, 0.05, 0.03 three times, 0.02, 0.01, 0.001.
  const std::vector<Case> cases{
      {2, 1, 0, {9, 2}},       {6, 1, 0, {9, 2, 3, 7, 0, 5, 6, 10}},  // equal ones stay together
      {0, 0.7f, 0, {9, 2, 3}}, {3, 0.7f, 0, {9, 2}},                  // 0.48, 0.29, 0.23 of three
      {0, 0, 0, {9}},          {0, 1, 0.2f, {9, 2, 3, 7}},
      {3, 0.9f, 0.5f, {9, 2}}};
  for (const Case& each : cases) {
    CAPTURE(each.top_k, each.top_p, each.min_p);
    Call call(draws, row);
    std::fill(call.top_k.begin(), call.top_k.end(), each.top_k);
    std::fill(call.top_p.begin(), call.top_p.end(), each.top_p);
    std::fill(call.min_p.begin(), call.min_p.end(), each.min_p);
    call.run({{"choose", "filtered"}});
    std::vector<bool> kept(row.size());
    for (const int id : each.kept) kept[static_cast<std::size_t>(id)] = true;
    const auto expected = softmax(row, 1, kept);
    if (each.kept.size() > 1)
      check_distribution(call.ids, expected);
    else
      CHECK(std::all_of(call.ids.begin(), call.ids.end(),
                        [&](int id) { return id == each.kept.front(); }));
  }
}

TEST_CASE("sample: Philox has the words of its publication") {
  // Random123's known answers of philox4x32-10.
  const auto none = philox(0, 0, 0);
  CHECK(none.word[0] == 0x6627e8d5u);
  CHECK(none.word[1] == 0xe169c58du);
  CHECK(none.word[2] == 0xbc57ac4cu);
  CHECK(none.word[3] == 0x9b00dbd8u);
  const auto ones = philox(~u64{0}, ~u64{0}, ~u64{0});
  CHECK(ones.word[0] == 0x408f276du);
  CHECK(ones.word[1] == 0x41c83b0eu);
  CHECK(ones.word[2] == 0xa20bc7c6u);
  CHECK(ones.word[3] == 0x6d5451fdu);
}

TEST_CASE("sample: logarithm, exponential and tanh are within a few units of the last place") {
  const auto off = [](float value, double exact) {
    return std::abs(value - exact) / std::max(std::abs(exact), 1e-30);
  };
  for (int i = 1; i < 200000; ++i) {
    const float x = 1e-4f * static_cast<float>(i);
    REQUIRE(off(log_of(x), std::log(double{x})) < 1e-6 + (std::abs(x - 1) < 0.1 ? 1e-5 : 0));
    REQUIRE(off(exp_of(-x), std::exp(-double{x})) < 5e-7);
    REQUIRE(off(tanh_of(x), std::tanh(double{x})) < 5e-7);
    REQUIRE(tanh_of(-x) == -tanh_of(x));
  }
  CHECK(exp_of(0.0f) == 1);
  CHECK(exp_of(-1000.0f) == 0);
  CHECK(off(exponential_variate<float>(0), 0x1p-33) < 1e-6);
  CHECK(off(exponential_variate<float>(1u << 31), std::log(2.0)) < 1e-6);
  CHECK(off(exponential_variate<float>(~0u), 16.6355323) < 1e-6);
}

TEST_CASE("an id that rounded logits choose is possible, and near the best that is sure") {
  const Problem problem = problem_of(DeviceKind::cpu, DType::f32, 1, 200, {{"choose", "filtered"}});
  IdChoice choice;
  for (const TensorSpec& tensor : sample_op().tensors(problem))
    if (tensor.name == "ids") choice = tensor.choice;
  std::mt19937_64 random(11);
  const auto uniform = [&](double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random);
  };
  const auto best_of = [](const std::vector<double>& scores) {
    return std::max_element(scores.begin(), scores.end()) - scores.begin();
  };
  int others = 0, left_out = 0;
  for (int i = 0; i < 4000; ++i) {
    const double slack = std::exp(uniform(-7, -1));
    const std::vector<double> row{uniform(0.3, 2), uniform(0, 100), 1, std::floor(uniform(0, 20)),
                                  uniform(0, 1),   uniform(0, 0.3)};
    std::vector<double> logits(200), rounded;
    for (double& logit : logits) logit = uniform(-3, 3);
    for (const double logit : logits) rounded.push_back(logit + uniform(-slack, slack));
    std::vector<double> exact = logits, possible = logits, sure = logits;
    const double growth = choice.score(exact, row, 0);
    choice.score(rounded, row, 0);
    choice.score(possible, row, slack);
    choice.score(sure, row, -slack);
    const auto id = best_of(rounded);
    others += id != best_of(exact);
    INFO("slack " << slack << ", id " << id);
    REQUIRE(std::isfinite(possible[static_cast<std::size_t>(id)]));
    REQUIRE(possible[static_cast<std::size_t>(id)] + 2 * growth * slack >=
            sure[static_cast<std::size_t>(best_of(sure))]);
    for (std::size_t j = 0; j < exact.size(); ++j) {
      if (std::isfinite(sure[j])) REQUIRE(std::isfinite(exact[j]));
      left_out += !std::isfinite(possible[j]);
    }
  }
  CHECK(others > 100);     // errors do change ids,
  CHECK(left_out > 4000);  // and filters still leave ids out
}

const FuzzCases<sample_op, random_problem,
                FuzzCounts{.small = 2000, .larger = 40, .gpu = 150, .spaces = 200}>
    sample_cases;
