// The op's description, its routings and its reference, by hand.
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/distribution.hpp"
#include "core/error.hpp"
#include "cpu/pool.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "moe/problems.hpp"
#include "registry/catalog.hpp"
#include "support/op_reference.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Names = std::vector<std::string>;
using Ids = std::vector<std::int32_t>;

Names names(const Problem& problem, Role role) {
  Names names;
  for (const TensorSpec& tensor : moe_ffn_op().tensors(problem))
    if (tensor.role == role) names.push_back(tensor.name);
  return names;
}

}  // namespace

TEST_CASE("the ops are in the catalog, and every source of their families is embedded") {
  for (const Op* op : {&moe_ffn_op(), &moe_route_op()}) check_registration(*op);
}

TEST_CASE("buffers are in the order that the C API promises") {
  const MoeSizes sizes{3, 4, 5, 6, 2};
  const Problem forward = moe_problem(sizes, DType::f32, DeviceKind::cpu);
  CHECK(names(forward, Role::input) == Names{"x", "ids", "weights", "w_gate", "w_up", "w_down"});
  CHECK(names(forward, Role::output) == Names{"y"});
  const Problem saving = moe_problem(sizes, DType::f32, DeviceKind::cpu, {{"save", "preact"}});
  CHECK(names(saving, Role::output) == Names{"y", "gate", "up"});
  const Problem backward =
      moe_problem(sizes, DType::f32, DeviceKind::cpu, {{"accumulate", "yes"}}, "bwd");
  CHECK(names(backward, Role::input) == Names{"dy", "x", "ids", "weights", "gate", "up", "w_gate",
                                              "w_up", "w_down", "dw_gate_before", "dw_up_before",
                                              "dw_down_before"});
  CHECK(names(backward, Role::output) == Names{"dx", "d_weights", "dw_gate", "dw_up", "dw_down"});
  const auto frozen = [&](const char* weigh, const char* save) {
    return moe_problem(sizes, DType::f32, DeviceKind::cpu,
                       {{"frozen", "yes"}, {"weigh", weigh}, {"save", save}}, "bwd");
  };
  const Problem plain = frozen("after", "preact");
  CHECK(names(plain, Role::input) ==
        Names{"dy", "ids", "weights", "gate", "up", "w_gate", "w_up", "w_down"});
  CHECK(names(plain, Role::output) == Names{"dx", "d_weights"});
  CHECK(names(frozen("before", "preact"), Role::input) ==
        Names{"dy", "x", "ids", "weights", "gate", "up", "w_gate", "w_up", "w_down"});
  CHECK(names(frozen("after", "input"), Role::input) ==
        Names{"dy", "x", "ids", "weights", "w_gate", "w_up", "w_down"});
}

TEST_CASE("options add buffers behind the weights") {
  const MoeSizes sizes{3, 4, 5, 6, 2, 1};
  const auto inputs = [&](std::map<std::string, std::string> options) {
    return names(moe_problem(sizes, DType::f32, DeviceKind::cpu, std::move(options)), Role::input);
  };
  CHECK(inputs({{"bias", "all"}}) ==
        Names{"x", "ids", "weights", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"});
  CHECK(inputs({{"bias", "all"}, {"gate-up", "halves"}}) ==
        Names{"x", "ids", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down"});
  const Problem problem = moe_problem(sizes, DType::f32, DeviceKind::cpu);
  CHECK(problem.text() ==
        "moe-ffn/fwd f32 act=silu routing=uniform d=4 experts=6 h=5 m=3 shared=1 top-k=2");
  for (const TensorSpec& tensor : moe_ffn_op().tensors(problem)) {
    if (tensor.name == "w_gate") CHECK(tensor.shape == std::vector<std::int64_t>{7, 5, 4});
    if (tensor.name == "ids") CHECK(tensor.shape == std::vector<std::int64_t>{3, 2});
  }
}

TEST_CASE("sizes and routings that make no mixture are refused") {
  CHECK_THROWS_WITH(moe_problem({3, 4, 5, 2, 3}, DType::f32, DeviceKind::cpu),
                    ContainsSubstring("top-k=3 exceeds experts=2"));
  for (const char* routing : {"block:0.3", "zipf", "zipf:-1", "zipf:5", "even"})
    CHECK_THROWS_WITH(
        moe_problem({3, 4, 5, 6, 2}, DType::f32, DeviceKind::cpu, {{"routing", routing}}),
        ContainsSubstring("is not a routing: use uniform, or zipf:SKEW"));
  CHECK(moe_problem({3, 4, 5, 6, 2}, DType::f32, DeviceKind::cpu, {{"routing", "zipf:1.50"}})
            .option("routing") == "zipf:1.5");
}

TEST_CASE("a known model has the options that it computes with") {
  std::map<std::string, std::map<std::string, std::string>> differing;
  for (const KnownModel& model : moe_ffn_op().known_models()) {
    const auto& sizes = model.sizes;
    const Problem problem =
        moe_problem({1, sizes.at("d"), sizes.at("h"), sizes.at("experts"), sizes.at("top-k")},
                    DType::bf16, DeviceKind::cuda, model.options);
    CHECK(moe_ffn_op().contradiction(problem).empty());
    if (!model.options.empty()) differing[model.name] = model.options;
  }
  const std::map<std::string, std::string> gpt_oss{
      {"act", "swiglu-oai"}, {"bias", "all"}, {"gate-up", "interleaved"}};
  const std::map<std::string, std::string> packed{
      {"act", "swiglu-oai"}, {"bias", "all"}, {"weights", "mxfp4"}};
  CHECK(differing == std::map<std::string, std::map<std::string, std::string>>{
                         {"gpt-oss-20b", gpt_oss},
                         {"gpt-oss-120b", gpt_oss},
                         {"gpt-oss-20b-mxfp4", packed},
                         {"gpt-oss-120b-mxfp4", packed},
                         {"llama-4-scout", {{"weigh", "before"}}}});
}

TEST_CASE("drawn tokens choose different experts, about as often as expected") {
  for (const double skew : {0.0, 1.0, 3.0})
    for (const auto& [tokens, experts, choices] :
         {std::tuple{1000, 16, 4}, {4000, 8, 8}, {500, 64, 32}, {2000, 3, 1}}) {
      CAPTURE(skew, tokens, experts, choices);
      const auto count = static_cast<std::size_t>(choices);
      const Ids ids = draw_routing({skew}, tokens, experts, choices, 7);
      std::vector<double> rows(static_cast<std::size_t>(experts));
      for (std::size_t first = 0; first < ids.size(); first += count) {
        const std::set<std::int32_t> own(ids.begin() + static_cast<std::ptrdiff_t>(first),
                                         ids.begin() + static_cast<std::ptrdiff_t>(first + count));
        REQUIRE(own.size() == count);
        REQUIRE(*own.begin() >= 0);
        REQUIRE(*own.rbegin() < experts);
        for (const std::int32_t id : own) ++rows[static_cast<std::size_t>(id)];
      }
      std::sort(rows.begin(), rows.end(), std::greater<>());
      double expected = 0;
      const auto alike = expected_tokens({skew}, tokens, experts, choices);
      for (const ExpertsAlike& some : alike) expected += some.experts * some.tokens;
      CHECK(expected == Approx(tokens * choices).epsilon(0.01));
      CHECK(rows.front() == Approx(alike.front().tokens).epsilon(0.2));
    }
}

TEST_CASE("the ids of a routing may be those of a file") {
  const testing::TemporaryFolder temporary;
  const auto path = temporary.path() / "ids.txt";
  std::ofstream(path) << "2 0\n1, 2\n";
  const auto routing = parse_routing("file:" + path.string());
  REQUIRE(routing);
  CHECK(routing_text(*routing) == "file:" + path.string());
  CHECK(draw_routing(*routing, 3, 4, 2, 7) == Ids{2, 0, 1, 2, 2, 0});
  const auto alike = expected_tokens(*routing, 4, 4, 2);
  REQUIRE(alike.size() == 4);
  CHECK(alike.front().tokens == Approx(4));
  CHECK(alike.back().tokens == 0);
  CHECK_THROWS_WITH(draw_routing(*routing, 3, 4, 3, 7),
                    ContainsSubstring("4 ids") && ContainsSubstring("3 choices each"));
  CHECK_THROWS_WITH(draw_routing(*routing, 3, 2, 2, 7), ContainsSubstring("no expert 2"));
  std::ofstream(path) << "2 0\n1, -1\n";
  CHECK(draw_routing(*routing, 2, 4, 2, 7) == Ids{2, 0, 1, -1});
  for (const char* text : {"2 0 1.5 1", "2 0 1 x", "2 0 1 -2", "2 0 1 99999999999"}) {
    std::ofstream(path) << text;
    CHECK_THROWS_WITH(draw_routing(*routing, 3, 4, 2, 7), ContainsSubstring("is not an id"));
  }
  std::ofstream(path) << " \n";
  CHECK_THROWS_WITH(draw_routing(*routing, 3, 4, 2, 7), ContainsSubstring("no ids"));
  std::filesystem::remove(path);
  CHECK_THROWS_WITH(draw_routing(*routing, 3, 4, 2, 7), ContainsSubstring("No such file"));
  // Nobody writes to it: opening it would wait.
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK_THROWS_WITH(draw_routing(*routing, 3, 4, 2, 7), ContainsSubstring("not a regular file"));
  std::filesystem::remove(path);
  CHECK(expected_tokens(*routing, 4, 4, 2).front().tokens == Approx(2));
  CHECK(!parse_routing("file:"));
}

TEST_CASE("choices are sorted by expert, those that are not here left out") {
  const auto sorted = sorted_routing({2, 0, -1, 2, 0, 7}, 3, 2);
  CHECK(sorted.offsets == Ids{0, 2, 2, 4});
  CHECK(sorted.tokens == Ids{0, 2, 0, 1, 0, 0});
  CHECK(sorted.places == Ids{2, 0, -1, 3, 1, -1});
}

TEST_CASE("the reference is the weighted sum of the chosen experts' networks") {
  // d = 1, h = 2, three experts, two choices; the second token's first expert is not here.
  const Problem problem = moe_problem({2, 1, 2, 3, 2}, DType::f32, DeviceKind::cpu);
  ReferenceTensors tensors{{"x", {2, 3}},
                           {"ids", {2, 0, -1, 1}},
                           {"weights", {0.5, 0.25, 9, 2}},
                           {"w_gate", {1, 2, 3, 4, 5, 6}},
                           {"w_up", {1, -1, 2, -2, 3, -3}},
                           {"w_down", {1, 1, 2, 1, 3, 1}}};
  Pool pool(1);
  for (std::size_t stage = 0; stage < 4; ++stage)
    moe_ffn_op().reference(problem, stage, tensors, pool);
  const auto network = [&](std::size_t expert, double x) {
    double y = 0;
    for (std::size_t i = expert * 2; i < expert * 2 + 2; ++i)
      y += activate(Activation::silu, tensors.at("w_gate")[i] * x) * tensors.at("w_up")[i] * x *
           tensors.at("w_down")[i];
    return y;
  };
  const auto& y = tensors.at("y");
  REQUIRE(y.size() == 2);
  CHECK(y[0] == Approx(0.5 * network(2, 2) + 0.25 * network(0, 2)));
  CHECK(y[1] == Approx(2 * network(1, 3)));
}

TEST_CASE("the reference of packed weights, biases, limits and weights before is as written down") {
  // d = 1, h = 2, two experts to choose from and a shared one, one token with one choice.
  const double x = 3, weight = 0.5, gates[2] = {1, 20}, ups[2] = {-1, -9}, downs[2] = {2, 3};
  const double gate_bias[2] = {0.25, 1}, up_bias[2] = {-0.5, 2}, down_bias = 7;
  const auto expected = [&](double factor) {
    double y = down_bias;
    for (int i = 0; i < 2; ++i) {
      const double gate = std::min(gates[i] * x * factor + gate_bias[i], 7.0);
      const double up = std::clamp(ups[i] * x * factor + up_bias[i], -7.0, 7.0);
      y += gate / (1 + std::exp(-1.702 * gate)) * (up + 1) * downs[i];
    }
    return y;
  };
  Pool pool(1);
  for (const bool interleaved : {false, true}) {
    // The other expert, which nobody has chosen, is of NaN. All weights of the shared one are 0.
    const double nan = std::nan("");
    std::vector<double> w(4, nan), b(4, nan), d(2, nan), c{nan};
    for (const double* pair : {gates, ups}) w.insert(w.end(), pair, pair + 2);
    for (const double* pair : {gate_bias, up_bias}) b.insert(b.end(), pair, pair + 2);
    if (interleaved) {
      std::swap(w[5], w[6]);
      std::swap(b[5], b[6]);
    }
    d.insert(d.end(), downs, downs + 2);
    c.push_back(down_bias);
    w.resize(12), b.resize(12), d.resize(6), c.push_back(0.125);
    for (const bool before : {false, true}) {
      const Problem problem = moe_problem({1, 1, 2, 2, 1, 1}, DType::f32, DeviceKind::cpu,
                                          {{"act", "swiglu-oai"},
                                           {"bias", "all"},
                                           {"gate-up", interleaved ? "interleaved" : "halves"},
                                           {"weigh", before ? "before" : "after"}});
      ReferenceTensors tensors{{"x", {x}},       {"ids", {1}},  {"weights", {weight}},
                               {"w_gate_up", w}, {"w_down", d}, {"b_gate_up", b},
                               {"b_down", c}};
      for (std::size_t stage = 0; stage < 4; ++stage)
        moe_ffn_op().reference(problem, stage, tensors, pool);
      CHECK(tensors.at("y")[0] ==
            Approx(0.125 + (before ? expected(weight) : weight * expected(1))));
    }
  }
}

TEST_CASE("the reference is the same of experts' weights in their dtype, one at a time") {
  struct Case {
    DType dtype;
    std::map<std::string, std::string> options;
    std::string pass = "fwd";
  };
  const MoeSizes sizes{.m = 21, .d = 136, .h = 128, .experts = 5, .choices = 2, .shared = 1};
  const Op& op = moe_ffn_op();
  Pool pool(2);
  for (const Case& each : std::initializer_list<Case>{
           {DType::bf16, {}},
           {DType::bf16, {{"gate-up", "halves"}}},
           {DType::fp16, {{"gate-up", "interleaved"}}},
           {DType::fp8, {}},
           {DType::fp8, {{"scales", "token"}}},
           {DType::fp8, {{"scales", "block"}}},
           {DType::fp8, {{"scales", "block"}, {"gate-up", "halves"}}},
           {DType::bf16, {}, "bwd"},
           {DType::bf16, {{"gate-up", "interleaved"}, {"save", "input"}}, "bwd"}}) {
    const Problem problem =
        moe_problem(sizes, each.dtype, DeviceKind::cuda, each.options, each.pass);
    CAPTURE(problem.text());
    ReferenceTensors whole, in_parts;
    std::map<std::string, std::vector<std::byte>> bytes;
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (const TensorSpec& spec : op.tensors(problem)) {
      if (spec.role != Role::input) continue;
      auto& values = whole[spec.name];
      values.resize(static_cast<std::size_t>(spec.elements()));
      if (spec.draw)
        spec.draw(1, values);
      else
        for (double& value : values) value = spec.mean + spec.scale * normal(random);
      auto& encoded = bytes[spec.name];
      encoded.resize(spec.bytes());
      encode(spec.dtype, std::span<const double>(values), encoded.data());
      decode(spec.dtype, encoded.data(), std::span<double>(values));
      if (spec.read_in_parts)
        in_parts.encoded[spec.name] = {spec.dtype, encoded};
      else
        in_parts[spec.name] = values;
    }
    CHECK(in_parts.encoded.size() == (each.options.contains("gate-up") ? 2 : 3));
    const auto stages = op.stages(problem);
    for (std::size_t stage = 0; stage < stages.size(); ++stage) {
      op.reference(problem, stage, whole, pool);
      op.reference(problem, stage, in_parts, pool);
      for (const std::string& output : stages[stage].outputs)
        CHECK(whole.at(output) == in_parts.at(output));
    }
  }
}

TEST_CASE("mixtures that nobody tuned have defaults that are no fallbacks") {
  const Op& op = moe_ffn_op();
  for (const char* arch : {"sm_80", "sm_89", "sm_90a", "sm_120a"})
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp8})
      for (const MoeSizes& sizes : std::initializer_list<MoeSizes>{{1, 16, 16, 1, 1},
                                                                   {1, 2048, 768, 128, 8},
                                                                   {65536, 2048, 768, 128, 8},
                                                                   {16, 7168, 2048, 1024, 32},
                                                                   {3, 1008, 1408, 60, 4, 1},
                                                                   {33, 2880, 2880, 32, 4},
                                                                   {333, 72 * 2, 4096, 256, 6, 2},
                                                                   {4096, 6144, 16384, 8, 2},
                                                                   {16384, 5120, 8192, 16, 1, 1},
                                                                   {8192, 1024, 96, 384, 10}})
        for (const char* packing : {"separate", "halves", "interleaved"}) {
          const auto facts = facts_of_architecture(arch);
          const bool quantised = dtype == DType::fp8;
          // Tiles of fp8 are for compute capability 9.0.
          if (quantised &&
              (packing == std::string("interleaved") || facts.compute_capability != 90))
            continue;
          const Problem problem =
              moe_problem(sizes, dtype, DeviceKind::cuda, {{"gate-up", packing}});
          CAPTURE(problem.text(), arch);
          for (const Variant& variant : default_recipe(op, problem, facts)) {
            CAPTURE(variant.id());
            const Family& family = family_of(op, variant.family);
            CHECK_FALSE(family.is_fallback());
            CHECK(illegality(op, problem, facts, variant).empty());
            const auto seconds = family.estimate(problem, facts, variant.config);
            if (seconds) CHECK((std::isfinite(*seconds) && *seconds > 0));
          }
        }
}

TEST_CASE("few tokens take the decode kernels untuned, in fp8 only where there is no wgmma") {
  const auto families = [](const char* arch, DType dtype,
                           const std::map<std::string, std::string>& options) {
    std::vector<std::string> names;
    const Problem problem = moe_problem({1, 7168, 256, 256, 8}, dtype, DeviceKind::cuda, options);
    for (const Variant& variant :
         default_recipe(moe_ffn_op(), problem, facts_of_architecture(arch)))
      names.push_back(variant.family);
    return names;
  };
  using Names = std::vector<std::string>;
  const Names decode{"gate_up_decode", "down_decode"};
  const Names tiles{"route_sort", "gate_up_sm90", "down_sm90", "combine_rows"};
  CHECK(families("sm_90a", DType::bf16, {}) == decode);
  for (const char* scales : {"tensor", "token", "block"}) {
    CHECK(families("sm_90a", DType::fp8, {{"scales", scales}}) == tiles);
    CHECK(families("sm_120a", DType::fp8, {{"scales", scales}}) == decode);
  }
}

TEST_CASE("the decode kernels refuse what they cannot run, and nothing else") {
  const DeviceFacts facts = facts_of_architecture("sm_80");
  for (const char* name : {"gate_up_decode", "down_decode"}) {
    const Family& family = family_of(moe_ffn_op(), name);
    for (const std::int64_t m : {1, 2, 16, 17, 64, 128}) {
      const Problem problem = moe_problem({m, 512, 256, 256, 8}, DType::bf16, DeviceKind::cuda, {});
      CAPTURE(name, m);
      CHECK(family.refusal(problem, facts).value_or("") == "");
    }
    const Problem more = moe_problem({129, 512, 256, 256, 8}, DType::bf16, DeviceKind::cuda, {});
    CHECK(family.refusal(more, facts).value_or("") ==
          "every block reads all ids, up to 1024: m * top-k is 1032");
    const Problem crowded = moe_problem({64, 512, 256, 16, 8}, DType::bf16, DeviceKind::cuda, {});
    CHECK(family.refusal(crowded, facts).value_or("").find("read again for every 16") !=
          std::string::npos);
  }
}
