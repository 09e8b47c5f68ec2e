#include "qkv/problems.hpp"

namespace fftune::test {

Problem qkv_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options) {
  return canonical(qkv_op(), {"qkv", "fwd", dtype, std::move(sizes), std::move(options)}, kind);
}

Problem random_qkv(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const bool regular = draw.below(2);
  std::int64_t dim =
      regular ? draw.of<std::int64_t>({16, 32, 64, 96, 128, 192, 256}) : 2 * draw.size(6);
  const auto root = std::max<std::int64_t>(1, most_elements / 64);
  while (dim > 2 && dim > root) dim = dim / 4 * 2;
  const auto room = [&](std::int64_t taken) {
    return std::max<std::int64_t>(1, most_elements / taken);
  };
  const std::int64_t kv_heads = std::min(draw.size(3), room(dim * 8));
  const std::int64_t heads = std::min(kv_heads * draw.size(2), room(dim * 2));
  const std::int64_t columns = (heads + 2 * kv_heads) * dim;
  std::int64_t d = std::min(draw.size(most_elements < 1 << 24 ? 8 : 12), room(columns));
  if (regular && d > 4) d = (d + 7) / 8 * 8;
  const std::int64_t m = std::min(draw.size(draw.below(2) ? 9 : 4), room(columns + d));
  Sizes sizes{{"m", m}, {"d", d}, {"heads", heads}, {"dim", dim}};
  Options options{{"weights", draw.of({"separate", "packed", "grouped", "int4"})},
                  {"bias", draw.of({"no", "yes"})},
                  {"norm", draw.of({"no", "yes", "rows", "layer"})},
                  {"rotation", draw.of({"none", "halves", "interleaved"})},
                  {"cache", draw.of({"no", "yes"})}};
  if ((options["norm"] == "yes" || options["norm"] == "layer") && draw.below(3) == 0)
    options["norm-order"] = "after";
  if (options["weights"] == "separate" && draw.below(4) == 0) options["gates"] = "yes";
  if (draw.below(4) == 0) options["v-norm"] = "yes";
  const bool has_keys = draw.below(8) != 0;
  if (!has_keys) {
    options["keys"] = "no";
    options["weights"] = "separate";
    options["cache"] = "no";
    for (const char* name : {"gates", "v-norm"}) options.erase(name);
  }
  if (kv_heads != heads && has_keys) sizes["kv-heads"] = kv_heads;
  if (options["rotation"] != "none") {
    options["angles"] = draw.of({"table", "base", "llama3", "yarn"});
    if (draw.below(3) == 0) sizes["rotary"] = 2 * (1 + draw.below(dim / 2));
    if (options["angles"] == "table") sizes["positions"] = 1 + draw.below(100);
    if (draw.below(8) == 0) options["scale"] = "1.5";
  }
  if (options["cache"] == "yes") {
    options["slots"] = draw.of({"i32", "i64"});
    if (draw.below(2)) sizes["cache-slots"] = 1 + draw.below(2 * m);
    if (draw.below(3) == 0) sizes["cache-head"] = (2 + draw.below(2)) * dim;
  }
  if (options["weights"] == "int4") {
    options["group"] = d % 32 == 0 ? draw.of({"32", "row"}) : "row";
    options["zeros"] = draw.of({"no", "yes"});
  }
  return qkv_problem(kind, draw.of(qkv_op().dtypes(kind)), sizes, options);
}

}  // namespace fftune::test
