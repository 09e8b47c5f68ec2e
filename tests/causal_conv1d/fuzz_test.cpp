// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "causal_conv1d/problems.hpp"
#include "support/fuzz_cases.hpp"

namespace fftune::test {

Problem random_conv(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto room = [&](std::int64_t taken) {
    return std::max<std::int64_t>(1, most_elements / taken);
  };
  const std::string pass = draw.of({"fwd", "bwd"});
  std::int64_t channels = draw.size(9);
  if (draw.below(2)) channels = (channels + 7) / 8 * 8;
  channels = std::min(channels, room(1));
  const std::int64_t width = 2 + draw.below(7);
  // Channels of heads, which x has in blocks.
  const std::int64_t groups = 1 + draw.below(4), of_group = channels / groups;
  const bool grouped = pass == "fwd" && of_group > 2 && draw.below(3) == 0;
  if (grouped) channels = groups * of_group;
  // Sequences shorter than the width are as likely as longer ones.
  const std::int64_t b = std::min(draw.size(4), room(channels));
  const std::int64_t s = std::min(draw.size(draw.below(2) ? 3 : 9), room(channels * b));
  std::map<std::string, std::int64_t> sizes{
      {"s", s}, {"b", b}, {"channels", channels}, {"width", width}};
  std::map<std::string, std::string> options{{"layout", draw.of({"bsc", "sc"})},
                                             {"act", draw.of({"none", "silu"})},
                                             {"bias", draw.of({"no", "yes"})},
                                             {"weights", draw.of({"same", "f32"})}};
  const bool gates = pass == "fwd" && !grouped && draw.below(3) == 0;
  if (gates) options["gates"] = "yes";
  if (draw.below(3) == 0)
    sizes["x-row"] = (gates ? 3 : 1) * channels + draw.below(3) * 8 + draw.below(2);
  if (grouped) {
    sizes["x-groups"] = groups;
    sizes["x-keys"] = draw.below(2) && of_group > 4 ? of_group / 4 : 1;
    sizes["x-row"] = groups * (of_group + (draw.below(2) ? of_group : draw.below(9)));
  }
  options["state"] = draw.below(3) == 0                    ? "none"
                     : pass == "bwd" || draw.below(3) == 0 ? "pass"
                                                           : "update";
  if (options["state"] != "none") {
    std::int64_t entries = width - 1;
    if (draw.below(2)) entries += draw.below(5);
    sizes["entries"] = entries;
    options["state-order"] = draw.of({"entries", "channels"});
    if (options["state"] == "update") {
      if (draw.below(2)) sizes["slots"] = b + draw.below(4);
      if (draw.below(2))
        sizes["state-row"] = entries * channels + 8 * draw.below(3) + draw.below(2);
      options["has-state"] = draw.of({"no", "yes"});
      options["accepted"] = draw.of({"no", "yes"});
      if (draw.below(2)) options["first-slot"] = "1";
    }
  }
  return maybe_frozen(
      causal_conv1d_op(),
      conv_problem(kind, pass, draw.of(causal_conv1d_op().dtypes(kind)), sizes, options), kind,
      draw);
}

const FuzzCases<causal_conv1d_op, random_conv> causal_conv1d_cases;

}  // namespace fftune::test
