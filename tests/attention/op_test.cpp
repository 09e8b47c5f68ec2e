#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/run.hpp"
#include "core/error.hpp"
#include "kernels/attention/pack_mask.hpp"
#include "kernels/attention/test_data.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"
#include "support/op_reference.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const SmallProblems problem_of{attention_problem, {{"s", 4}, {"b", 2}, {"heads", 4}, {"dim", 16}}};

std::string refusal(Sizes sizes, Options options = {}, const std::string& pass = "fwd") {
  return error_of([&] { problem_of(pass, std::move(sizes), std::move(options)); });
}

}  // namespace

TEST_CASE(
    "attention and pack-mask are in the catalog, and every source that their families name is "
    "embedded") {
  for (const Op* op : {&attention_op(), &pack_mask_op()}) check_registration(*op);
}

TEST_CASE("buffers of attention are those that pass, sizes and options ask for") {
  using Names = std::vector<std::string>;
  CHECK(tensor_names(problem_of("fwd", {})) == Names{"q", "k", "v", "out"});
  CHECK(tensor_names(problem_of("bwd", {}, {{"sinks", "yes"}})) ==
        Names{"d_out", "q", "k", "v", "out", "lse", "sinks", "dq", "dk", "dv", "d_sinks"});
  CHECK(tensor_names(problem_of("fwd", {{"page", 16}}, {{"lengths", "yes"}, {"lse", "yes"}})) ==
        Names{"q", "k", "v", "pages", "lengths", "out", "lse"});
  CHECK(tensor_names(problem_of("fwd", {{"kv", 9}}, {{"layout", "thd"}})) ==
        Names{"q", "k", "v", "offsets", "kv_offsets", "out"});
  CHECK(tensor_names(problem_of("fwd", {}, {{"mask", "packed"}, {"bias", "yes"}})) ==
        Names{"q", "k", "v", "mask_bits", "mask_flags", "bias", "out"});
  using Shape = std::vector<std::int64_t>;
  const auto wide =
      attention_op().tensors(problem_of("fwd", {{"kv", 130}, {"kv-heads", 2}, {"q-row", 80}},
                                        {{"mask", "packed"}, {"mask-heads", "each"}}));
  CHECK(wide[0].shape == Shape{2, 4, 80});
  CHECK(wide[1].shape == Shape{2, 130, 2, 16});
  CHECK(wide[3].shape == Shape{2, 4, 4, 8});
  CHECK(wide[4].shape == Shape{2, 4, 1, 3});
}

TEST_CASE("fields of attention that do not go together are refused") {
  CHECK(refusal({{"kv-heads", 3}}) == "attention: kv-heads=3 do not divide heads=4");
  CHECK(refusal({{"dim", 11}}) == "attention: dim=11 is odd: give an even one");
  CHECK(refusal({{"page", 24}}) == "attention: page=24 is not 16, 32, 64, 128 or 256");
  CHECK(refusal({{"kv-head", 24}}) == "attention: kv-head=24 is no multiple of dim=16");
  CHECK(refusal({{"kv-head", 32}}, {}, "bwd") ==
        "attention: kv-head in pass bwd: gradients are of heads that follow each other");
  CHECK(refusal({{"kv-head", 32}, {"k-row", 64}}) ==
        "attention: k-row=64 is less than its heads * dim = 112");
  CHECK(refusal({{"pages", 24}}) == "attention: pages without page: k and v are contiguous");
  CHECK(refusal({{"page", 16}}, {}, "bwd") ==
        "attention: page in pass bwd: gradients are of contiguous keys");
  CHECK(refusal({{"q-row", 63}}) == "attention: q-row=63 is less than its heads * dim = 64");
  CHECK(refusal({{"kv-heads", 2}, {"v-row", 31}}) ==
        "attention: v-row=31 is less than its heads * dim = 32");
  CHECK(refusal({{"page", 16}, {"k-row", 64}}) ==
        "attention: k-row or v-row with page: a page has rows of kv-heads * dim");
  CHECK(refusal({}, {{"layout", "thd"}, {"mask", "bool"}}) ==
        "attention: mask=bool with layout=thd: it has a row for each query of b");
  CHECK(refusal({}, {{"layout", "thd"}, {"lengths", "yes"}}) ==
        "attention: lengths=yes with layout=thd: the offsets give the keys of a sequence");
  CHECK(refusal({{"page", 16}}, {{"layout", "thd"}}) ==
        "attention: page with layout=thd and lengths=no: only lengths give the keys of a sequence");
  CHECK(refusal({}, {{"mask-heads", "each"}}) ==
        "attention: mask-heads=each without a mask in memory: use mask=bool or mask=packed");
  CHECK(refusal({}, {{"mask-data", "upper"}}) ==
        "attention: mask-data without a mask in memory: use mask=bool or mask=packed");
  CHECK(refusal({}, {{"bias-heads", "one"}}) ==
        "attention: bias-heads or bias-sequences without bias=yes");
  CHECK(refusal({}, {{"deterministic", "yes"}}).find("there is no option") != std::string::npos);
}

TEST_CASE("work counts the pairs that positions allow") {
  const auto flops = [](Sizes sizes, Options options, const std::string& pass = "fwd") {
    return attention_op().stages(problem_of(pass, std::move(sizes), std::move(options)))[0].flops;
  };
  CHECK(flops({}, {}) == 4 * 2 * 4 * 4 * 4 * 16);
  CHECK(flops({}, {{"mask", "causal"}}) == 4 * 2 * 4 * 10 * 16);
  CHECK(flops({{"kv", 6}}, {{"mask", "causal"}}) == 4 * 2 * 4 * 18 * 16);
  CHECK(flops({{"window", 2}}, {{"mask", "causal"}}) == 4 * 2 * 4 * 7 * 16);
  CHECK(flops({}, {}, "bwd") == 10 * 2 * 4 * 4 * 4 * 16);
}

TEST_CASE("test masks agree with what pack-mask makes of them") {
  const Op& op = pack_mask_op();
  for (const char* data : {"random", "documents", "causal-documents", "upper", "all", "none"})
    for (const std::int64_t kv : {1, 64, 100, 300}) {
      const Problem problem = canonical(op,
                                        {"pack-mask",
                                         "fwd",
                                         DType::f32,
                                         {{"s", 70}, {"b", 2}, {"kv", kv}},
                                         {{"mask-data", data}}},
                                        DeviceKind::cpu);
      CAPTURE(problem.text());
      const Problem reader =
          problem_of("fwd", {{"s", 70}, {"kv", kv}}, {{"mask", "packed"}, {"mask-data", data}});
      ReferenceTensors tensors, drawn;
      for (const auto& spec : op.tensors(problem))
        if (spec.draw) {
          tensors[spec.name].resize(static_cast<std::size_t>(spec.elements()));
          spec.draw(1, tensors[spec.name]);
        }
      std::mt19937_64 random(1);
      draw_inputs(reader, random, drawn);
      HostThreads threads;
      op.reference(problem, 0, tensors, threads);
      CHECK(tensors.at("mask_bits") == drawn.at("mask_bits"));
      CHECK(tensors.at("mask_flags") == drawn.at("mask_flags"));
    }
}

namespace {

Problem random_mask(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  const auto [s, kv] = draw.matrix(most_elements, 1 << 14);
  std::map<std::string, std::int64_t> sizes{
      {"s", s},
      {"b", std::min<std::int64_t>(draw.size(2), 1 + most_elements / (s * kv))},
      {"kv", kv}};
  if (draw.below(2)) sizes["heads"] = 2;
  return canonical(pack_mask_op(),
                   {"pack-mask",
                    "fwd",
                    pack_mask_op().dtypes(kind)[0],
                    sizes,
                    {{"mask-data", draw.of({"random", "documents", "causal-documents", "upper",
                                            "all", "none"})}}},
                   kind);
}

}  // namespace

TEST_CASE("weights whose rounding errors average count by their sizes") {
  const auto alike = [](const Sizes& sizes, const char* mask) {
    const Problem problem = problem_of("fwd", sizes, {{"mask", mask}});
    return attention_op().stages(problem).front().inner_values;
  };
  CHECK(alike({{"s", 65}, {"kv", 63}, {"dim", 18}}, "none") == Approx(8 * 65 * 63));
  // Fourth moments of weights exist for more than 16 features, second ones for more than 4.
  CHECK(alike({{"s", 65}, {"kv", 63}, {"dim", 16}}, "none") == Approx(65 * 63));
  CHECK(alike({{"s", 65}, {"kv", 63}, {"dim", 4}}, "none") == 1);
  // Rows of 1, 2 and 3 keys: their weights are 1, 1/2 and 1/3.
  CHECK(alike({{"s", 3}, {"dim", 18}}, "causal") ==
        Approx(8 * std::pow(1 + 1 / 2.0 + 1 / 3.0, 2) / (1 + 1 / 8.0 + 1 / 27.0)));
  const Problem with_bias =
      problem_of("fwd", {{"s", 65}, {"kv", 63}, {"dim", 18}}, {{"bias", "yes"}});
  CHECK(attention_op().stages(with_bias).front().inner_values ==
        Approx(8 * 65 * 63 * std::exp(-4.0)));
}

TEST_CASE("sequences of test data fit in the pages together") {
  const auto longest = [](std::int64_t pages) {
    Problem problem{"attention",
                    "fwd",
                    DType::bf16,
                    {{"s", 1}, {"b", 8}, {"heads", 1}, {"dim", 16}, {"kv", 1000}, {"page", 16}},
                    {{"lengths", "yes"}}};
    if (pages > 0) problem.sizes["pages"] = pages;
    problem = canonical(attention_op(), problem, DeviceKind::cuda);
    const auto tensors = attention_op().tensors(problem);
    std::vector<double> lengths(8);
    tensors[tensor_index(tensors, "lengths")].draw(1, lengths);
    return *std::max_element(lengths.begin(), lengths.end());
  };
  CHECK(longest(0) == 1000);
  CHECK(longest(4096) == 1000);
  CHECK(longest(20) == 40);
  CHECK(longest(1) == 2);
}

const FuzzCases<pack_mask_op, random_mask,
                FuzzCounts{.small = 300, .larger = 20, .gpu = 100, .spaces = 100}>
    mask_cases;
