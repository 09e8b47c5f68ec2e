// Kernels for sm_90a beside those of the GEMM engine in which threads write memory that TMA or
// wgmma reads, or the reverse: each has a proxy fence in between. (tests/gemm has the engine's.)
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/ptx.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

struct Kernel {
  const char *op, *family, *pass;
  std::map<std::string, std::int64_t> sizes;
  Options options;
  std::map<std::string, std::string> config = {};  // the default one but for these words
};

/// Without NVRTC the test skips.
template <typename Check>
void with_ptx(const Kernel& kernel, const Check& check) {
  const Op& op = builtin_catalog().op(kernel.op);
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const Problem problem = canonical(
      op, {kernel.op, kernel.pass, DType::bf16, kernel.sizes, kernel.options}, DeviceKind::cuda);
  const Family& family = family_of(op, kernel.family);
  REQUIRE(family.refusal(problem, facts).value_or("") == "");
  Config config = family.default_config(problem, facts);
  if (!kernel.config.empty()) {
    const std::vector<Config> feasible = family.space(problem, facts).feasible();
    const auto found = std::find_if(feasible.begin(), feasible.end(), [&](const Config& other) {
      return std::all_of(kernel.config.begin(), kernel.config.end(),
                         [&](const auto& word) { return other.word(word.first) == word.second; });
    });
    REQUIRE(found != feasible.end());
    config = *found;
  }
  CAPTURE(problem.text(), family.name(), config.text());
  std::string ptx;
  try {
    ptx = ptx_of(family.program(problem, facts, config), *builtin_catalog().sources);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    FFTUNE_SKIP(error.what());
  }
  check(ptx);
}

std::size_t count(const std::string& text, const std::string& word) {
  std::size_t count = 0;
  for (auto at = text.find(word); at != text.npos; at = text.find(word, at + 1)) ++count;
  return count;
}

constexpr const char* shared_fence = "fence.proxy.async.shared";
constexpr const char* global_fence = "fence.proxy.async.global";
const std::vector<std::string> none;

const std::map<std::string, std::int64_t> of_attention{
    {"s", 300}, {"b", 2}, {"heads", 4}, {"dim", 128}, {"kv-heads", 2}};

}  // namespace

TEST_CASE("attention for sm_90a has a proxy fence behind keys that are set to zero") {
  const auto with_dim = [](std::int64_t dim) {
    auto sizes = of_attention;
    sizes["dim"] = dim;
    return sizes;
  };
  // Boxes of heads of 72 have tokens of the next sequence behind a sequence's end.
  for (const Kernel& kernel :
       {Kernel{"attention", "attention_sm90", "fwd", of_attention, {{"layout", "thd"}}},
        {"attention", "attention_sm90", "fwd", with_dim(72), {}},
        {"attention", "attention_wide_sm90", "fwd", with_dim(512), {{"layout", "thd"}}},
        {"attention", "attention_wide_sm90", "fwd", with_dim(264), {}}})
    with_ptx(kernel, [](const std::string& ptx) {
      CHECK(count(ptx, shared_fence) > 0);
      CHECK(unfenced_reads(ptx, {}) == none);
    });
}

TEST_CASE("gradients of attention for sm_90a have proxy fences behind zeros, scores and dq") {
  const Options packed{{"layout", "thd"}}, ordered{{"deterministic", "yes"}};
  auto of_narrow = of_attention;
  of_narrow["dim"] = 72;
  for (const Kernel& kernel :
       {Kernel{"attention", "attention_bwd_sm90", "bwd", of_attention, packed},
        {"attention", "attention_bwd_sm90", "bwd", of_attention, ordered},
        {"attention", "attention_bwd_sm90", "bwd", of_narrow, packed},
        {"attention",
         "attention_bwd_sm90",
         "bwd",
         of_attention,
         {},
         {{"around", "beside"}, {"dq", "bulk"}}}})
    with_ptx(kernel, [&](const std::string& ptx) {
      CHECK(count(ptx, shared_fence) >= (kernel.options == packed ? 5 : 2));
      CHECK(count(ptx, global_fence) > 0);
      CHECK(count(ptx, "cp.reduce.async.bulk.global") > 0);
      CHECK(unfenced_reads(ptx, {.follows_branches = false, .hands_over = true}) == none);
      CHECK(unfenced_global_accesses(ptx) == none);
    });
}

TEST_CASE("a layer in one launch has proxy fences where threads write keys and values") {
  with_ptx({"layer",
            "persistent",
            "fwd",
            {{"batch", 1},
             {"d", 512},
             {"h", 1056},
             {"heads", 16},
             {"kv-heads", 8},
             {"dim", 64},
             {"cache", 100},
             {"page", 16}},
            {}},
           [](const std::string& ptx) {
             CHECK(count(ptx, shared_fence) == 4);
             CHECK(unfenced_reads(ptx, {.follows_branches = false, .hands_over = true}) == none);
           });
}

TEST_CASE("the expansion of packed weights reads nothing through the read-only path") {
  // It is launched while the launch before may write the weights, and ptxas moves ld.global.nc
  // across its wait for that.
  with_ptx({"linear", "expand", "fwd", {{"m", 1}, {"k", 256}, {"n", 64}}, {{"weights", "int4"}}},
           [](const std::string& ptx) {
             CHECK(count(ptx, "griddepcontrol.wait") > 0);
             CHECK(count(ptx, "ld.global.nc") == 0);
           });
}
