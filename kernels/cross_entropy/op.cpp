// cross-entropy: its fields and tensors.
#include <random>
#include <span>
#include <utility>

#include "kernels/common/test_data.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"

namespace fftune::cross_entropy {
namespace {

OpFacts facts() {
  return {
      .name = "cross-entropy",
      .summary = "loss of logits and labels: log-sum-exp minus the label's logit; and its gradient",
      .sizes = {token_count("m", "tokens", {1024, 8192}, {16, 128}),
                {.name = "vocab",
                 .help = "ids; a label is one of them",
                 .max = most_ids,
                 .example = 32000}},
      .options = cross_entropy::options(),
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction_of};
}

class CrossEntropy final : public DescribedOp {
 public:
  CrossEntropy() : DescribedOp(facts()) {}

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const Form form = form_of(problem);
    const std::int64_t m = problem.size("m"), vocab = problem.size("vocab");
    std::vector<TensorSpec> tensors;
    if (problem.pass == "bwd") tensors.push_back(loss_gradient(form, m));
    tensors.push_back({"logits", problem.dtype, {m, vocab}, Role::input, 2});
    append(tensors, label_tensors(form, m, vocab));
    if (problem.pass == "fwd") {
      append(tensors, loss_tensors(form, m));
      return tensors;
    }
    tensors.push_back(log_sum_exp(m));
    tensors.push_back({"dlogits", problem.dtype, {m, vocab}, Role::output, 1});
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    StageSpec stage =
        whole_stage(problem.pass == "fwd" ? stage_loss : stage_gradient, tensors(problem));
    const auto m = static_cast<double>(problem.size("m"));
    stage.reduction_length = problem.size("vocab");
    if (form_of(problem).reduction != Reduction::none) stage.reduction_length += problem.size("m");
    stage.flops = 4 * m * static_cast<double>(problem.size("vocab"));
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    const Form form = form_of(problem);
    if (problem.pass == "fwd")
      reference_loss(form, problem.size("vocab"), tensors, parallel);
    else
      reference_gradient(form, problem.size("vocab"), &tensors.at("dloss"), tensors, parallel);
  }
};

}  // namespace

Form form_of(const Problem& problem) {
  const Op& op = cross_entropy_op();
  const auto number = [&](const char* name) {
    return static_cast<float>(number_or_default(op, problem, name));
  };
  return {.reduction = problem.has("reduction", "mean")  ? Reduction::mean
                       : problem.has("reduction", "sum") ? Reduction::sum
                                                         : Reduction::none,
          .class_weights = problem.has("class-weights", "yes"),
          .logprobs = problem.has("logprobs", "yes"),
          .entropy = problem.has("entropy", "yes"),
          .smoothing = number("label-smoothing"),
          .z_loss = number("z-loss"),
          .softcap = number("softcap"),
          .ignored = static_cast<std::int64_t>(number_or_default(op, problem, "ignore-index")),
          .whole = static_cast<std::int64_t>(number_or_default(op, problem, "slice-of"))};
}

std::string contradiction_of(const Problem& problem) {
  const Form form = form_of(problem);
  if (form.whole == 0) return "";
  if (form.whole < problem.size("vocab"))
    return "slice-of=" + std::to_string(form.whole) +
           " with vocab=" + std::to_string(problem.size("vocab")) +
           ": a slice has no more ids than the vocabulary";
  if (form.reduction != Reduction::none)
    return "slice-of with a reduction: the loss of a token needs the other slices; give "
           "reduction=none";
  if (form.class_weights)
    return "slice-of with class-weights=yes: the weight of a label in another slice is not known; "
           "weigh dloss instead";
  return "";
}

std::vector<OptionField> options() {
  constexpr double most_index = 1 << 30;
  return {rare_option("reduction",
                      "a loss for each token, their sum, or the sum divided by a number of items",
                      {"none", "sum", "mean"}),
          rare_option("class-weights", "whether each id has a weight in the loss", {"no", "yes"}),
          rare_number("ignore-index", "the label of tokens without a loss", "-100",
                      {-most_index, most_index}),
          rare_number("label-smoothing", "share of the loss that all ids have alike", "0", {0, 1}),
          rare_number("z-loss", "factor of the squared log-sum-exp that is added to a token's loss",
                      "0", {0, 1e6}),
          rare_number("softcap", "soft cap c of the logits, c tanh(x / c); 0: none", "0", {0, 1e6}),
          rare_number("slice-of",
                      "ids of the vocabulary that these are a slice of, for tensor parallelism; 0: "
                      "they are all of it",
                      "0", {0, most_index}),
          rare_option("logprobs", "whether the log-probability of each label is written",
                      {"no", "yes"}, "fwd"),
          rare_option("entropy", "whether the entropy of each token's distribution is written",
                      {"no", "yes"}, "fwd")};
}

std::vector<TensorSpec> label_tensors(const Form& form, std::int64_t m, std::int64_t vocab) {
  TensorSpec labels{"labels", DType::i64, {m}, Role::input};
  // A label in another slice is the id behind the last one.
  labels.draw = each([ids = static_cast<std::uint64_t>(form.whole > vocab ? vocab + 1 : vocab),
                      ignored = form.ignored](std::mt19937_64& random) {
    const std::uint64_t bits = random();
    return static_cast<double>(bits % 5 == 0 ? ignored
                                             : static_cast<std::int64_t>((bits >> 8) % ids));
  });
  std::vector<TensorSpec> tensors{std::move(labels)};
  if (form.class_weights)
    tensors.push_back({"class_weights", DType::f32, {vocab}, Role::input, 0.2, 1});
  if (form.reduction == Reduction::mean) {
    tensors.push_back({"items", DType::f32, {1}, Role::input});
    tensors.back().draw = [m](std::uint64_t, std::span<double> values) {
      values[0] = static_cast<double>(m);
    };
  }
  return tensors;
}

std::vector<TensorSpec> loss_tensors(const Form& form, std::int64_t m) {
  const bool reduces = form.reduction != Reduction::none;
  std::vector<TensorSpec> tensors{{"loss", DType::f32, {reduces ? 1 : m}, Role::output, 1}};
  tensors.front().sums_tokens = reduces;
  tensors.push_back(log_sum_exp(m));
  tensors.back().role = Role::output;
  if (form.logprobs) tensors.push_back({"logprob", DType::f32, {m}, Role::output, 1});
  if (form.entropy) tensors.push_back({"entropy", DType::f32, {m}, Role::output, 1});
  return tensors;
}

TensorSpec loss_gradient(const Form& form, std::int64_t m) {
  return {"dloss", DType::f32, {form.reduction == Reduction::none ? m : 1}, Role::input, 0.3, 1};
}

Program program_of(const Problem& problem, const DeviceFacts& facts,
                   const std::function<void(Program&, const Form&, const Rows&)>& append) {
  const Form form = form_of(problem);
  const TensorPlaces places(cross_entropy_op().tensors(problem));
  const auto given = [&](const char* name) -> std::optional<Pointer> {
    const std::size_t place = places.at(name);
    if (place == absent) return std::nullopt;
    return TensorArgument{place};
  };
  Rows rows{.rows = problem.size("m"),
            .vocab = problem.size("vocab"),
            .dtype = problem.dtype,
            .logits = tensor_of(places, "logits"),
            .labels = tensor_of(places, "labels"),
            .lse = tensor_of(places, "lse"),
            .class_weights = given("class_weights"),
            .items = given("items"),
            .dloss = given("dloss"),
            .loss = given("loss"),
            .logprob = given("logprob"),
            .entropy = given("entropy"),
            .dlogits = given("dlogits")};
  Program program;
  if (facts.kind == DeviceKind::cpu) program.host_tensors = places.count();
  const bool reduces = rows.loss && form.reduction != Reduction::none;
  if (reduces) {
    rows.loss = ScratchArgument{0};
    program.scratch = {{static_cast<std::size_t>(rows.rows) * sizeof(float), false}};
  }
  append(program, form, rows);
  if (reduces)
    append_total(program, form, *rows.loss, *given("loss"), rows.items, rows.rows, facts);
  return program;
}

TensorSpec log_sum_exp(std::int64_t m) {
  TensorSpec tensor{"lse", DType::f32, {m}, Role::input, 0.5, 8};
  tensor.kept = true;
  return tensor;
}

}  // namespace fftune::cross_entropy

const fftune::Op& fftune::cross_entropy_op() {
  static const cross_entropy::CrossEntropy op;
  return op;
}
