// Keys and values of e4m3 with scales: random problems, every code, and the error against 16 bits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "attention/run.hpp"
#include "core/error.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem with_e4m3(DeviceKind kind, Draw& draw, const Problem& problem) {
  Options options = problem.options;
  options.erase("deterministic");
  options["cache-format"] = "e4m3";
  options["cache-scales"] = draw.of({"tensor", "head"});
  return attention_problem(kind, "fwd", problem.dtype, problem.sizes, std::move(options));
}

Problem random_attention_of_e4m3(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  return with_e4m3(kind, draw, random_attention(kind, draw, most_elements));
}

/// A few queries of each sequence, as the decode engine takes them.
Problem random_decode_of_e4m3(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const std::int64_t dim = draw.of<std::int64_t>({64, 128, 96, 16, 48, 72, 20, 100, 256, 512, 18});
  const std::int64_t kv_heads = 1 + draw.below(3), group = 1 + draw.below(9);
  const std::int64_t b = 1 + draw.below(4), s = 1 + draw.below(3);
  const std::int64_t most = std::max<std::int64_t>(16, most_elements / (b * kv_heads * dim));
  Sizes sizes{{"s", s},
              {"b", b},
              {"kv", std::min<std::int64_t>(1 + draw.below(700), most)},
              {"heads", kv_heads * group},
              {"kv-heads", kv_heads},
              {"dim", dim}};
  Options options{{"mask", draw.of({"none", "causal"})}, {"lse", draw.of({"no", "yes"})}};
  if (draw.below(2)) options["lengths"] = "yes";
  if (draw.below(2)) sizes["page"] = std::int64_t{16} << draw.below(3);
  if (draw.below(3) == 0) sizes["window"] = draw.size(8);
  if (draw.below(4) == 0) options["sinks"] = "yes";
  if (draw.below(4) == 0) options["softcap"] = "2";
  if (draw.below(3) == 0) sizes["kv-head"] = 2 * dim;
  const DType dtype = draw.of<DType>({DType::bf16, DType::fp16});
  return with_e4m3(kind, draw, attention_problem(kind, "fwd", dtype, sizes, options));
}

std::string complaint(Sizes sizes, Options options, const char* pass = "fwd") {
  sizes.insert({{"s", 4}, {"b", 1}, {"heads", 4}, {"dim", 64}});
  return error_of([&] {
    attention_problem(DeviceKind::cuda, pass, DType::bf16, std::move(sizes), std::move(options));
  });
}

/// A key's weight is 1 where it is alone: the output is its value. There is one for each code.
void check_codes(Backend& backend, DType dtype) {
  constexpr std::int64_t dim = 256;
  const Problem problem = attention_problem(
      backend.facts().kind, "fwd", dtype,
      {{"s", 1}, {"kv", 1}, {"b", 2}, {"heads", 2}, {"kv-heads", 1}, {"dim", dim}},
      {{"mask", "none"}, {"cache-format", "e4m3"}});
  ReferenceTensors inputs{{"k_scale", {0.5}}, {"v_scale", {0.25}}};
  std::mt19937_64 random(5);
  draw_inputs(problem, random, inputs);
  std::vector<double> codes;
  for (int code = 0; code < 256; ++code)
    codes.push_back(float_from_fp8(static_cast<std::uint8_t>(code)));
  for (std::size_t i = 0; i < inputs.at("v").size(); ++i) inputs.at("v")[i] = codes[i % dim];
  // A key that is NaN makes the whole row NaN: that of the second sequence.
  auto& k = inputs.at("k");
  k[dim + 3] = std::numeric_limits<double>::quiet_NaN();
  for_each_family(backend.facts(), problem, [&](const Family& family, const Config& config) {
    CAPTURE(family.name(), config.text());
    const auto out = run_family(backend, family, config, problem, inputs).at("out");
    for (std::size_t i = 0; i < out.size(); ++i) {
      CAPTURE(i);
      const double expected = codes[i % dim] / 4;
      if (i >= 2 * dim || std::isnan(expected))
        CHECK(std::isnan(out[i]));
      else
        CHECK(out[i] == expected);
    }
  });
}

/// Scores from every code: each is a key of one feature, and the values tell the keys apart.
void check_codes_of_keys(Backend& backend, DType dtype) {
  constexpr std::int64_t dim = 8, keys = 254;
  const Problem problem = attention_problem(
      backend.facts().kind, "fwd", dtype,
      {{"s", 1}, {"kv", keys}, {"b", 1}, {"heads", 8}, {"kv-heads", 1}, {"dim", dim}},
      {{"mask", "none"}, {"cache-format", "e4m3"}, {"scale", "1"}, {"lse", "yes"}});
  ReferenceTensors inputs{{"k_scale", {0.03125}}, {"v_scale", {1}}};
  auto &q = inputs["q"], &k = inputs["k"], &v = inputs["v"];
  for (int head = 0; head < 8; ++head)
    for (int feature = 0; feature < dim; ++feature) q.push_back(head == feature ? 1 : 0);
  for (int code = 0; code < 256; ++code) {
    const double number = float_from_fp8(static_cast<std::uint8_t>(code));
    if (std::isnan(number)) continue;
    for (int feature = 0; feature < dim; ++feature) {
      k.push_back(feature % 2 ? number : -number / 2);
      v.push_back((code >> feature) % 2);
    }
  }
  const auto expected = [&] {
    auto rounded_inputs = inputs;
    rounded_inputs["k"] = rounded(DType::fp8, k);
    return run_reference(problem, rounded_inputs);
  }();
  for_each_family(backend.facts(), problem, [&](const Family& family, const Config& config) {
    CAPTURE(family.name(), config.text());
    const auto results = run_family(backend, family, config, problem, inputs);
    CHECK(relative_error(results.at("out"), expected.at("out")) <
          std::max(1e-6, 2 * dtype_unit_roundoff(dtype)));
    CHECK(relative_error(results.at("lse"), expected.at("lse")) < 1e-5);
  });
}

}  // namespace

TEST_CASE("scales of e4m3 follow the other inputs, and have the shape that cache-scales says") {
  const auto last_inputs = [](const char* scales) {
    const auto tensors = attention_op().tensors(attention_problem(
        DeviceKind::cuda, "fwd", DType::bf16,
        {{"s", 1}, {"kv", 32}, {"b", 2}, {"heads", 4}, {"kv-heads", 2}, {"dim", 16}},
        {{"lengths", "yes"}, {"cache-format", "e4m3"}, {"cache-scales", scales}}));
    std::vector<TensorSpec> found;
    for (const TensorSpec& tensor : tensors)
      if (tensor.role == Role::input) found.push_back(tensor);
    CHECK(found.at(1).dtype == DType::fp8);
    CHECK(found.at(2).dtype == DType::fp8);
    REQUIRE(found.size() == 6);
    CHECK(found.at(4).name == "k_scale");
    CHECK(found.at(5).name == "v_scale");
    CHECK(found.at(4).shape == found.at(5).shape);
    return found.at(4).shape;
  };
  CHECK(last_inputs("tensor") == std::vector<std::int64_t>{1});
  CHECK(last_inputs("head") == std::vector<std::int64_t>{2});
}

TEST_CASE("e4m3 counts a byte for each element of keys and values") {
  const auto bytes = [](Options options) {
    options["mask"] = "none";
    const Problem problem = attention_problem(
        DeviceKind::cuda, "fwd", DType::bf16,
        {{"s", 1}, {"kv", 64}, {"b", 2}, {"heads", 4}, {"kv-heads", 2}, {"dim", 16}}, options);
    return attention_op().stages(problem).front().bytes;
  };
  // k and v, and two scales.
  CHECK(bytes({}) - bytes({{"cache-format", "e4m3"}}) == 2.0 * 2 * 64 * 2 * 16 - 8);
}

TEST_CASE("scales without e4m3, and gradients of it, are refused in one line") {
  CHECK(complaint({}, {{"cache-format", "e4m3"}}) == "");
  CHECK(complaint({}, {{"cache-scales", "head"}}).find("only e4m3 has scales") !=
        std::string::npos);
  CHECK(complaint({}, {{"cache-format", "e4m3"}}, "bwd").find("cache-format") != std::string::npos);
}

TEST_CASE(
    "kernels that read 16 bits alone refuse e4m3, and leave it to mma.sync and the fallback") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  const auto serving = [&](std::int64_t s, std::int64_t dim) {
    const Problem problem = attention_problem(
        DeviceKind::cuda, "fwd", DType::bf16,
        {{"s", s}, {"kv", 500}, {"b", 3}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}},
        {{"mask", "causal"}, {"cache-format", "e4m3"}});
    std::vector<std::string> names;
    for (const Family* family : attention_op().families())
      if (family->device_kind() == DeviceKind::cuda && !family->refusal(problem, facts))
        names.emplace_back(family->name());
    return names;
  };
  using Names = std::vector<std::string>;
  CHECK(serving(1, 128) == Names{"attention_decode", "attention_sm80", "attention_simt"});
  CHECK(serving(1, 66) == Names{"attention_simt"});
  CHECK(serving(100, 128) == Names{"attention_sm80", "attention_simt"});
  CHECK(serving(100, 512) == Names{"attention_simt"});
}

TEST_CASE("prompts over caches of e4m3 are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const std::pair<Sizes, Options> forms[] = {
      {{{"s", 37}, {"kv", 70}, {"dim", 64}, {"page", 16}}, {{"lengths", "yes"}, {"lse", "yes"}}},
      {{{"s", 90}, {"dim", 128}}, {{"layout", "thd"}, {"cache-scales", "head"}}},
      {{{"s", 33}, {"kv", 80}, {"dim", 80}, {"window", 20}}, {{"softcap", "3"}, {"sinks", "yes"}}},
      {{{"s", 20}, {"kv", 40}, {"dim", 20}}, {{"mask", "none"}, {"bias", "yes"}}}};
  std::mt19937_64 random(4);
  int at = 0;
  for (auto [sizes, options] : forms) {
    sizes.insert({{"b", 2}, {"heads", 4}, {"kv-heads", 2}});
    options["cache-format"] = "e4m3";
    options.emplace("mask", "causal");
    const Problem problem = attention_problem(
        DeviceKind::cuda, "fwd", at++ % 2 == 0 ? DType::bf16 : DType::fp16, sizes, options);
    CHECK(verify_variants(*backend, attention_op(), problem, random, 1) >= 2);
  }
}

TEST_CASE("every code of e4m3 is its number, and NaN is NaN, on the CPU") {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    check_codes(*backend, dtype);
    check_codes_of_keys(*backend, dtype);
  }
}

TEST_CASE("every code of e4m3 is its number, and NaN is NaN, on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    check_codes(*backend, dtype);
    check_codes_of_keys(*backend, dtype);
  }
}

TEST_CASE("heads of real size are as far from a 16-bit cache's as the rounding of e4m3 is") {
  const Sizes sizes{{"s", 1}, {"kv", 1500}, {"b", 2}, {"heads", 8}, {"kv-heads", 2}, {"dim", 128}};
  const auto problem_of = [&](Options options) {
    options["mask"] = "causal";
    return attention_problem(DeviceKind::cpu, "fwd", DType::bf16, sizes, std::move(options));
  };
  ReferenceTensors inputs;
  std::mt19937_64 random(3);
  draw_inputs(problem_of({}), random, inputs);
  const auto exact = run_reference(problem_of({}), inputs).at("out");
  for (const char* scales : {"tensor", "head"}) {
    CAPTURE(scales);
    auto quantised = inputs;
    for (const std::string name : {"k", "v"}) {
      auto& values = quantised.at(name);
      std::vector<double> of_heads(std::string(scales) == "head" ? 2 : 1);
      const auto scale_of = [&](std::size_t i) -> double& {
        return of_heads[i / 128 % of_heads.size()];
      };
      for (std::size_t i = 0; i < values.size(); ++i)
        scale_of(i) = std::max(scale_of(i), std::abs(values[i]) / 448);
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = round_to(DType::fp8, values[i] / scale_of(i));
      quantised[name + "_scale"] = of_heads;
    }
    const auto out =
        run_reference(problem_of({{"cache-format", "e4m3"}, {"cache-scales", scales}}), quantised);
    // Values, and through the scores keys, are off by 0.41 of a unit roundoff each.
    const double error = relative_error(out.at("out"), exact), unit = 0.41 / 16;
    CHECK(error < 2 * unit);
    CHECK(error > unit / 2);
  }
}

const FuzzCases<attention_op, random_attention_of_e4m3,
                FuzzCounts{.small = 600, .larger = 20, .gpu = 60}>
    e4m3_cases("attention of e4m3", "[e4m3]");
const FuzzCases<attention_op, random_decode_of_e4m3,
                FuzzCounts{.small = 0, .larger = 0, .gpu = 120, .spaces = 200}>
    e4m3_decode_cases("decode attention of e4m3", "[e4m3]");
