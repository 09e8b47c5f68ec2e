#include "rope/problems.hpp"

namespace fftune::test {

Problem rope_problem(DeviceKind kind, const std::string& pass, DType dtype,
                     std::map<std::string, std::int64_t> sizes,
                     std::map<std::string, std::string> options) {
  return canonical(rope_op(), {"rope", pass, dtype, std::move(sizes), std::move(options)}, kind);
}

void draw_view(Draw& draw, std::map<std::string, std::int64_t>& sizes, const std::string& name,
               std::array<std::int64_t, 3> counts, std::int64_t dim) {
  const std::array<std::string, 3> strides{"-outer", "-row", "-head"};
  std::array<std::size_t, 3> order{0, 1, 2};
  std::shuffle(order.begin(), order.end(), draw.random());
  std::int64_t stride = dim;
  for (const std::size_t i : order) {
    stride += 8 * draw.below(2);
    sizes[name + strides[i]] = stride;
    stride *= counts[i];
  }
}

Problem random_rope(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  std::int64_t dim = 2 * draw.size(7);
  if (draw.below(2)) dim = (dim + 15) / 16 * 16;
  dim = std::min(dim, rope::most_features);
  const auto room = [&](std::int64_t taken) {
    return std::max<std::int64_t>(1, most_elements / taken);
  };
  const std::int64_t heads = std::min(draw.size(4), room(dim));
  const std::int64_t kv_heads = draw.below(2) ? std::min(draw.size(3), room(dim * heads)) : 0;
  const std::int64_t row = (heads + 2 * kv_heads) * dim;
  const std::int64_t b = std::min(draw.size(3), room(row));
  const std::int64_t s = std::min(draw.size(9), room(row * b));
  std::map<std::string, std::int64_t> sizes{{"s", s}, {"b", b}, {"heads", heads}, {"dim", dim}};
  std::map<std::string, std::string> options{
      {"layout", draw.of({"sbhd", "bshd", "thd"})},
      {"rotation", draw.of({"halves", "interleaved"})},
      {"angles", draw.of({"table", "base", "llama3", "yarn"})},
      {"starts", draw.of({"no", "yes"})}};
  if (kv_heads > 0) sizes["kv-heads"] = kv_heads;
  if (draw.below(3) == 0) sizes["rotary"] = 2 * (1 + draw.below(dim / 2));
  if (draw.below(3) == 0) sizes["q-row"] = row + draw.below(3);
  if (kv_heads > 0 && draw.below(3) == 0) sizes["k-row"] = row;
  const bool inner_b = options["layout"] == "sbhd";
  const std::int64_t outer = inner_b ? s : b, inner = inner_b ? b : s;
  if (draw.below(4) == 0) draw_view(draw, sizes, "q", {outer, inner, heads}, dim);
  if (kv_heads > 0 && draw.below(4) == 0)
    draw_view(draw, sizes, "k", {outer, inner, kv_heads}, dim);
  if (options["layout"] == "thd")
    for (const char* size : {"q-outer", "k-outer"}) sizes.erase(size);
  if (options["angles"] == "table") {
    if (draw.below(2)) sizes["positions"] = 1 + draw.below(2 * s);
  } else {
    options["base"] = draw.of({"10000", "500000"});
    options["factor"] = draw.of({"1", "8"});
    options["context"] = draw.of({"8192", "64"});
  }
  if (draw.below(8) == 0) options["scale"] = "1.5";
  return rope_problem(kind, draw.of({"fwd", "bwd"}), draw.of(rope_op().dtypes(kind)), sizes,
                      options);
}

}  // namespace fftune::test
