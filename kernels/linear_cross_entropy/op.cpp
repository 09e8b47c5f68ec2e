// linear-cross-entropy: its fields, tensors, stages and definition.
#include <algorithm>
#include <cmath>
#include <utility>

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/reference_product.hpp"
#include "kernels/linear_cross_entropy/linear_cross_entropy.hpp"

namespace fftune::linear_cross_entropy {
namespace {

std::vector<OptionField> option_fields() {
  std::vector<OptionField> fields = cross_entropy::options();
  std::vector<OptionField> own{
      rare_option("bias", "whether the logits have a bias", {"no", "yes"}),
      rare_option("gradients",
                  "whether the gradients of x, w and bias are computed too, for a loss whose "
                  "gradient is 1",
                  {"no", "yes"}, "fwd"),
      rare_option("frozen", "whether w and bias have no gradients", {"no", "yes"}),
      rare_option("accumulate",
                  "whether the gradients of w and bias are added to others, which may be the same "
                  "buffers",
                  {"no", "yes"}),
      rare_number("workspace", "MiB that the logits of a chunk of rows may take", "512",
                  {0, 1 << 20})};
  fields.insert(fields.end(), std::make_move_iterator(own.begin()),
                std::make_move_iterator(own.end()));
  return fields;
}

OpFacts facts() {
  return {.name = "linear-cross-entropy",
          .summary =
              "loss of a language model's head: cross-entropy of x w^T, without logits in memory",
          .sizes = {token_count("m", "tokens", {8192}, {16, 128}),
                    {.name = "d", .help = "features of a token"},
                    {.name = "vocab",
                     .help = "ids; a label is one of them",
                     .max = cross_entropy::most_ids,
                     .example = 32000}},
          .options = option_fields(),
          .families = {families}};
}

class LinearCrossEntropy final : public DescribedOp {
 public:
  LinearCrossEntropy() : DescribedOp(facts()) {}

  std::string contradiction(const Problem& problem) const override {
    const Form form = form_of(problem);
    for (const char* name : {"frozen", "accumulate"})
      if (!form.gradients && problem.has(name, "yes"))
        return std::string(name) + "=yes is of gradients: give gradients=yes";
    if (form.loss.whole > 0 && problem.has("gradients", "yes"))
      return "slice-of with gradients=yes: they need the log-sum-exp of all slices, which the pass "
             "bwd takes";
    if (auto reason = frozen_contradiction(problem); !reason.empty()) return reason;
    return cross_entropy::contradiction_of(problem);
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const Form form = form_of(problem);
    const std::int64_t m = problem.size("m"), d = problem.size("d"), vocab = problem.size("vocab");
    const DType dtype = problem.dtype;
    std::vector<TensorSpec> tensors;
    const auto add = [&](std::vector<TensorSpec> more) {
      for (TensorSpec& tensor : more) tensors.push_back(std::move(tensor));
    };
    std::vector<TensorSpec> gradients{{"dw", dtype, {vocab, d}, Role::output, 1}};
    if (form.bias) gradients.push_back({"dbias", dtype, {vocab}, Role::output, 1});
    for (TensorSpec& gradient : gradients) gradient.sums_tokens = true;
    if (form.backward) tensors.push_back(cross_entropy::loss_gradient(form.loss, m));
    tensors.push_back({"x", dtype, {m, d}, Role::input, 1});
    tensors.back().kept = form.backward;
    // Logits of deviation 2.
    tensors.push_back({"w", dtype, {vocab, d}, Role::input, 2 / std::sqrt(static_cast<double>(d))});
    if (form.bias) tensors.push_back({"bias", dtype, {vocab}, Role::input, 1});
    add(cross_entropy::label_tensors(form.loss, m, vocab));
    if (form.backward) tensors.push_back(cross_entropy::log_sum_exp(m));
    if (form.accumulates) append(tensors, initial_values(gradients));
    if (!form.backward) add(cross_entropy::loss_tensors(form.loss, m));
    if (form.gradients) tensors.push_back({"dx", dtype, {m, d}, Role::output, 1});
    if (form.d_w()) append(tensors, std::move(gradients));
    tensors.push_back({"logits", dtype, {m, vocab}, Role::intermediate, 1});
    if (form.gradients) tensors.push_back({"dlogits", dtype, {m, vocab}, Role::intermediate, 1});
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Form form = form_of(problem);
    const auto tensors = this->tensors(problem);
    const std::int64_t m = problem.size("m"), d = problem.size("d"), vocab = problem.size("vocab");
    const double products =
        2 * static_cast<double>(m) * static_cast<double>(d) * static_cast<double>(vocab);
    StageSpec product{.name = stage_product,
                      .inputs = {"x", "w"},
                      .outputs = {"logits"},
                      .reduction_length = d,
                      .flops = products};
    if (form.bias) product.inputs.emplace_back("bias");
    StageSpec loss{.name = stage_loss,
                   .inputs = {"logits", "labels"},
                   .outputs = {},
                   .reduction_length = vocab,
                   .flops = 4 * static_cast<double>(m) * static_cast<double>(vocab)};
    if (form.loss.reduction != cross_entropy::Reduction::none) loss.reduction_length += m;
    // A rounded logit changes its probability by more than a rounding, and few are large in a row.
    loss.inner_roundings = 1;
    loss.inner_values = static_cast<double>(m);
    for (const char* name : {"class_weights", "items"})
      if (find_tensor(tensors, name)) loss.inputs.emplace_back(name);
    for (const char* name : {"dloss", "lse"})
      if (form.backward) loss.inputs.emplace_back(name);
    for (const char* name : {"loss", "lse", "logprob", "entropy", "dlogits"})
      if (const auto place = find_tensor(tensors, name);
          place && tensors[*place].role != Role::input)
        loss.outputs.emplace_back(name);
    std::vector<StageSpec> stages{std::move(product), std::move(loss)};
    if (form.gradients) {
      StageSpec gradients{.name = stage_gradients,
                          .inputs = {"dlogits", "w"},
                          .outputs = {"dx"},
                          .reduction_length = form.frozen ? vocab : std::max(vocab, m),
                          .flops = form.frozen ? products : 2 * products};
      if (form.d_w()) {
        gradients.inputs.emplace_back("x");
        for (const char* name : {"dw_before", "dbias_before"})
          if (find_tensor(tensors, name)) gradients.inputs.emplace_back(name);
        for (const char* name : {"dw", "dbias"})
          if (find_tensor(tensors, name)) gradients.outputs.emplace_back(name);
        // dw is rounded once a chunk.
        const std::int64_t rows = chunk_rows(problem);
        gradients.inner_roundings = static_cast<int>((m + rows - 1) / rows - 1);
      }
      stages.push_back(std::move(gradients));
    }
    for (StageSpec& stage : stages)
      for (const auto& names : {stage.inputs, stage.outputs})
        for (const auto& name : names)
          stage.bytes += static_cast<double>(tensors[tensor_index(tensors, name)].bytes());
    return stages;
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    const Form form = form_of(problem);
    const std::int64_t m = problem.size("m"), d = problem.size("d"), vocab = problem.size("vocab");
    const auto width = static_cast<std::size_t>(vocab);
    const auto data = [&](const char* name) { return tensors.at(name).data(); };
    const auto start = [&](const char* before, std::int64_t elements) {
      return form.accumulates ? large_copy(tensors.at(before), parallel)
                              : large_vector<double>(static_cast<std::size_t>(elements), parallel);
    };
    if (stage == 0) {
      auto logits = large_vector<double>(static_cast<std::size_t>(m) * width, parallel);
      reference_product(parallel, m, vocab, d, {data("x"), d}, {data("w"), d}, 0, logits.data());
      if (form.bias)
        for_each_row(static_cast<std::size_t>(m), width, parallel, [&](std::size_t row) {
          for (std::size_t id = 0; id < width; ++id)
            logits[row * width + id] += tensors.at("bias")[id];
        });
      tensors["logits"] = std::move(logits);
    } else if (stage == 1) {
      if (!form.backward) cross_entropy::reference_loss(form.loss, vocab, tensors, parallel);
      if (form.gradients)
        cross_entropy::reference_gradient(
            form.loss, vocab, form.backward ? &tensors.at("dloss") : nullptr, tensors, parallel);
    } else {
      auto dx = large_vector<double>(static_cast<std::size_t>(m * d), parallel);
      reference_product(parallel, m, d, vocab, {data("dlogits"), vocab}, {data("w"), d, true}, 0,
                        dx.data());
      tensors["dx"] = std::move(dx);
      if (form.frozen) return;
      auto dw = start("dw_before", vocab * d);
      reference_product(parallel, vocab, d, m, {data("dlogits"), vocab, true}, {data("x"), d, true},
                        form.accumulates, dw.data());
      tensors["dw"] = std::move(dw);
      if (!form.bias) return;
      auto dbias = start("dbias_before", vocab);
      for (std::size_t row = 0; row < static_cast<std::size_t>(m); ++row)
        for (std::size_t id = 0; id < width; ++id) dbias[id] += data("dlogits")[row * width + id];
      tensors["dbias"] = std::move(dbias);
    }
  }
};

}  // namespace

Form form_of(const Problem& problem) {
  const bool backward = problem.pass == "bwd";
  return {.loss = cross_entropy::form_of(problem),
          .backward = backward,
          .gradients = backward || problem.has("gradients", "yes"),
          .frozen = problem.has("frozen", "yes"),
          .accumulates = problem.has("accumulate", "yes"),
          .bias = problem.has("bias", "yes")};
}

std::int64_t chunk_rows(const Problem& problem) {
  const std::int64_t m = problem.size("m");
  const double bytes = number_or_default(linear_cross_entropy_op(), problem, "workspace") * 0x1p20;
  const std::int64_t row =
      problem.size("vocab") * static_cast<std::int64_t>(dtype_bytes(problem.dtype));
  const std::int64_t most = static_cast<std::int64_t>(bytes) / row;
  if (m <= most) return m;
  // Whole tiles of the GEMMs; fewer rows begin at addresses of 16 bytes still.
  const std::int64_t step = most >= 128 ? 128 : 8;
  const std::int64_t limit = std::max(most / step * step, step);
  const std::int64_t chunks = (m + limit - 1) / limit;
  return ((m + chunks - 1) / chunks + step - 1) / step * step;
}

}  // namespace fftune::linear_cross_entropy

const fftune::Op& fftune::linear_cross_entropy_op() {
  static const linear_cross_entropy::LinearCrossEntropy op;
  return op;
}
