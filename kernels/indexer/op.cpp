// indexer: its fields, tensors, stages and test data.
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention/test_data.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/indexer/indexer.hpp"

namespace fftune::indexer {
namespace {

constexpr std::int64_t most_sequences = 65535, most_tokens = std::int64_t{1} << 24;
constexpr std::int64_t most_heads = 256, most_dim = 512, most_top = std::int64_t{1} << 16;

OpFacts facts() {
  return {.name = "indexer",
          .summary =
              "choice of keys of sparse attention: the best of sum_h weights_h relu(q_h k) for "
              "each query",
          .passes = {"fwd"},
          .sizes = {{.name = "b",
                     .help = "sequences",
                     .max = most_sequences,
                     .default_on_cuda = {1, 16, 64},
                     .default_on_cpu = {1, 8},
                     .example = 16},
                    {.name = "s",
                     .help = "queries of a sequence, its last",
                     .max = most_tokens,
                     .example = 1},
                    {.name = "kv",
                     .help = "keys of a sequence, with lengths=yes at most",
                     .max = most_tokens,
                     .example = 8192},
                    {.name = "heads", .help = "indexer heads", .max = most_heads, .example = 64},
                    {.name = "dim", .help = "features of a head", .max = most_dim, .example = 128},
                    rare_size("top", "keys that are chosen for a query; 2048 if left out", most_top,
                              1024, usually(usual_top))},
          .options = {rare_option("lengths",
                                  "whether each sequence has its own number of keys, of kv at most",
                                  {"no", "yes"}),
                      rare_option(
                          "k-format",
                          "element type of k: that of q, or e4m3 with an f32 scale for each key",
                          {"same", "e4m3"})},
          .token_size = "b",
          .rows_are_alike = false,
          .families = {cuda_families, cpu_families}};
}

class Indexer final : public DescribedOp {
 public:
  using DescribedOp::DescribedOp;

  std::vector<KnownModel> known_models() const override {
    return {{"deepseek-v3.2", {{"heads", 64}, {"dim", 128}}},
            {"glm-5", {{"heads", 32}, {"dim", 128}}}};
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    // Scores are of order one.
    const double scale = 1 / std::sqrt(static_cast<double>(layer.dim)),
                 weight = 1 / std::sqrt(static_cast<double>(layer.heads));
    std::vector<TensorSpec> tensors{
        {"q", layer.dtype, {layer.b, layer.s, layer.heads, layer.dim}, Role::input, scale},
        {"weights", DType::f32, {layer.b, layer.s, layer.heads}, Role::input, weight},
        {"k", layer.dtype_of_keys(), {layer.b, layer.kv, layer.dim}, Role::input, 1}};
    if (layer.e4m3) {
      // Well above the subnormals of e4m3, and below its largest number.
      constexpr double deviation = 16;
      tensors.back().scale = deviation;
      tensors.push_back({"k_scale",
                         DType::f32,
                         {layer.b, layer.kv},
                         Role::input,
                         0.1 / deviation,
                         1 / deviation});
    }
    if (layer.lengths) {
      tensors.push_back({"lengths", DType::i32, {layer.b}, Role::input});
      tensors.back().draw = [most = layer.kv](std::uint64_t, std::span<double> values) {
        attention::draw_lengths(most, values);
      };
    }
    TensorSpec ids{"ids", DType::i32, {layer.b, layer.s, layer.top}, Role::output};
    ids.choice = {
        "scores", {}, [](std::span<double>, const std::vector<double>&, double) { return 1.0; }};
    tensors.push_back(std::move(ids));
    tensors.push_back({"scores", DType::f32, {layer.b, layer.s, layer.kv}, Role::intermediate, 1});
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    double pairs = 0;
    for (std::int64_t i = 0; i < layer.s; ++i)
      pairs += static_cast<double>(layer.visible(i, layer.kv));
    pairs *= static_cast<double>(layer.b);
    StageSpec scores, choose;
    scores.name = stage_scores, choose.name = stage_choose;
    const auto add = [](StageSpec& stage, const TensorSpec& tensor, bool written) {
      (written ? stage.outputs : stage.inputs).push_back(tensor.name);
      stage.bytes += static_cast<double>(tensor.bytes());
    };
    for (const TensorSpec& tensor : tensors(problem)) {
      const bool is_ids = tensor.name == "ids", is_scores = tensor.name == "scores";
      if (!is_ids) add(scores, tensor, is_scores);
      if (is_ids || is_scores || tensor.name == "lengths") add(choose, tensor, is_ids);
    }
    scores.flops =
        pairs * static_cast<double>(layer.heads) * static_cast<double>(2 * layer.dim + 2);
    scores.reduction_length = layer.heads * layer.dim;
    choose.flops = pairs;
    return {scores, choose};
  }

  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    (stage == 0 ? reference_scores : reference_choice)(problem, tensors, parallel);
  }
};

}  // namespace

Layer layer_of(const Problem& problem) {
  return {.b = problem.size("b"),
          .s = problem.size("s"),
          .kv = problem.size("kv"),
          .heads = problem.size("heads"),
          .dim = problem.size("dim"),
          .top = size_or(problem, "top", usual_top),
          .lengths = problem.has("lengths", "yes"),
          .e4m3 = problem.has("k-format", "e4m3"),
          .dtype = problem.dtype};
}

}  // namespace fftune::indexer

const fftune::Op& fftune::indexer_op() {
  static const indexer::Indexer op(indexer::facts());
  return op;
}
