// qkv with packed weights of 4 bits: buffers, families, and every form against the float64
// reference.
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "qkv/problems.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Names = std::vector<std::string>;

Problem packed_qkv(DeviceKind kind, DType dtype, const Sizes& sizes, Options options) {
  options.emplace("weights", "int4");
  return qkv_problem(kind, dtype, sizes, std::move(options));
}

/// Heads as models have them, over groups of 32 and of a row.
std::vector<Options> packed_forms() {
  std::vector<Options> forms;
  for (const char* zeros : {"no", "yes"})
    for (const char* norm : {"no", "yes", "rows"})
      for (const char* cache : {"no", "yes"})
        forms.push_back({{"zeros", zeros},
                         {"group", norm[0] == 'y' ? "row" : "32"},
                         {"bias", cache},
                         {"norm", norm},
                         {"rotation", norm[0] == 'r' ? "interleaved" : "halves"},
                         {"angles", cache[0] == 'y' ? "base" : "table"},
                         {"cache", cache},
                         {"slots", zeros[0] == 'y' ? "i64" : "i32"}});
  forms.push_back({{"weights", "mxfp4"}, {"bias", "yes"}, {"norm", "yes"}});
  forms.push_back({{"weights", "nvfp4"}, {"norm", "yes"}});
  forms.push_back({{"weights", "fp8"}, {"group", "32"}, {"norm", "yes"}});
  forms.push_back({{"weights", "int8"}, {"group", "row"}, {"bias", "yes"}});
  return forms;
}

}  // namespace

TEST_CASE("qkv with packed weights has one of them, and a stage that expands it") {
  const Problem problem =
      packed_qkv(DeviceKind::cuda, DType::bf16, qkv_sizes(5, 64, 4, 2, 16),
                 {{"group", "32"}, {"zeros", "yes"}, {"bias", "yes"}, {"rotation", "halves"}});
  const auto tensors = qkv_op().tensors(problem);
  Names names;
  for (const auto& tensor : tensors) names.push_back(tensor.name);
  CHECK(names == Names{"x", "w", "w_scale", "w_zero", "bias", "positions", "angles", "q", "k", "v",
                       "w_dense", "qkv_raw"});
  CHECK(tensors[tensor_index(tensors, "w")].shape == std::vector<std::int64_t>{1 + 8, 512});
  const auto stages = qkv_op().stages(problem);
  REQUIRE(stages.size() == 3);
  CHECK(stages[0].outputs == Names{"w_dense"});
  CHECK(stages[1].outputs == Names{"qkv_raw"});
  CHECK(stages[2].inputs == Names{"positions", "angles", "qkv_raw"});
  CHECK(stages[2].outputs == Names{"q", "k", "v"});
}

TEST_CASE("few tokens of qkv read the packed weight, and more expand it") {
  const auto families = [](std::int64_t m) {
    const Problem problem =
        packed_qkv(DeviceKind::cuda, DType::bf16, qkv_sizes(m, 4096, 32, 8, 128), {});
    Names names;
    for (const auto& variant : default_recipe(qkv_op(), problem, facts_of_architecture("sm_80")))
      names.push_back(variant.family);
    return names;
  };
  CHECK(families(64) == Names{"packed_decode", "heads_rows"});
  CHECK(families(2000) == Names{"expand", "product_sm80", "heads_rows"});
}

TEST_CASE("packed weights of qkv that cannot be are refused in one line") {
  const auto complaint = [](Options options) {
    try {
      qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(5, 96, 4, 2, 16), std::move(options));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(complaint({{"weights", "int4"}}) ==
        "qkv: groups of 128 do not divide d=96: give group=row or another size");
  CHECK(complaint({{"weights", "packed"}, {"zeros", "yes"}}) ==
        "qkv: zeros is of integers of 4 bits: give weights=int4 too");
  CHECK(complaint({{"weights", "int4"}, {"group", "32"}}) == "");
}

TEST_CASE("qkv with packed weights is right on the CPU") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : qkv_op().dtypes(DeviceKind::cpu))
    for (const Options& options : packed_forms())
      for (const auto& of : {qkv_sizes(1, 32, 1, 1, 2), qkv_sizes(33, 96, 3, 1, 24)})
        verify_families(*backend, qkv_op(), {packed_qkv(DeviceKind::cpu, dtype, of, options)},
                        random, 1);
}

TEST_CASE("qkv with packed weights is right on a GPU in every form", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(2);
  std::vector<Problem> problems;
  // Forms, numbers of tokens and types take turns: a kernel takes seconds to compile.
  const auto all = packed_forms();
  const std::int64_t tokens[] = {1, 13, 64, 130};
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = i % 2; j < std::size(tokens); j += 2)
      problems.push_back(packed_qkv(DeviceKind::cuda,
                                    (i + j) / 2 % 2 == 0 ? DType::bf16 : DType::fp16,
                                    qkv_sizes(tokens[j], 256, 4, 2, 64), all[i]));
  for (const auto& of : {qkv_sizes(3, 96, 3, 1, 20), qkv_sizes(70, 72, 2, 2, 6)})
    problems.push_back(packed_qkv(DeviceKind::cuda, DType::bf16, of,
                                  {{"group", "row"}, {"rotation", "halves"}, {"cache", "yes"}}));
  for (const std::int64_t m : {1, 16, 64})
    problems.push_back(packed_qkv(DeviceKind::cuda, DType::bf16, qkv_sizes(m, 4096, 32, 8, 128),
                                  {{"rotation", "halves"}, {"angles", "base"}, {"cache", "yes"}}));
  verify_families(*backend, qkv_op(), problems, random, 1, [](const Family& family) {
    return reads_packed_weights(family) || family.stages().front() == qkv::stage_heads;
  });
}
