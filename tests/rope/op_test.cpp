#include <cmath>
#include <random>
#include <utility>

#include "core/error.hpp"
#include "rope/problems.hpp"
#include "support/error_of.hpp"
#include "support/op_reference.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const SmallProblems problem_of{rope_problem, {{"s", 2}, {"b", 1}, {"heads", 1}, {"dim", 4}}};

std::string refusal(Sizes sizes, Options options = {}) {
  return error_of([&] { problem_of("fwd", std::move(sizes), std::move(options)); });
}

}  // namespace

TEST_CASE("buffers are those that pass, sizes and options ask for") {
  using Names = std::vector<std::string>;
  CHECK(tensor_names(problem_of("fwd", {})) == Names{"q", "angles", "q_out"});
  CHECK(tensor_names(problem_of("bwd", {{"kv-heads", 2}}, {{"angles", "base"}})) ==
        Names{"dq_out", "dk_out", "dq", "dk"});
  CHECK(
      tensor_names(problem_of("fwd", {{"kv-heads", 2}}, {{"layout", "thd"}, {"starts", "yes"}})) ==
      Names{"q", "k", "angles", "offsets", "starts", "q_out", "k_out"});
  const auto packed = rope_op().tensors(
      problem_of("fwd", {{"heads", 2}, {"q-row", 20}, {"rotary", 2}, {"positions", 9}}));
  CHECK(packed[0].shape == std::vector<std::int64_t>{2, 1, 20});
  CHECK(packed[1].shape == std::vector<std::int64_t>{9, 2});
  CHECK(packed[2].shape == std::vector<std::int64_t>{2, 1, 2, 4});
}

TEST_CASE("the reference reads a view by its strides, by hand") {
  ReferenceTensors in{{"q", {}}, {"k", {}}, {"angles", std::vector<double>(4, 0.0)}};
  for (int i = 0; i < 16; ++i) in["q"].push_back(i);
  for (int i = 0; i < 9; ++i) in["k"].push_back(i);
  // q lies as [b, heads, s, dim]; of k, tokens overlap and leave gaps.
  const Problem problem = problem_of("fwd", {{"b", 2},
                                             {"heads", 2},
                                             {"dim", 2},
                                             {"q-row", 8},
                                             {"q-outer", 2},
                                             {"q-head", 4},
                                             {"kv-heads", 1},
                                             {"k-row", 3},
                                             {"k-outer", 4}});
  const auto tensors = rope_op().tensors(problem);
  CHECK(tensors[0].shape == std::vector<std::int64_t>{16});
  CHECK(tensors[1].shape == std::vector<std::int64_t>{9});
  const auto out = run_reference(problem, in);
  CHECK(out.at("q_out") ==
        std::vector<double>{0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15});
  CHECK(out.at("k_out") == std::vector<double>{0, 1, 3, 4, 4, 5, 7, 8});
}

TEST_CASE("the reference is the formula, by hand") {
  const double a = 0.5, b = 0.25, c = 2.0, d = 1.0;
  const ReferenceTensors in{{"q", {1, 2, 3, 4, 5, 6, 7, 8}}, {"angles", {a, b, c, d, 0, 0, 0, 0}}};
  const auto halves = run_reference(problem_of("fwd", {}), in).at("q_out");
  CHECK(halves[0] == Approx(std::cos(a) - 3 * std::sin(a)));
  CHECK(halves[1] == Approx(2 * std::cos(b) - 4 * std::sin(b)));
  CHECK(halves[2] == Approx(3 * std::cos(c) + std::sin(c)));
  CHECK(halves[7] == 8);
  const auto neighbours =
      run_reference(problem_of("fwd", {}, {{"rotation", "interleaved"}}), in).at("q_out");
  CHECK(neighbours[0] == Approx(std::cos(a) - 2 * std::sin(a)));
  CHECK(neighbours[3] == Approx(4 * std::cos(d) + 3 * std::sin(d)));
  const auto computed =
      run_reference(problem_of("fwd", {{"rotary", 2}}, {{"angles", "base"}, {"scale", "2"}}), in)
          .at("q_out");
  CHECK(computed[0] == 2);
  CHECK(computed[4] == Approx(2 * (5 * std::cos(1.0) - 6 * std::sin(1.0))));
  CHECK(computed[6] == 7);
}

TEST_CASE("positions follow the layout, the offsets and the starts") {
  // Features (1, 0) become (cos position, sin position).
  const auto angle_of = [](const Problem& problem, ReferenceTensors tensors) {
    for (int i = 0; i < 6; ++i) tensors["q"].insert(tensors["q"].end(), {1, 0});
    const auto out = run_reference(problem, std::move(tensors)).at("q_out");
    std::vector<double> angles;
    for (std::size_t i = 0; i < out.size(); i += 2)
      angles.push_back(std::round(std::atan2(out[i + 1], out[i]) * 1e6) / 1e6);
    return angles;
  };
  using Angles = std::vector<double>;
  const Options base{{"angles", "base"}};
  const auto with = [&](Options more) {
    more.merge(Options(base));
    return more;
  };
  CHECK(angle_of(problem_of("fwd", {{"s", 3}, {"b", 2}, {"dim", 2}}, base), {}) ==
        Angles{0, 0, 1, 1, 2, 2});
  CHECK(angle_of(problem_of("fwd", {{"s", 3}, {"b", 2}, {"dim", 2}}, with({{"layout", "bshd"}})),
                 {}) == Angles{0, 1, 2, 0, 1, 2});
  CHECK(angle_of(problem_of("fwd", {{"s", 3}, {"b", 2}, {"dim", 2}},
                            with({{"layout", "bshd"}, {"starts", "yes"}})),
                 {{"starts", {1, 0}}}) == Angles{1, 2, 3, 0, 1, 2});
  CHECK(angle_of(problem_of("fwd", {{"s", 6}, {"b", 3}, {"dim", 2}}, with({{"layout", "thd"}})),
                 {{"offsets", {0, 4, 4, 6}}}) == Angles{0, 1, 2, 3, 0, 1});
}

TEST_CASE("the backward pass is the transpose of the forward pass") {
  Draw draw(11);
  std::normal_distribution<double> normal;
  for (int i = 0; i < 200; ++i) {
    Problem forward = random_rope(DeviceKind::cpu, draw, 300);
    forward.pass = "fwd";
    Problem backward = forward;
    backward.pass = "bwd";
    CAPTURE(forward.text());
    ReferenceTensors in, back;
    for (const auto& tensor : rope_op().tensors(forward)) {
      auto& values = in[tensor.name];
      values.resize(static_cast<std::size_t>(tensor.elements()));
      if (tensor.draw)
        tensor.draw(7, values);
      else
        for (double& value : values) value = normal(draw.random());
      back[tensor.name] = values;
    }
    // y = A x and dx = Aᵀ dy: so dy · A x = x · Aᵀ dy, on rows that are not packed.
    const auto states = [&](const char* size) { return forward.sizes.contains(size); };
    if (states("q-row") || states("q-outer") || states("q-head")) continue;
    std::vector<double> dy(in.at("q").size());
    for (double& value : dy) value = normal(draw.random());
    back["dq_out"] = dy;
    if (forward.sizes.contains("kv-heads")) back["dk_out"] = in.at("k");
    const auto y = run_reference(forward, in).at("q_out");
    const auto dx = run_reference(backward, back).at("dq");
    double left = 0, right = 0;
    for (std::size_t e = 0; e < dy.size(); ++e) {
      left += dy[e] * y[e];
      right += in.at("q")[e] * dx[e];
    }
    CHECK(left == Approx(right).epsilon(1e-9).margin(1e-9));
  }
}

TEST_CASE("fields that do not go together are refused") {
  CHECK(refusal({{"rotary", 6}}) == "rope: rotary=6 exceeds dim=4");
  CHECK(refusal({{"dim", 5}}) == "rope: rotary=5 is odd: features are rotated in pairs");
  CHECK(refusal({{"heads", 2}, {"q-row", 7}}) == "rope: q-row=7 is less than heads * dim = 8");
  const std::int64_t far = std::int64_t{1} << 34;
  CHECK(refusal({{"s", 1 << 24}, {"b", 64}, {"heads", 2}, {"q-head", far}, {"q-row", far}},
                {{"angles", "base"}}) ==
        "rope: q has more than 2^62 elements: use smaller sizes or strides");
  CHECK(refusal({{"k-row", 8}}) == "rope: k-row without kv-heads: there is no k");
  CHECK(refusal({{"k-head", 8}}) == "rope: k-head without kv-heads: there is no k");
  CHECK(refusal({{"q-head", 3}}) == "rope: q-head=3 is less than dim=4");
  CHECK(refusal({{"q-head", 8}, {"q-row", 2}}) == "rope: q-row=2 is less than dim=4");
  CHECK(refusal({{"q-outer", 8}}, {{"layout", "thd"}}) ==
        "rope: q-outer with layout=thd: its tokens have one dimension");
  CHECK(refusal({{"positions", 8}}, {{"angles", "base"}}) ==
        "rope: positions are those of a table: angles=base has none");
  CHECK(refusal({}, {{"angles", "llama3"}, {"high", "0.5"}}) ==
        "rope: high=0.5 is not above low=1");
}

TEST_CASE("numbers make no problem of their own to presets, and are left out at their defaults") {
  CHECK(problem_of("fwd", {}, {{"angles", "base"}, {"base", "1e4"}}).text() ==
        problem_of("fwd", {}, {{"angles", "base"}}).text());
}
