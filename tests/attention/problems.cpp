#include "attention/problems.hpp"

namespace fftune::test {

Problem attention_problem(DeviceKind kind, const std::string& pass, DType dtype,
                          std::map<std::string, std::int64_t> sizes,
                          std::map<std::string, std::string> options) {
  return canonical(attention_op(), {"attention", pass, dtype, std::move(sizes), std::move(options)},
                   kind);
}

void draw_form(Draw& draw, bool backward, std::int64_t heads, std::int64_t dim,
               std::map<std::string, std::int64_t>& sizes,
               std::map<std::string, std::string>& options) {
  const std::int64_t kv_heads = sizes["kv-heads"];
  const bool thd = draw.below(3) == 0;
  if (thd) options["layout"] = "thd";
  if (!backward && draw.below(4) == 0) sizes["page"] = std::int64_t{16} << draw.below(5);
  const bool paged = sizes.contains("page");
  if (paged && draw.below(2)) sizes["pages"] = 200;
  if (paged ? thd || draw.below(2) == 0 : !thd && draw.below(4) == 0) options["lengths"] = "yes";
  options["mask"] =
      thd ? draw.of({"none", "causal"}) : draw.of({"none", "causal", "causal", "bool", "packed"});
  if (options["mask"] == "bool" || options["mask"] == "packed") {
    options["mask-heads"] = draw.of({"one", "each"});
    options["mask-data"] =
        draw.of({"random", "documents", "causal-documents", "upper", "all", "none"});
  }
  if (!thd && draw.below(4) == 0) {
    options["bias"] = "yes";
    options["bias-heads"] = draw.of({"one", "each"});
    options["bias-sequences"] = draw.of({"one", "each"});
  }
  if (draw.below(4) == 0) sizes["window"] = draw.size(9);
  if (draw.below(4) == 0) options["sinks"] = "yes";
  if (draw.below(4) == 0) options["softcap"] = "2";
  if (draw.below(4) == 0) options["scale"] = "0.25";
  if (!backward) options["lse"] = draw.of({"no", "yes"});
  if (backward) options["deterministic"] = draw.of({"no", "yes"});
  if (draw.below(4) == 0) sizes["q-row"] = (heads + 2 * kv_heads) * dim;
  const bool apart = !backward && draw.below(4) == 0;
  if (apart) sizes["kv-head"] = (2 + draw.below(2)) * dim;
  if (!paged && !apart && draw.below(4) == 0) sizes["k-row"] = (heads + 2 * kv_heads) * dim;
  if (!paged && draw.below(4) == 0) sizes["v-row"] = (heads + 3 * kv_heads) * dim;
}

Problem random_attention(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::string pass = draw.of({"fwd", "bwd"});
  std::int64_t dim = kind == DeviceKind::cuda
                         ? draw.of<std::int64_t>({64, 128, 96, 192, 256, 72, 8, 100, 20, 10, 2, 32,
                                                  80, 112, 136, 160, 224})
                         : 2 * draw.size(6);
  const auto room = [&](std::int64_t taken) {
    return std::max<std::int64_t>(1, most_elements / taken);
  };
  dim = std::min<std::int64_t>(std::max<std::int64_t>(2, room(1) / 2 * 2), dim);
  const std::int64_t kv_heads = std::min(draw.size(2), room(dim));
  const std::int64_t heads = kv_heads * std::min(draw.size(2), room(dim * kv_heads));
  const std::int64_t b = std::min(draw.size(2), room(heads * dim));
  const std::int64_t s = std::min(draw.size(10), room(b * heads * dim));
  std::map<std::string, std::int64_t> sizes{
      {"s", s}, {"b", b}, {"heads", heads}, {"dim", dim}, {"kv-heads", kv_heads}};
  if (draw.below(2)) sizes["kv"] = std::min(draw.size(10), room(b * kv_heads * dim));
  std::map<std::string, std::string> options;
  if (draw.below(3)) draw_form(draw, pass == "bwd", heads, dim, sizes, options);
  return attention_problem(kind, pass, draw.of(attention_op().dtypes(kind)), std::move(sizes),
                           std::move(options));
}

Problem random_attention_of_values(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  Problem problem = random_attention(kind, draw, most_elements / 2);
  auto& sizes = problem.sizes;
  const std::int64_t dim = sizes.at("dim");
  // Mostly fewer features than those of keys.
  const std::int64_t v_dim = draw.below(4) == 0   ? std::min<std::int64_t>(512, 2 * dim)
                             : draw.below(2) == 0 ? 2 * (1 + draw.below(dim / 2))
                                                  : std::max<std::int64_t>(2, dim / 3 * 2 / 2 * 2);
  sizes.erase("kv-head");
  if (sizes.contains("v-row")) sizes["v-row"] = (problem.size("heads") + 3) * 4 * v_dim;
  sizes["v-dim"] = v_dim;
  return attention_problem(kind, problem.pass, problem.dtype, sizes, problem.options);
}

}  // namespace fftune::test
