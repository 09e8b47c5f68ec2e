#include "kernels/rope/rope.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>

#include "core/saturated.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/test_data.hpp"
#include "kernels/rope/part.hpp"

namespace fftune::rope {
namespace {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;

/// Sequences of unlike lengths, some of them empty, that fill all tokens.
void draw_offsets(std::uint64_t seed, std::int64_t tokens, std::span<double> offsets) {
  std::mt19937_64 random(seed);
  for (double& offset : offsets)
    offset = static_cast<double>(random() % (static_cast<std::uint64_t>(tokens) + 1));
  offsets.front() = 0;
  offsets.back() = static_cast<double>(tokens);
  std::sort(offsets.begin(), offsets.end());
}

/// As far as a view's last element. Saturated, as strides and sizes are each in range, but their
/// products may be in none.
std::int64_t extent(const Layer& layer, const Strides& strides, std::int64_t heads) {
  const std::int64_t last = layer.tokens() - 1;
  std::int64_t end = saturated_product(last / layer.inner(), strides.outer);
  end = saturated_sum(end, saturated_product(last % layer.inner(), strides.row));
  end = saturated_sum(end, saturated_product(heads - 1, strides.head));
  return saturated_sum(end, layer.dim);
}

TensorSpec rows_of(const Layer& layer, const char* name, Role role, std::int64_t heads,
                   const Strides& strides) {
  std::vector<std::int64_t> shape{layer.s};
  if (layer.layout == Layout::sbhd) shape = {layer.s, layer.b};
  if (layer.layout == Layout::bshd) shape = {layer.b, layer.s};
  if (!layer.is_plain(strides, heads))
    shape = {extent(layer, strides, heads)};
  else if (strides.row == heads * layer.dim)
    shape.insert(shape.end(), {heads, layer.dim});
  else
    shape.push_back(strides.row);
  TensorSpec spec{name, layer.dtype, shape, role, 1};
  spec.behind = std::max<std::int64_t>(spec.elements() - extent(layer, strides, heads), 0);
  return spec;
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  std::vector<TensorSpec> tensors;
  for (const Side& side : sides_of(layer))
    tensors.push_back(rows_of(layer, side.in, Role::input, side.heads, side.strides));
  if (layer.table)
    tensors.push_back({"angles", DType::f32, {layer.positions, layer.rotary}, Role::input, 20});
  if (layer.layout == Layout::thd) {
    TensorSpec offsets{"offsets", DType::i32, {layer.b + 1}};
    offsets.draw = [tokens = layer.s](std::uint64_t seed, std::span<double> values) {
      draw_offsets(seed, tokens, values);
    };
    tensors.push_back(std::move(offsets));
  }
  if (layer.starts) {
    TensorSpec starts{"starts", DType::i32, {layer.b}};
    starts.draw = whole_numbers(0, 99);
    tensors.push_back(std::move(starts));
  }
  for (const Side& side : sides_of(layer)) {
    const std::int64_t row = side.heads * layer.dim;
    const std::int64_t outer = layer.layout == Layout::thd ? 0 : layer.inner() * row;
    tensors.push_back(rows_of(layer, side.out, Role::output, side.heads, {row, outer, layer.dim}));
  }
  return tensors;
}

/// `name` is q or k.
Strides strides_of(const Problem& problem, const Layer& layer, const std::string& name,
                   std::int64_t heads) {
  Strides strides;
  strides.head = size_or(problem, name + "-head", layer.dim);
  strides.row = size_or(problem, name + "-row", heads * layer.dim);
  if (layer.layout != Layout::thd)
    strides.outer = size_or(problem, name + "-outer", layer.inner() * strides.row);
  return strides;
}

/// The error in the strides, or nothing.
std::string wrong_strides(const Problem& problem, const Layer& layer, const std::string& name,
                          const Strides& strides, std::int64_t heads) {
  const bool own_heads = problem.sizes.contains(name + "-head");
  if (!own_heads && strides.row < heads * layer.dim)
    return fmt::format("{}-row={} is less than {}heads * dim = {}", name, strides.row,
                       name == "q" ? "" : "kv-", heads * layer.dim);
  if (strides.head < layer.dim)
    return fmt::format("{}-head={} is less than dim={}", name, strides.head, layer.dim);
  if (strides.row < layer.dim)
    return fmt::format("{}-row={} is less than dim={}", name, strides.row, layer.dim);
  if (layer.layout == Layout::thd && problem.sizes.contains(name + "-outer"))
    return fmt::format("{}-outer with layout=thd: its tokens have one dimension", name);
  return "";
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.rotary > layer.dim)
    return fmt::format("rotary={} exceeds dim={}", layer.rotary, layer.dim);
  if (layer.rotary % 2 != 0)
    return fmt::format("rotary={} is odd: features are rotated in pairs", layer.rotary);
  if (auto wrong = wrong_strides(problem, layer, "q", layer.q, layer.heads); !wrong.empty())
    return wrong;
  if (layer.kv_heads > 0)
    if (auto wrong = wrong_strides(problem, layer, "k", layer.k, layer.kv_heads); !wrong.empty())
      return wrong;
  for (const char* size : {"k-row", "k-outer", "k-head"})
    if (layer.kv_heads == 0 && problem.sizes.contains(size))
      return fmt::format("{} without kv-heads: there is no k", size);
  if (auto wrong = contradiction_of_angles(rope_op(), problem); !wrong.empty()) return wrong;
  if (!layer.table && problem.sizes.contains("positions"))
    return "positions are those of a table: angles=" + problem.option("angles") + " has none";
  return "";
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  const auto tokens = static_cast<double>(layer.tokens());
  // Only this tensor's part of a packed row, or of another view, is read.
  for (const auto& [in, out, heads, strides] : sides_of(layer)) {
    const double held = layer.is_plain(strides, heads)
                            ? tokens * static_cast<double>(strides.row)
                            : static_cast<double>(extent(layer, strides, heads));
    stage.bytes -= (held - tokens * static_cast<double>(heads * layer.dim)) *
                   static_cast<double>(dtype_bytes(layer.dtype));
  }
  stage.reduction_length = 2;
  stage.flops = 3 * tokens * static_cast<double>((layer.heads + layer.kv_heads) * layer.rotary);
}

// Sizes that are left out (SizeField::when_absent): the table's rows, and strides of q or k.

std::optional<std::int64_t> table_positions(const Problem& problem) {
  return problem.has("angles", "table") ? same_as("s")(problem) : std::nullopt;
}

std::optional<std::int64_t> usual_row(const Problem& problem, bool of_k) {
  if (of_k && !problem.sizes.contains("kv-heads")) return std::nullopt;
  return saturated_product(size_or(problem, of_k ? "kv-heads" : "heads", 0),
                           size_or(problem, "dim", 0));
}

WhenAbsent row_of(bool of_k) {
  return [=](const Problem& problem) { return usual_row(problem, of_k); };
}

WhenAbsent outer_of(bool of_k) {
  return [=](const Problem& problem) -> std::optional<std::int64_t> {
    const auto row = usual_row(problem, of_k);
    if (!row || problem.has("layout", "thd")) return std::nullopt;
    const std::int64_t inner = size_or(problem, problem.has("layout", "sbhd") ? "b" : "s", 0);
    return saturated_product(inner, size_or(problem, of_k ? "k-row" : "q-row", *row));
  };
}

WhenAbsent head_of(bool of_k) {
  return [=](const Problem& problem) -> std::optional<std::int64_t> {
    // Heads with a stride of their own may be farther apart than tokens.
    const auto row = usual_row(problem, of_k);
    if (!row || size_or(problem, of_k ? "k-row" : "q-row", *row) < *row) return std::nullopt;
    return same_as("dim")(problem);
  };
}

OpFacts facts() {
  return {
      .name = "rope",
      .summary =
          "rotary position embedding of queries and keys: y = x * cos(f) + rotated(x) * sin(f)",
      .sizes = {token_count("s", "tokens of a sequence; in layout thd of all sequences together",
                            {512, 2048, 8192}, {512}, std::int64_t{1} << 24, 2048),
                {.name = "b", .help = "sequences", .max = 65536, .example = 2},
                {.name = "heads", .help = "heads of q", .max = most_heads, .example = 32},
                {.name = "dim", .help = "features of a head", .max = most_features, .example = 128},
                rare_size("kv-heads", "heads of k, rotated in the same launch; none if left out",
                          most_heads, 8),
                rare_size("rotary", "features of a head to rotate, an even number; all if left out",
                          most_features, 64, same_as("dim")),
                positions_size("s", table_positions),
                rare_size("q-row",
                          "stride of q between tokens, in elements, for a part of a packed row; "
                          "heads * dim if left out",
                          most_stride, 6144, row_of(false)),
                rare_size("q-outer",
                          "stride of q between sequences in bshd, between positions in sbhd; "
                          "contiguous if left out",
                          most_stride, 12582912, outer_of(false)),
                rare_size("q-head", "stride of q between heads; dim if left out", most_stride,
                          262144, head_of(false)),
                rare_size("k-row", "as q-row, for k; kv-heads * dim if left out", most_stride, 6144,
                          row_of(true)),
                rare_size("k-outer", "as q-outer, for k", most_stride, 12582912, outer_of(true)),
                rare_size("k-head", "as q-head, for k; dim if left out", most_stride, 262144,
                          head_of(true))},
      .options =
          {{"layout",
            "order of q and k: [s, b, heads, dim], [b, s, heads, dim], or packed sequences",
            {"sbhd", "bshd", "thd"}},
           {"rotation",
            "pairs are features rotary/2 apart, or neighbours",
            {"halves", "interleaved"}},
           {"angles",
            "a table is given, or the rule by which frequencies are computed",
            {"table", "base", "llama3", "yarn"}},
           {.name = "starts",
            .help = "each sequence's first position is given",
            .choices = {"no", "yes"},
            .rare = true,
            .performance_neutral = true},
           rare_number("base", "base of the computed frequencies", "10000", {1, 1e12}),
           rare_number("factor", "factor by which the rule stretches positions", "1", {1e-3, 1e6}),
           rare_number("context", "positions that the model was trained with", "8192", {1, 1e9}),
           rare_number("low", "llama3: context/low is the longest wavelength that is interpolated",
                       "1", {1e-3, 1e6}),
           rare_number("high", "llama3: context/high is the longest wavelength that is left alone",
                       "4", {1e-3, 1e6}),
           rare_number("beta-fast",
                       "yarn: rotations in the context from which a pair is left alone", "32",
                       {1e-3, 1e6}),
           rare_number("beta-slow",
                       "yarn: rotations in the context up to which a pair is stretched", "1",
                       {1e-3, 1e6}),
           rare_number("scale", "factor of all sines and cosines; 0: the rule's own", "0",
                       {0, 1e6})},
      .token_size = "s",
      .rows_are_alike = false,
      .families = {cuda_families, cpu_families},
      .baselines = baselines,
      .contradiction = contradiction,
      .stage = {.tensors = tensors_of, .complete = complete_stage, .reference = reference}};
}

}  // namespace

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(
      problem,
      {{"s", &Layer::s}, {"b", &Layer::b}, {"heads", &Layer::heads}, {"dim", &Layer::dim}});
  layer.kv_heads = size_or(problem, "kv-heads", 0);
  layer.rotary = size_or(problem, "rotary", layer.dim);
  layer.positions = size_or(problem, "positions", layer.s);
  const auto& layout = problem.option("layout");
  layer.layout = layout == "sbhd" ? Layout::sbhd : layout == "bshd" ? Layout::bshd : Layout::thd;
  layer.q = strides_of(problem, layer, "q", layer.heads);
  layer.k = strides_of(problem, layer, "k", layer.kv_heads);
  layer.rotation =
      problem.option("rotation") == "halves" ? Rotation::halves : Rotation::interleaved;
  layer.backward = problem.pass == "bwd";
  layer.table = problem.option("angles") == "table";
  layer.starts = problem.has("starts", "yes");
  layer.dtype = problem.dtype;
  return layer;
}

std::vector<Side> sides_of(const Layer& layer) {
  const bool back = layer.backward;
  std::vector<Side> sides{{back ? "dq_out" : "q", back ? "dq" : "q_out", layer.heads, layer.q}};
  if (layer.kv_heads > 0)
    sides.push_back({back ? "dk_out" : "k", back ? "dk" : "k_out", layer.kv_heads, layer.k});
  return sides;
}

}  // namespace fftune::rope

const fftune::Op& fftune::rope_op() {
  static const DescribedOp op(rope::facts());
  return op;
}
