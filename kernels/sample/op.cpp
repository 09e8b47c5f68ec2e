// sample: its fields, tensors and definition.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/sampling.cuh"
#include "kernels/common/test_data.hpp"
#include "kernels/sample/sample.hpp"

namespace fftune::sample {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Parameters of a row beside its logits, in the order of the tensors.
struct Row {
  double temperature = 0;
  std::int64_t seed = 0, step = 0;
  double top_k = 0, top_p = 1, min_p = 0;
};

std::vector<std::string> parameter_names(const Form& form) {
  if (!form.draws) return {};
  if (!form.filters) return {"temperature", "seeds", "steps"};
  return {"temperature", "seeds", "steps", "top_k", "top_p", "min_p"};
}

Row row_of(const std::vector<double>& parameters) {
  Row row;
  if (parameters.empty()) return row;
  row.temperature = parameters[0];
  row.seed = static_cast<std::int64_t>(parameters[1]);
  row.step = static_cast<std::int64_t>(parameters[2]);
  if (parameters.size() > 5)
    row.top_k = parameters[3], row.top_p = parameters[4], row.min_p = parameters[5];
  return row;
}

void cap(std::span<double> logits, double softcap) {
  if (softcap == 0) return;
  for (double& logit : logits) logit = softcap * std::tanh(logit / softcap);
}

/// NaN is above every number.
bool is_better(double value, double than) {
  return value > than || (std::isnan(value) && !std::isnan(than));
}

/// Leaves -infinity where the filter leaves an id out; see IdChoice::score about `slack`. Two
/// logits may come nearer by twice the slack: probabilities grow by `share`, and their sum may
/// shrink by it.
void keep(std::span<double> logits, const Row& row, double slack) {
  const double share = std::exp(2 * slack / row.temperature);
  std::vector<double> sorted(logits.begin(), logits.end());
  std::sort(sorted.begin(), sorted.end(), is_better);
  std::size_t end = sorted.size();             // of those that stay
  const auto whole = [&](std::size_t count) {  // with those of equal logits
    while (count < end && sorted[count] == sorted[count - 1]) ++count;
    return std::min(count, end);
  };
  if (row.top_k > 0 && row.top_k < static_cast<double>(end))
    end = whole(static_cast<std::size_t>(row.top_k));
  const auto probability = [&](double logit) {
    return std::exp((logit - sorted[0]) / row.temperature);
  };
  if (row.top_p < 1) {
    double total = 0, better = 0;
    for (std::size_t i = 0; i < end; ++i) total += probability(sorted[i]);
    std::size_t count = 0;
    do better += probability(sorted[count++]);
    while (count < end && better < row.top_p * share * share * total);
    end = whole(count);
  }
  const double least = sorted[end - 1] - 2 * slack;
  for (double& logit : logits)
    if (logit < least || probability(logit) * share < std::min(row.min_p, 1.0)) logit = -infinity;
}

/// IdChoice::score.
double score(std::span<double> logits, const std::vector<double>& parameters, const Form& form,
             double slack = 0) {
  cap(logits, form.softcap);
  const Row row = row_of(parameters);
  if (!form.draws || !(row.temperature > 0)) return 1;
  if (form.filters) keep(logits, row, slack);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const u32 word =
        noise_words(row.seed, static_cast<int>(row.step), static_cast<i64>(i / 4)).word[i % 4];
    const double uniform = (word + 0.5) / 0x1p32;
    logits[i] = logits[i] / row.temperature - std::log(-std::log1p(-uniform));
  }
  return 1 / row.temperature;
}

/// The places of the largest, of equal ones the first.
template <typename Value>
std::vector<std::size_t> best_places(std::span<const Value> values, std::size_t count) {
  std::vector<std::size_t> places(values.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  std::partial_sort(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(count),
                    places.end(), [&](std::size_t a, std::size_t b) {
                      return is_better(values[a], values[b]) ||
                             (!is_better(values[b], values[a]) && a < b);
                    });
  places.resize(count);
  return places;
}

/// The first of the largest; NaN is largest.
std::size_t best_of(std::span<const double> scores) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < scores.size(); ++i)
    if (is_better(scores[i], scores[best])) best = i;
  return best;
}

double log_of_sum(std::span<const double> logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum);
}

/// Test data of a row tensor: one of some values for each row.
TensorSpec of_rows(const char* name, DType dtype, std::int64_t m, std::vector<double> choices) {
  TensorSpec tensor{name, dtype, {m}, Role::input};
  tensor.draw = each([choices = std::move(choices)](std::mt19937_64& random) {
    return choices[random() % choices.size()];
  });
  return tensor;
}

OpFacts facts() {
  return {
      .name = "sample",
      .summary =
          "the next id of each sequence from its logits: the best, or a sample by temperature, "
          "top-k, top-p and min-p",
      .passes = {"fwd"},
      .sizes = {token_count("m", "sequences", {1, 16, 64}, {1, 16}),
                {.name = "vocab", .help = "ids to choose from", .max = most_ids, .example = 32000},
                best_field()},
      .options = sample::options(),
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction_of_best};
}

class Sample final : public DescribedOp {
 public:
  Sample() : DescribedOp(facts()) {}

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const Form form = form_of(problem);
    const std::int64_t m = problem.size("m");
    std::vector<TensorSpec> tensors{
        {"logits", problem.dtype, {m, problem.size("vocab")}, Role::input, 2}};
    if (form.draws) {
      tensors.push_back(of_rows("temperature", DType::f32, m, {0, 1e-39, 1e-20, 0.5, 0.8, 1, 1.5}));
      tensors.push_back(of_rows("seeds", DType::i64, m, {0, 1, 42, 0x1p40 + 7, -3}));
      tensors.push_back(of_rows("steps", DType::i32, m, {0, 1, 2, 1000, 0x1p31 - 1}));
    }
    if (form.filters) {
      tensors.push_back(of_rows("top_k", DType::i32, m, {0, 1, 2, 5, 50, 1e6}));
      tensors.push_back(of_rows("top_p", DType::f32, m, {0, 0.3, 0.9, 0.95, 1}));
      tensors.push_back(of_rows("min_p", DType::f32, m, {0, 0, 0.05, 0.2}));
    }
    TensorSpec ids{"ids", DType::i32, {m}, Role::output};
    ids.choice = {"logits", parameter_names(form),
                  [form](std::span<double> row, const std::vector<double>& parameters,
                         double slack) { return score(row, parameters, form, slack); }};
    tensors.push_back(std::move(ids));
    tensors.push_back({"logit", DType::f32, {m}, Role::output, 1});
    tensors.back().of_choice = "ids";
    if (form.logprobs) {
      tensors.push_back({"logprob", DType::f32, {m}, Role::output, 1});
      tensors.back().of_choice = "ids";
    }
    if (form.best > 0) {
      TensorSpec best{"best_ids", DType::i32, {m, form.best}, Role::output};
      best.choice = {
          "logits", {}, [form](std::span<double> row, const std::vector<double>&, double) {
            cap(row, form.softcap);
            return 1.0;
          }};
      tensors.push_back(std::move(best));
      tensors.push_back({"best_logprobs", DType::f32, {m, form.best}, Role::output, 1});
      tensors.back().of_choice = "best_ids";
    }
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    StageSpec stage = whole_stage(sample::stage, tensors(problem));
    stage.flops = static_cast<double>(problem.size("m")) *
                  static_cast<double>(problem.size("vocab")) * (form_of(problem).draws ? 40 : 1);
    if (form_of(problem).logprobs || form_of(problem).best > 0)
      stage.reduction_length = problem.size("vocab");
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    const Form form = form_of(problem);
    const auto vocab = static_cast<std::size_t>(problem.size("vocab"));
    const auto& logits = tensors.at("logits");
    const std::size_t rows = logits.size() / vocab;
    std::vector<double> ids(rows), logit(rows), logprob(rows);
    const auto count = static_cast<std::size_t>(form.best);
    std::vector<double> best_ids(rows * count), best_logprobs(rows * count);
    for_each_row(rows, vocab, parallel, [&](std::size_t row) {
      std::vector<double> own(logits.begin() + static_cast<std::ptrdiff_t>(row * vocab),
                              logits.begin() + static_cast<std::ptrdiff_t>((row + 1) * vocab));
      std::vector<double> parameters;
      for (const std::string& name : parameter_names(form))
        parameters.push_back(tensors.at(name)[row]);
      std::vector<double> scores = own;
      score(scores, parameters, form);
      const std::size_t id = best_of(scores);
      ids[row] = static_cast<double>(id);
      cap(own, form.softcap);
      logit[row] = own[id];
      if (form.logprobs) logprob[row] = own[id] - log_of_sum(own);
      if (count == 0) return;
      const auto best = best_places<double>(own, count);
      for (std::size_t i = 0; i < count; ++i) {
        best_ids[row * count + i] = static_cast<double>(best[i]);
        best_logprobs[row * count + i] = own[best[i]] - log_of_sum(own);
      }
    });
    tensors["ids"] = std::move(ids);
    tensors["logit"] = std::move(logit);
    if (form.logprobs) tensors["logprob"] = std::move(logprob);
    if (count == 0) return;
    tensors["best_ids"] = std::move(best_ids);
    tensors["best_logprobs"] = std::move(best_logprobs);
  }
};

}  // namespace

Form form_of(const Problem& problem) {
  const bool filters = problem.has("choose", "filtered");
  return {.draws = filters || problem.has("choose", "sample"),
          .filters = filters,
          .logprobs = problem.has("logprobs", "yes"),
          .softcap = problem.options.contains("softcap")
                         ? static_cast<float>(problem.number("softcap"))
                         : 0.0f,
          .best = size_or(problem, "best", 0)};
}

SizeField best_field() {
  return {.name = "best",
          .help =
              "ids with the largest logits, whose log-probabilities are written; none if left "
              "out",
          .max = most_best,
          .example = 5,
          .rare = true};
}

std::string contradiction_of_best(const Problem& problem) {
  const std::int64_t best = size_or(problem, "best", 0), vocab = problem.size("vocab");
  if (best <= vocab) return "";
  return fmt::format("best={} exceeds vocab={}", best, vocab);
}

std::vector<OptionField> options() {
  return {rare_option("choose",
                      "the best id; a sample by temperature; or filtered: a sample of the ids that "
                      "top-k, top-p and min-p keep",
                      {"argmax", "sample", "filtered"}),
          rare_number("softcap", "soft cap c of the logits, c tanh(x / c); 0: none", "0", {0, 1e6}),
          rare_option("logprobs", "whether the log-probability of the chosen id is written",
                      {"no", "yes"})};
}

}  // namespace fftune::sample

const fftune::Op& fftune::sample_op() {
  static const sample::Sample op;
  return op;
}
