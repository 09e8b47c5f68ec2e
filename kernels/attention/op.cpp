#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include "core/error.hpp"
#include "core/saturated.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/attention/key_cache.hpp"
#include "kernels/attention/test_data.hpp"
#include "kernels/common/op_parts.hpp"

namespace fftune::attention {
namespace {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;
constexpr std::int64_t most_tokens = std::int64_t{1} << 24;

/// The value of an option that is a number, given or not.
double number_of(const Problem& problem, const std::string& name) {
  return problem.options.contains(name) ? problem.number(name) : 0;
}

/// Sizes that are left out (SizeField::when_absent).
std::optional<std::int64_t> usual_kv(const Problem& problem) {
  // Packed sequences have offsets of their own for keys whose number is stated.
  const bool same_offsets = problem.has("layout", "thd") && !problem.sizes.contains("page");
  return same_offsets ? std::nullopt : same_as("s")(problem);
}
std::optional<std::int64_t> usual_q_row(const Problem& problem) {
  return saturated_product(size_or(problem, "heads", 0), size_or(problem, "dim", 0));
}
std::optional<std::int64_t> usual_kv_row(const Problem& problem, const char* features) {
  if (problem.sizes.contains("page")) return std::nullopt;
  return saturated_product(
      size_or(problem, "kv-heads", size_or(problem, "heads", 0)),
      size_or(problem, "kv-head", size_or(problem, features, size_or(problem, "dim", 0))));
}
std::optional<std::int64_t> usual_k_row(const Problem& problem) {
  return usual_kv_row(problem, "dim");
}
std::optional<std::int64_t> usual_v_row(const Problem& problem) {
  return usual_kv_row(problem, "v-dim");
}

class TensorList {
 public:
  explicit TensorList(const Layer& layer) : layer_(layer) {}

  /// Rows of heads as those of a tensor: of q, k or v, or of out.
  struct Rows {
    bool of_keys;
    std::int64_t features;  // of a head
    std::int64_t head;      // elements from a head to the next
  };
  Rows of_q() const { return {false, layer_.dim, layer_.dim}; }
  Rows of_out() const { return {false, layer_.v_dim, layer_.v_dim}; }
  Rows of_k() const { return {true, layer_.dim, layer_.kv_head}; }
  Rows of_v() const { return {true, layer_.v_dim, layer_.v_head}; }

  /// Tokens `row` elements apart; 0: heads follow each other.
  TensorSpec& add_rows(const char* name, Role role, Rows rows, std::int64_t row = 0) {
    const auto& [of_keys, features, head] = rows;
    const std::int64_t heads = of_keys ? layer_.kv_heads : layer_.heads;
    const std::int64_t tokens = of_keys ? layer_.kv : layer_.s;
    if (row == 0) row = heads * head;
    std::vector<std::int64_t> shape{layer_.b, tokens};
    if (layer_.layout == Layout::thd) shape = {tokens};
    if (of_keys && layer_.page > 0) shape = {layer_.pages, layer_.page};
    if (row == heads * head)
      shape.insert(shape.end(), {heads, head});
    else
      shape.push_back(row);
    const bool reads_cache = of_keys && role == Role::input;
    TensorSpec& spec = add({name, reads_cache ? layer_.kv_dtype() : layer_.dtype, shape, role,
                            reads_cache ? cache_deviation(layer_.cache_format) : 1});
    spec.behind = row - (heads - 1) * head - features;
    return spec;
  }
  TensorSpec& add_output(const char* name, Rows rows) {
    TensorSpec& spec = add_rows(name, Role::output, {rows.of_keys, rows.features, rows.features});
    // Rows are averages over as many keys, or sums over as many queries, as there are for them.
    // The elements of a head of 2 or 4 features may all cancel: a token's heads count together, if
    // they have at least 8, and all rows otherwise.
    const std::int64_t row = (rows.of_keys ? layer_.kv_heads : layer_.heads) * rows.features;
    spec.alike = rows.features > 4 ? rows.features : row >= 8 ? row : 0;
    return spec;
  }
  TensorSpec& add_lse(Role role) {
    std::vector<std::int64_t> shape{layer_.b, layer_.heads, layer_.s};
    if (layer_.layout == Layout::thd) shape = {layer_.heads, layer_.s};
    return add({"lse", DType::f32, shape, role, 1});
  }
  TensorSpec& add(TensorSpec spec) {
    tensors_.push_back(std::move(spec));
    return tensors_.back();
  }

  std::vector<TensorSpec> tensors() && { return std::move(tensors_); }

 private:
  const Layer& layer_;
  std::vector<TensorSpec> tensors_;
};

void add_pages(const Layer& layer, TensorList& list) {
  if (layer.page == 0) return;
  list.add({"pages", DType::i32, {layer.b, layer.pages_of_sequence()}}).draw =
      [all = layer.pages](std::uint64_t seed, std::span<double> values) {
        draw_pages(seed, all, values);
      };
}

void add_masks(const Layer& layer, TensorList& list) {
  const auto draw_by = [&](auto draw) {
    return [draw, layer](std::uint64_t, std::span<double> values) {
      draw(layer.mask_data, layer.mask_heads(), layer.s, layer.kv, values);
    };
  };
  const std::int64_t heads = layer.mask_heads();
  if (layer.mask == Mask::boolean) {
    list.add({"mask", DType::u8, {layer.b, heads, layer.s, layer.kv}}).draw = draw_by(draw_mask);
  } else if (layer.mask == Mask::packed) {
    list.add({"mask_bits", DType::i32, {layer.b, heads, layer.s, mask_words(layer.kv)}}).draw =
        draw_by(draw_mask_bits);
    const auto tiles = [](std::int64_t extent) { return (extent + mask_tile - 1) / mask_tile; };
    list.add({"mask_flags", DType::u8, {layer.b, heads, tiles(layer.s), tiles(layer.kv)}}).draw =
        draw_by(draw_mask_flags);
  }
}

/// The tensors that decide which keys a query sees and how they count, in the order of the C API's
/// buffers.
void add_rules(const Layer& layer, TensorList& list) {
  add_masks(layer, list);
  if (layer.bias)
    list.add({"bias",
              layer.dtype,
              {layer.bias_of_sequence ? layer.b : 1, layer.bias_of_head ? layer.heads : 1, layer.s,
               layer.kv},
              Role::input,
              1});
  if (layer.layout == Layout::thd)
    list.add({"offsets", DType::i32, {layer.b + 1}}).draw =
        [tokens = layer.s](std::uint64_t, std::span<double> values) {
          draw_offsets(tokens, values);
        };
  if (layer.kv_offsets)
    list.add({"kv_offsets", DType::i32, {layer.b + 1}}).draw =
        [tokens = layer.kv](std::uint64_t, std::span<double> values) {
          draw_offsets(tokens, values);
        };
  if (layer.lengths)
    list.add({"lengths", DType::i32, {layer.b}}).draw =
        [most = layer.usual_kv()](std::uint64_t, std::span<double> values) {
          draw_lengths(most, values);
        };
  if (layer.sinks) list.add({"sinks", DType::f32, {layer.heads}, Role::input, 1});
  for (TensorSpec& scale : cache_scale_tensors(layer.cache_format, layer.kv_heads))
    list.add(std::move(scale));
}

std::vector<TensorSpec> tensors_of(const Layer& layer) {
  TensorList list(layer);
  if (layer.backward) list.add_rows("d_out", Role::input, list.of_out());
  // Scores have deviation 1 whatever the scale is.
  list.add_rows("q", Role::input, list.of_q(), layer.q_row).scale =
      1 / (static_cast<double>(layer.scale) * std::sqrt(static_cast<double>(layer.dim)));
  list.add_rows("k", Role::input, list.of_k(), layer.k_row);
  list.add_rows("v", Role::input, list.of_v(), layer.v_row);
  if (layer.backward) {
    // An average over all keys.
    auto& out = list.add_rows("out", Role::input, list.of_out());
    out.scale = 1 / std::sqrt(static_cast<double>(layer.kv));
    out.kept = true;
    auto& lse = list.add_lse(Role::input);
    lse.draw = [layer](std::uint64_t seed, std::span<double> values) {
      draw_lse(layer, seed, values);
    };
    lse.kept = true;
  }
  add_pages(layer, list);
  add_rules(layer, list);
  if (!layer.backward) {
    list.add_output("out", list.of_out());
    if (layer.lse) list.add_lse(Role::output);
    return std::move(list).tensors();
  }
  list.add_output("dq", list.of_q()).any_order = !layer.deterministic;
  list.add_output("dk", list.of_k());
  list.add_output("dv", list.of_v());
  if (layer.sinks) list.add({"d_sinks", DType::f32, {layer.heads}, Role::output, 1});
  return std::move(list).tensors();
}

/// Pairs of a query and a key that it is allowed, of a head in all sequences; with a mask in memory
/// all that the other rules allow. Packed sequences count as equally long ones.
struct Pairs {
  double count = 0;
  /// As many weights of one size have errors that average as those of the pairs do: a row's weights
  /// are about 1/n of its n keys, so that rows of few keys outweigh others.
  double alike = 0;
};

Pairs pairs_of(const Layer& layer) {
  const bool packed = layer.layout == Layout::thd;
  const double sequences = static_cast<double>(layer.b);
  const std::int64_t queries = packed ? (layer.s + layer.b - 1) / layer.b : layer.s;
  const std::int64_t keys =
      packed && layer.page == 0 ? (layer.kv + layer.b - 1) / layer.b : layer.usual_kv();
  Pairs pairs;
  double squares = 0, fourth_powers = 0;  // of the weights
  for (std::int64_t i = 0; i < queries; ++i) {
    const std::int64_t position = i + keys - queries;
    const std::int64_t end =
        layer.mask == Mask::causal ? std::clamp<std::int64_t>(position + 1, 0, keys) : keys;
    const std::int64_t begin =
        layer.window > 0 ? std::clamp<std::int64_t>(position - layer.window + 1, 0, end) : 0;
    if (begin == end) continue;
    const auto seen = static_cast<double>(end - begin);
    pairs.count += seen;
    squares += 1 / seen;
    fourth_powers += 1 / (seen * seen * seen);
  }
  pairs.count *= sequences;
  if (squares > 0) pairs.alike = sequences * squares * squares / fourth_powers;
  return pairs;
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> fields{
      {.name = "mask",
       .help = "keys that a query may see: all, those up to its position, or by a mask of bytes "
               "or of bits",
       .choices = {"none", "causal", "bool", "packed"}},
      rare_option("layout", "order of q, k and v: [b, s, heads, dim], or packed sequences",
                  {"bshd", "thd"}),
      rare_option("mask-heads", "masks of a sequence: one, or each head's own", {"one", "each"}),
      mask_data_option(),
      rare_option("bias", "whether a matrix is added to the scores", {"no", "yes"}),
      rare_option("bias-heads", "biases of a sequence: each head's own, or one", {"each", "one"}),
      rare_option("bias-sequences", "biases: one for all sequences, or each one's own",
                  {"one", "each"}),
      lengths_option(),
      rare_option("sinks", "whether each head has a logit that joins the softmax without a value",
                  {"no", "yes"}),
      rare_option("lse",
                  "whether the log of the sum of exponentials is written for a backward pass",
                  {"no", "yes"}, "fwd"),
      batch_invariant_option(),
      rare_option("deterministic", "whether every run gives the same bits", {"no", "yes"}, "bwd"),
      rare_number("softcap", "scores become softcap * tanh(score / softcap); 0: they stay", "0",
                  {0, 1e6}),
      rare_number("scale", "factor of the scores; 0: 1 / sqrt(dim)", "0", {0, 1e6})};
  for (OptionField& field : cache_format_options("fwd")) fields.push_back(std::move(field));
  return fields;
}

// The baseline that a user would take is another library's kernels: bench/ compares with PyTorch's.
OpFacts facts() {
  return {
      .name = "attention",
      .summary = "attention: out = softmax(scale * q k^T + mask) v, without scores in memory",
      .sizes =
          {token_count("s", "queries of a sequence; in layout thd of all sequences together",
                       {512, 2048, 8192}, {512}, most_tokens, 2048),
           {.name = "b", .help = "sequences", .max = 65536, .example = 4},
           {.name = "heads", .help = "heads of q", .max = most_heads, .example = 32},
           {.name = "dim",
            .help = "features of a head, an even number",
            .max = most_dim,
            .example = 128},
           rare_size("v-dim",
                     "features of a head of v, an even number, if they are not as many as those of "
                     "q and k",
                     most_dim, 128, same_as("dim")),
           rare_size("kv",
                     "keys of a sequence, in layout thd of all sequences together, with pages the "
                     "most of a sequence; s if left out",
                     most_tokens, 8192, usual_kv),
           kv_heads_size("heads of k and v, which divide those of q", most_heads, 8),
           rare_size("window",
                     "keys to the left that a query sees, itself included; all if left out",
                     most_tokens, 1024),
           page_size("keys of a page of k and v, a power of two from 16 to 256", 256),
           pages_size(most_tokens),
           rare_size("q-row",
                     "stride of q between tokens, in elements, for a part of a packed row; "
                     "heads * dim if left out",
                     most_stride, 6144, usual_q_row),
           rare_size("k-row", "as q-row, for k; kv-heads * kv-head if left out", most_stride, 6144,
                     usual_k_row),
           rare_size("v-row",
                     "as q-row, for v; kv-heads * kv-head, or kv-heads * v-dim, if left out",
                     most_stride, 6144, usual_v_row),
           neutral(rare_size(
               "kv-head",
               "stride of k and of v between heads, in elements, a multiple of dim; dim if left "
               "out",
               most_stride, 256, same_as("dim")))},
      .options = option_fields(),
      .token_size = "s",
      .rows_are_alike = false,
      .families = {families}};
}

class Attention final : public DescribedOp {
 public:
  Attention() : DescribedOp(facts()) {}

  std::string contradiction(const Problem& problem) const override;

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return tensors_of(layer_of(problem));
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Layer layer = layer_of(problem);
    const auto tensors = tensors_of(layer);
    StageSpec stage = whole_stage(stage_of_pass(problem.pass), tensors);
    // Only this tensor's part of a packed row is read.
    for (const auto& [tokens, row, used, dtype] :
         {std::tuple{layer.q_tokens(), layer.q_row, layer.heads * layer.dim, layer.dtype},
          std::tuple{layer.kv_tokens(), layer.k_row, layer.kv_heads * layer.dim, layer.kv_dtype()},
          std::tuple{layer.kv_tokens(), layer.v_row, layer.kv_heads * layer.v_dim,
                     layer.kv_dtype()}})
      stage.bytes -= static_cast<double>(tokens) * static_cast<double>(row - used) *
                     static_cast<double>(dtype_bytes(dtype));
    stage.reduction_length = layer.dim + layer.kv;
    if (layer.backward) stage.reduction_length += layer.v_dim + layer.s * layer.group();
    if (layer.backward && layer.sinks) stage.reduction_length += layer.q_tokens();
    // Weights, and in the backward pass the gradients of scores, for the tensor cores.
    stage.inner_roundings = layer.dtype == DType::f32 ? 0 : 1;
    // A mask in memory may leave few of those; a gradient has a normal factor, whose fourth moment
    // is three times the square of its second.
    const bool masked = layer.mask == Mask::boolean || layer.mask == Mask::packed;
    // A bias of deviation 1 makes weights as unlike again.
    const Pairs pairs = pairs_of(layer);
    stage.inner_values = pairs.alike * static_cast<double>(layer.heads) / (masked ? 4 : 1) /
                         (layer.backward ? 3 : 1) / (layer.bias ? std::exp(4.0) : 1);
    // Scores are sums of products of two normal numbers. Weights of few features have no fourth
    // moment, so that some outweigh many others; those of 2 and 4 have no second one either.
    if (layer.dim <= 16) stage.inner_values /= 8;
    if (layer.dim <= 4) stage.inner_values = 1;
    // Backward: the scores, dq and dk, and the gradient of the weights and dv.
    stage.flops = pairs.count * static_cast<double>(layer.heads) *
                  static_cast<double>(layer.backward ? 6 * layer.dim + 4 * layer.v_dim
                                                     : 2 * layer.dim + 2 * layer.v_dim);
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    attention::reference(problem, tensors, parallel);
  }
};

std::string Attention::contradiction(const Problem& problem) const {
  const Layer layer = layer_of(problem);
  const bool thd = layer.layout == Layout::thd;
  if (layer.heads % layer.kv_heads != 0)
    return fmt::format("kv-heads={} do not divide heads={}", layer.kv_heads, layer.heads);
  if (layer.dim % 2 != 0) return fmt::format("dim={} is odd: give an even one", layer.dim);
  if (layer.v_dim % 2 != 0) return fmt::format("v-dim={} is odd: give an even one", layer.v_dim);
  if (layer.v_dim != layer.dim && problem.sizes.contains("kv-head"))
    return "kv-head with v-dim: heads of k and of v are not equally far apart";
  if (layer.page != 0 && (layer.page < 16 || (layer.page & (layer.page - 1)) != 0))
    return fmt::format("page={} is not 16, 32, 64, 128 or 256", layer.page);
  if (layer.page == 0 && problem.sizes.contains("pages"))
    return "pages without page: k and v are contiguous";
  if (layer.page != 0 && layer.backward)
    return "page in pass bwd: gradients are of contiguous keys";
  if (layer.kv_head % layer.dim != 0)
    return fmt::format("kv-head={} is no multiple of dim={}", layer.kv_head, layer.dim);
  if (layer.backward && layer.kv_head != layer.dim)
    return "kv-head in pass bwd: gradients are of heads that follow each other";
  // The last head may end before the next one would begin.
  const std::int64_t k_width = (layer.kv_heads - 1) * layer.kv_head + layer.dim;
  const std::int64_t v_width = (layer.kv_heads - 1) * layer.v_head + layer.v_dim;
  for (const auto& [name, row, width] :
       {std::tuple{"q", layer.q_row, layer.heads * layer.dim},
        std::tuple{"k", layer.k_row, k_width}, std::tuple{"v", layer.v_row, v_width}})
    if (row < width)
      return fmt::format("{}-row={} is less than its heads * dim = {}", name, row, width);
  if (layer.page != 0 && (problem.sizes.contains("k-row") || problem.sizes.contains("v-row")))
    return "k-row or v-row with page: a page has rows of kv-heads * dim";
  if (thd && layer.masked())
    return "mask=" + problem.option("mask") + " with layout=thd: it has a row for each query of b";
  if (thd && layer.bias) return "bias=yes with layout=thd: it has a row for each query of b";
  if (thd && layer.page == 0 && layer.lengths)
    return "lengths=yes with layout=thd: the offsets give the keys of a sequence";
  if (thd && layer.page != 0 && !layer.lengths)
    return "page with layout=thd and lengths=no: only lengths give the keys of a sequence";
  if (!layer.masked() && layer.mask_of_head)
    return "mask-heads=each without a mask in memory: use mask=bool or mask=packed";
  if (!layer.masked() && problem.options.contains("mask-data"))
    return "mask-data without a mask in memory: use mask=bool or mask=packed";
  if (!layer.bias && (problem.has("bias-heads", "one") || layer.bias_of_sequence))
    return "bias-heads or bias-sequences without bias=yes";
  return cache_format_contradiction(problem);
}

}  // namespace

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(
      problem,
      {{"b", &Layer::b}, {"s", &Layer::s}, {"heads", &Layer::heads}, {"dim", &Layer::dim}});
  layer.kv = size_or(problem, "kv", layer.s);
  layer.kv_heads = size_or(problem, "kv-heads", layer.heads);
  layer.v_dim = size_or(problem, "v-dim", layer.dim);
  layer.window = size_or(problem, "window", 0);
  layer.page = size_or(problem, "page", 0);
  if (layer.page > 0) layer.pages = size_or(problem, "pages", layer.b * layer.pages_of_sequence());
  layer.q_row = size_or(problem, "q-row", layer.heads * layer.dim);
  layer.kv_head = size_or(problem, "kv-head", layer.dim);
  layer.k_row = size_or(problem, "k-row", layer.kv_heads * layer.kv_head);
  layer.v_head = layer.v_dim == layer.dim ? layer.kv_head : layer.v_dim;
  layer.v_row = size_or(problem, "v-row", layer.kv_heads * layer.v_head);
  layer.layout = problem.has("layout", "thd") ? Layout::thd : Layout::bshd;
  layer.mask = problem.has("mask", "causal")   ? Mask::causal
               : problem.has("mask", "bool")   ? Mask::boolean
               : problem.has("mask", "packed") ? Mask::packed
                                               : Mask::none;
  layer.mask_data =
      mask_data_named(problem.options.contains("mask-data") ? problem.option("mask-data") : "");
  layer.mask_of_head = problem.has("mask-heads", "each");
  layer.bias = problem.has("bias", "yes");
  layer.bias_of_head = layer.bias && !problem.has("bias-heads", "one");
  layer.bias_of_sequence = problem.has("bias-sequences", "each");
  layer.kv_offsets = layer.layout == Layout::thd && layer.page == 0 && problem.sizes.contains("kv");
  layer.lengths = problem.has("lengths", "yes");
  layer.sinks = problem.has("sinks", "yes");
  layer.backward = problem.pass == "bwd";
  layer.lse = !layer.backward && problem.has("lse", "yes");
  layer.deterministic = problem.has("deterministic", "yes");
  layer.batch_invariant = is_batch_invariant(problem);
  layer.softcap = static_cast<float>(number_of(problem, "softcap"));
  layer.scale = static_cast<float>(number_of(problem, "scale"));
  if (layer.scale == 0)
    layer.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(layer.dim)));
  layer.cache_format = cache_format(problem);
  layer.dtype = problem.dtype;
  return layer;
}

Places places_of(const Problem& problem) {
  const TensorPlaces tensors(tensors_of(layer_of(problem)));
  Places places;
  places.d_out = tensors.at("d_out");
  places.q = tensors.at("q");
  places.k = tensors.at("k");
  places.v = tensors.at("v");
  places.out = tensors.at("out");
  places.lse = tensors.at("lse");
  places.pages = tensors.at("pages");
  places.mask = tensors.at("mask");
  places.mask_bits = tensors.at("mask_bits");
  places.mask_flags = tensors.at("mask_flags");
  places.bias = tensors.at("bias");
  places.offsets = tensors.at("offsets");
  places.kv_offsets = tensors.at("kv_offsets");
  places.lengths = tensors.at("lengths");
  places.sinks = tensors.at("sinks");
  places.k_scale = tensors.at("k_scale");
  places.v_scale = tensors.at("v_scale");
  places.dq = tensors.at("dq");
  places.dk = tensors.at("dk");
  places.dv = tensors.at("dv");
  places.d_sinks = tensors.at("d_sinks");
  places.count = tensors.count();
  return places;
}

}  // namespace fftune::attention

const fftune::Op& fftune::attention_op() {
  static const attention::Attention op;
  return op;
}
