#include <algorithm>
#include <cmath>
#include <vector>

#include "core/hash.hpp"
#include "device/group_layout.hpp"
#include "device/parallel.hpp"
#include "kernels/all_reduce/all_reduce.hpp"

namespace fftune::all_reduce {
namespace {

constexpr std::int64_t most_features = 65536;

static_assert(sizeof(GroupTable) == sizeof(group_table) &&
              offsetof(GroupTable, rank) == offsetof(group_table, rank) &&
              offsetof(GroupTable, packets) == offsetof(group_table, packets) &&
              offsetof(GroupTable, status) == offsetof(group_table, status) &&
              GroupTable::most_ranks == most_ranks &&
              GroupTable::header_bytes == group_header_bytes);

OpFacts facts() {
  SizeField ranks;
  ranks.name = "ranks";
  ranks.help = "ranks of the group";
  ranks.max = most_ranks;
  ranks.example = 2;
  return {
      .name = "all-reduce",
      .summary = "sum of x over the ranks of a group, with the residual and RMSNorm behind it",
      .passes = {"fwd"},
      .sizes = {row_tokens(),
                {.name = "d", .help = "features of a token", .max = most_features, .example = 4096},
                ranks},
      .options =
          {{"norm",
            "RMSNorm of the sum, by rmsnorm's convention",
            {"none", "llama", "gemma", "t5"}},
           {"residual", "add a residual to the sum; with a norm, write the sum too", {"no", "yes"}},
           {.name = "eps",
            .help = "added to the mean square",
            .choices = {"1e-06"},
            .number = NumberRange{0, 1}},
           {.name = "output",
            .help = "element type of the norm: the op's; fp8 with a scale for each token; or fp8 "
                    "with a given scale",
            .choices = {"same", "fp8", "fp8-static"},
            .rare = true},
           {.name = "link",
            .help = "peers: through a group's memory; nccl: by NCCL; loopback: one rank plays "
                    "all, with equal x",
            .choices = {"loopback", "peers", "nccl"},
            .rare = true}},
      .families = {cuda_families, cpu_families},
      .contradiction = [](const Problem& problem) -> std::string {
        if (problem.has("norm", "none") && problem.options.contains("output"))
          return "output=" + problem.option("output") + " without a norm: a sum is not quantised";
        return "";
      }};
}

class AllReduce final : public DescribedOp {
 public:
  AllReduce() : DescribedOp(facts()) {}

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    const Form form = form_of(problem);
    const auto matrix = [&](const char* name, Role role) {
      return TensorSpec{name, form.dtype, {form.m, form.d}, role, 1};
    };
    std::vector<TensorSpec> tensors{matrix("x", Role::input)};
    if (form.adds) tensors.push_back(matrix("residual", Role::input));
    if (form.adds && form.normalises) tensors.back().may_alias = "sum";
    if (form.normalises) {
      tensors.push_back({"w", form.dtype, {form.d}, Role::input, 1});
      // In gemma's convention w is the factor's distance from 1.
      if (form.convention == "gemma") tensors.back().scale = 0.25;
    }
    if (form.scale_given) {
      tensors.push_back({"y_scale", DType::f32, {1}, Role::input, 1});
      tensors.back().draw = [](std::uint64_t, std::span<double> values) { values[0] = 0.0625; };
    }
    if (!form.loopback) tensors.push_back(group_tensor());
    tensors.push_back(matrix("y", Role::output));
    if (form.quantises) tensors.back().dtype = DType::fp8;
    if (form.adds && form.normalises) tensors.push_back(matrix("sum", Role::output));
    if (form.quantises && !form.scale_given)
      tensors.push_back({"scale", DType::f32, {form.m}, Role::output, 1});
    return tensors;
  }

  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Form form = form_of(problem);
    StageSpec stage = whole_stage(stage_forward, tensors(problem));
    stage.reduction_length =
        form.normalises ? std::max<std::int64_t>(form.d, form.ranks) : form.ranks;
    stage.flops = static_cast<double>(form.m) * static_cast<double>(form.d) *
                  (form.ranks - 1 + (form.adds ? 1 : 0) + (form.normalises ? 4 : 0));
    // Two shots send a rounded sum. Then the sum with the residual is rounded elsewhere than the
    // reference's, and so is the normalised value.
    stage.inner_roundings = form.ranks == 1 ? 0 : form.normalises ? 3 : 1;
    // NCCL rounds what each rank adds.
    if (form.nccl) stage.inner_roundings += std::max(0, form.ranks - 2);
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    const Form form = form_of(problem);
    const auto d = static_cast<std::size_t>(form.d);
    const auto m = static_cast<std::size_t>(form.m);
    const auto& x = tensors.at("x");
    auto sum = large_vector<double>(x.size(), parallel);
    auto y = large_vector<double>(x.size(), parallel);
    std::vector<double> scales(m);
    for_each_row(m, d, parallel, [&](std::size_t row) {
      double squares = 0;
      for (std::size_t i = row * d; i < (row + 1) * d; ++i) {
        sum[i] = form.ranks * x[i];
        if (form.adds) sum[i] += tensors.at("residual")[i];
        y[i] = form.normalises ? round_to(form.dtype, sum[i]) : sum[i];
        squares += y[i] * y[i];
      }
      if (!form.normalises) return;
      const double r = 1 / std::sqrt(squares / static_cast<double>(form.d) + double{form.eps});
      for (std::size_t i = row * d; i < (row + 1) * d; ++i) {
        const double w = tensors.at("w")[i - row * d];
        const double value = y[i] * r;
        y[i] =
            (form.convention == "llama" && !form.quantises ? round_to(form.dtype, value) : value) *
            (form.convention == "gemma" ? 1 + w : w);
      }
      if (!form.quantises) return;
      const std::span<double> of_row(y.data() + row * d, d);
      scales[row] = form.scale_given ? tensors.at("y_scale")[0]
                                     : scale_of(largest_magnitude(std::span<const double>(of_row)));
      for (double& value : of_row) value = std::clamp(value / scales[row], -448.0, 448.0);
    });
    tensors["y"] = std::move(y);
    if (form.adds && form.normalises) tensors["sum"] = std::move(sum);
    if (form.quantises && !form.scale_given) tensors["scale"] = std::move(scales);
  }
};

}  // namespace

bool is_loopback(const Problem& problem) {
  return !problem.has("link", "peers") && !problem.has("link", "nccl");
}

Form form_of(const Problem& problem) {
  Form form;
  form.m = problem.size("m");
  form.d = problem.size("d");
  form.ranks = static_cast<int>(problem.size("ranks"));
  form.dtype = problem.dtype;
  form.adds = problem.has("residual", "yes");
  form.normalises = !problem.has("norm", "none");
  form.convention = form.normalises ? problem.option("norm") : "t5";
  form.eps = static_cast<float>(problem.number("eps"));
  form.scale_given = problem.has("output", "fp8-static");
  form.quantises = form.scale_given || problem.has("output", "fp8");
  form.nccl = problem.has("link", "nccl");
  form.loopback = is_loopback(problem);
  return form;
}

TensorSpec group_tensor() {
  TensorSpec group{"group", DType::i64, {GroupTable::words}, Role::input, 1};
  group.draw = [](std::uint64_t, std::span<double> values) {
    std::fill(values.begin(), values.end(), 0.0);
  };
  return group;
}

std::optional<std::string> refuse_peers(const Problem& problem, const DeviceFacts& facts) {
  if (problem.has("link", "nccl") && facts.kind == DeviceKind::cpu)
    return "link=nccl: NCCL is for GPUs";
  if (problem.has("link", "nccl"))
    return "link=nccl: ranks do not reach each other's memory; all-reduce alone goes by NCCL";
  return std::nullopt;
}

group_table loopback_table(const Form& form) {
  const GroupTable layout = group_layout(form.ranks, static_cast<std::uint64_t>(form.bytes()));
  group_table table{};
  table.ranks = layout.ranks;
  table.timeout = 10'000'000'000;
  table.packets = layout.packets;
  table.packet_bytes = layout.packet_bytes;
  table.data = layout.data;
  table.data_bytes = layout.data_bytes;
  return table;
}

std::size_t loopback_bytes(const Form& form) {
  const GroupTable layout = group_layout(form.ranks, static_cast<std::uint64_t>(form.bytes()));
  if (form.ranks == 1) return GroupTable::header_bytes;  // nothing is sent
  return form.as_words ? group_bytes(layout) : layout.data + 2 * layout.ranks * layout.data_bytes;
}

std::uint32_t tag_of(const Problem& problem, const std::string& variant) {
  Problem told = problem;
  told.options.erase("link");
  const std::uint64_t hash = fnv1a(variant, fnv1a(told.text()));
  return static_cast<std::uint32_t>(hash ^ hash >> 32);
}

}  // namespace fftune::all_reduce

const fftune::Op& fftune::all_reduce_op() {
  static const all_reduce::AllReduce op;
  return op;
}
