// Packed weights: layout, options, and every family against the float64 reference.
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/pack_weight/pack_weight.hpp"
#include "linear/problems.hpp"
#include "measure/buffer_sets.hpp"
#include "registry/noise_draw.hpp"
#include "registry/part_family.hpp"
#include "runtime/plan.hpp"
#include "support/host_backend.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem packed_problem(const LinearSizes& sizes, DType dtype, Options options) {
  options.emplace("weights", "int4");
  return linear_problem("fwd", sizes, dtype, std::move(options));
}

/// Every format that serves weights with `k` input features.
std::vector<Options> formats_of(std::int64_t k) {
  std::vector<Options> formats;
  for (const char* group : {"128", "64", "32", "row"})
    for (const char* zeros : {"no", "yes"})
      if (group == std::string("row") || k % std::stoi(group) == 0)
        formats.push_back({{"group", group}, {"zeros", zeros}});
  if (k % 32 == 0) formats.push_back({{"weights", "mxfp4"}});
  if (k % 16 == 0) formats.push_back({{"weights", "nvfp4"}});
  for (const char* weights : {"fp8", "int8"})
    for (const char* group : {"128", "32", "row"})
      if (group == std::string("row") || k % std::stoi(group) == 0)
        formats.push_back({{"weights", weights}, {"group", group}});
  return formats;
}

/// Each size with every `stride`-th of its formats, so that they take turns: a kernel takes seconds
/// to compile.
std::vector<Problem> spread(const std::vector<LinearSizes>& all, std::size_t stride, DType dtype) {
  std::vector<Problem> problems;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto formats = formats_of(all[i].k);
    for (std::size_t j = i % stride; j < formats.size(); j += stride)
      problems.push_back(packed_problem(all[i], dtype, formats[j]));
  }
  return problems;
}

void verify_formats_on_gpu(DType dtype, std::size_t stride) {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  const auto problems = spread({{1, 256, 72},
                                {5, 384, 200},
                                {16, 512, 136},
                                {23, 1024, 264},
                                {64, 640, 328},
                                {130, 256, 96}},
                               stride, dtype);
  verify_families(*backend, linear_op(), problems, random, 1, reads_packed_weights);
}

/// A word of e2m1 codes: bits 0 to 2 and the sign of the registers' lower and then upper halves.
void put_codes(std::vector<double>& bytes, std::size_t at, const std::array<unsigned, 8>& codes) {
  constexpr int places[8][4] = {{6, 7, 8, 15},    {10, 11, 12, 19}, {0, 1, 2, 9},
                                {4, 13, 14, 21},  {22, 23, 24, 31}, {26, 27, 28, 3},
                                {16, 17, 18, 25}, {20, 29, 30, 5}};
  unsigned word = 0;
  for (std::size_t code = 0; code < 8; ++code)
    for (unsigned bit = 0; bit < 4; ++bit) word |= (codes[code] >> bit & 1) << places[code][bit];
  for (std::size_t i = 0; i < 4; ++i) bytes[at + i] = word >> 8 * i & 255;
}

}  // namespace

TEST_CASE("every code of a packed weight has bits of its own, behind the header") {
  for (const packed_code code : {packed_code::int4, packed_code::fp8})
    for (const auto& [n, k] : {std::pair<int, int>{1, 1}, {16, 64}, {40, 200}}) {
      std::set<std::pair<long long, int>> places;
      for (int row = 0; row < n; ++row)
        for (int i = 0; i < k; ++i) {
          const auto [byte, shift] = packed_place_of(row, i, k, code);
          REQUIRE(byte >= packed_part_bytes);
          REQUIRE(byte < packed_all_parts(n, k, code) * packed_part_bytes);
          places.emplace(byte, shift);
        }
      CHECK(places.size() == static_cast<std::size_t>(n * k));
    }
  // The second row and the tenth k of a block: lane 0, the third register's upper half; k 63 of row
  // 15 is the last nibble.
  constexpr packed_code int4 = packed_code::int4, fp8 = packed_code::fp8;
  CHECK(packed_place_of(1, 9, 64, int4).byte == 512 + 3);
  CHECK(packed_place_of(1, 9, 64, int4).shift == 4);
  CHECK(packed_place_of(15, 63, 64, int4).byte == 2 * 512 - 1);
  CHECK(packed_place_of(15, 63, 64, int4).shift == 4);
  CHECK(packed_place_of(16, 64, 128, int4).byte == 512 * (1 + 3));
  // The last byte of the second word; k 63 of row 15 is the last byte of the second part.
  CHECK(packed_place_of(1, 9, 64, fp8).byte == 512 + 7);
  CHECK(packed_place_of(1, 9, 64, fp8).shift == 0);
  CHECK(packed_place_of(15, 63, 64, fp8).byte == 3 * 512 - 1);
  CHECK(packed_place_of(16, 64, 128, fp8).byte == 512 * (1 + 6));
}

TEST_CASE("the reference expands packed weights, by hand") {
  // [2, 3] in groups of a row: codes 1 2 3 and 15 0 8.
  const Problem problem =
      packed_problem({2, 3, 2}, DType::f32, {{"group", "row"}, {"zeros", "yes"}});
  ReferenceTensors tensors{{"x", {1, 10, 100, 1, 0, 0}},
                           {"w", std::vector<double>(1024)},
                           {"w_scale", std::vector<double>(16)},
                           {"w_zero", std::vector<double>(16)}};
  // Lane 0 has row 0 in nibbles 0 (k 0) and 4 (k 1), row 1 in nibbles 1 and 5; lane 1 k 2.
  tensors["w"][512] = 1 + 15 * 16;
  tensors["w"][514] = 2 + 0 * 16;
  tensors["w"][512 + 16] = 3 + 8 * 16;
  tensors["w_scale"][0] = 2, tensors["w_scale"][1] = 0.5;
  tensors["w_zero"][0] = 1, tensors["w_zero"][1] = 8;
  tensors = run_reference(problem, tensors);
  CHECK(tensors.at("w_dense") == std::vector<double>{0, 2, 4, 3.5, -4, 0});
  HostThreads threads;
  linear_op().reference(problem, 1, tensors, threads);
  CHECK(tensors.at("y") == std::vector<double>{420, -36.5, 0, 3.5});
}

TEST_CASE("the reference expands mxfp4, by hand") {
  // [2, 32]: codes 1 (0.5) and 15 (-6) of row 0, 7 (6) and 8 (-0) of row 1; scales 2^3 and 2^-127.
  const Problem problem = packed_problem({1, 32, 2}, DType::f32, {{"weights", "mxfp4"}});
  ReferenceTensors tensors{{"x", std::vector<double>(32, 1)},
                           {"w", std::vector<double>(1024)},
                           {"w_scale", std::vector<double>(16)}};
  put_codes(tensors["w"], 512, {1, 7, 0, 0, 15, 8, 0, 0});
  tensors["w_scale"][0] = 130;
  tensors = run_reference(problem, tensors);
  const auto& dense = tensors.at("w_dense");
  CHECK(dense[0] == 4);
  CHECK(dense[1] == -48);
  CHECK(dense[2] == 0);
  CHECK(dense[32] == std::ldexp(6, -127));
  CHECK((dense[33] == 0 && std::signbit(dense[33])));
  CHECK(std::isnan(e8m0_value(255)));
}

TEST_CASE("the reference expands nvfp4, by hand") {
  // [2, 48]: codes 2 (1) at k 0, 7 (6) at 16 and 9 (-0.5) at 40 of row 1. Its scales are 0x38 (1),
  // 0x01 (2^-9) and 0x7e (448), and 0.25 of the row.
  const Problem problem = packed_problem({1, 48, 2}, DType::f32, {{"weights", "nvfp4"}});
  const PackedFormat format = packed_format(problem);
  CHECK(format.scale_shape(2, 48) == std::vector<std::int64_t>{1, 4, 32});
  ReferenceTensors tensors{{"x", std::vector<double>(48, 1)},
                           {"w", std::vector<double>(1024)},
                           {"w_scale", std::vector<double>(4 * 32)}};
  const auto set = [&](int column, int code) {
    constexpr packed_code nvfp4 = packed_code::nvfp4;
    add_packed_code(tensors["w"], packed_place_of(1, column, 48, nvfp4), nvfp4, code);
  };
  set(0, 2), set(16, 7), set(40, 9);
  auto& scales = tensors["w_scale"];
  put_float(scales, 1, 0.25f);  // behind row 0's
  scales[64 + 2] = 0x38, scales[64 + 3] = 0x01, scales[64 + 32 + 2] = 0x7e;
  tensors = run_reference(problem, tensors);
  const auto& dense = tensors.at("w_dense");
  CHECK(dense[48] == 0.25);
  CHECK(dense[48 + 16] == std::ldexp(6, -11));
  CHECK(dense[48 + 40] == -56);
  CHECK(dense[0] == 0);
}

TEST_CASE("the reference expands weights of 8 bits, by hand") {
  // [2, 2] in groups of a row, with the scales 2 and 0.5.
  for (const auto& [weights, codes, values] :
       {std::tuple{"fp8", std::array{0x38, 0x01, 0xfe, 0x80},
                   std::array{2.0, 2.0 / 512, -224.0, 0.0}},
        std::tuple{"int8", std::array{1, 127, 128, 255}, std::array{2.0, 254.0, -64.0, -0.5}}}) {
    const Problem problem =
        packed_problem({1, 2, 2}, DType::f32, {{"weights", weights}, {"group", "row"}});
    ReferenceTensors tensors{
        {"x", {1, 1}}, {"w", std::vector<double>(1536)}, {"w_scale", std::vector<double>(16)}};
    // Lane 0: k 0 of both rows, then k 1.
    tensors["w"][512] = codes[0], tensors["w"][514] = codes[1];
    tensors["w"][513] = codes[2], tensors["w"][515] = codes[3];
    tensors["w_scale"][0] = 2, tensors["w_scale"][1] = 0.5;
    tensors = run_reference(problem, tensors);
    CHECK(tensors.at("w_dense") == std::vector<double>(values.begin(), values.end()));
  }
}

TEST_CASE("linear with packed weights has their tensors, and a stage that expands them") {
  const auto problem = canonical(
      linear_op(), packed_problem({5, 192, 40}, DType::bf16, {{"group", "64"}, {"zeros", "yes"}}),
      DeviceKind::cuda);
  std::vector<std::string> names;
  for (const auto& tensor : linear_op().tensors(problem)) names.push_back(tensor.name);
  CHECK(names == std::vector<std::string>{"x", "w", "w_scale", "w_zero", "y", "w_dense"});
  const auto stages = linear_op().stages(problem);
  REQUIRE(stages.size() == 2);
  CHECK(stages[0].name == "expand");
  CHECK(stages[0].bytes == 512.0 * (1 + 3 * 3) + 3 * 3 * 16 * (2 + 1) + 2 * 192 * 40);
  // The whole reads the packed weight alone.
  CHECK(cost_of(linear_op(), problem).bytes ==
        512.0 * (1 + 3 * 3) + 3 * 3 * 16 * (2 + 1) + 2 * 5 * (192 + 40));
}

TEST_CASE("packed weights that cannot be are refused in one line") {
  CHECK(linear_complaint({1, 192, 8}, {{"weights", "int4"}}) ==
        "linear: groups of 128 do not divide k=192: give group=row or another size");
  CHECK(linear_complaint({1, 128, 8}, {{"group", "64"}}) ==
        "linear: group is of weights with scales of groups: give weights=int4, fp8 or int8 too");
  CHECK(linear_complaint({1, 128, 8}, {{"zeros", "yes"}}) ==
        "linear: zeros is of integers of 4 bits: give weights=int4 too");
  CHECK(linear_complaint({1, 100, 8}, {{"weights", "int4"}, {"group", "row"}}) == "");

  CHECK(linear_complaint({1, 128, 8}, {{"weights", "mxfp4"}, {"group", "64"}}) ==
        "linear: group is of weights with scales of groups: give weights=int4, fp8 or int8 too");
  CHECK(linear_complaint({1, 128, 8}, {{"weights", "mxfp4"}, {"zeros", "yes"}}) ==
        "linear: zeros is of integers of 4 bits: give weights=int4 too");
  CHECK(linear_complaint({1, 128, 8}, {{"weights", "int8"}, {"zeros", "yes"}}) ==
        "linear: zeros is of integers of 4 bits: give weights=int4 too");
  CHECK(linear_complaint({1, 192, 8}, {{"weights", "fp8"}}) ==
        "linear: groups of 128 do not divide k=192: give group=row or another size");
  CHECK(linear_complaint({1, 80, 8}, {{"weights", "mxfp4"}}) ==
        "linear: groups of 32 do not divide k=80: mxfp4 has no others");
  CHECK(linear_complaint({1, 72, 8}, {{"weights", "nvfp4"}}) ==
        "linear: groups of 16 do not divide k=72: nvfp4 has no others");
  CHECK(linear_complaint({1, 80, 8}, {{"weights", "nvfp4"}}) == "");

  std::array<std::uint32_t, 4> header{};
  CHECK(packed_header_error(header.data(), packed_code::int4, 16, 64) ==
        "these bytes are no packed weight: pack it with pack-weight first");
  write_packed_header(header.data(), packed_code::int4, 16, 64);
  CHECK(packed_header_error(header.data(), packed_code::int4, 16, 64) == "");
  CHECK(packed_header_error(header.data(), packed_code::int4, 16, 128) ==
        "the packed weight is [16, 64], not [16, 128]");
  CHECK(packed_header_error(header.data(), packed_code::mxfp4, 16, 64) ==
        "the weight is packed as int4, not mxfp4: give weights=int4");
  header[1] += 1;
  CHECK(packed_header_error(header.data(), packed_code::int4, 16, 64) ==
        "the weight is packed in layout 3, and this library reads 2: pack it again");
}

TEST_CASE("a packed weight of another layout is refused on the CPU") {
  const auto backend = open_cpu();
  const Problem problem = canonical(
      linear_op(), packed_problem({2, 64, 16}, DType::f32, {{"group", "64"}}), DeviceKind::cpu);
  OpRun run(*backend, linear_op(), problem);
  const Recipe recipe = default_recipe(linear_op(), problem, backend->facts());
  run.run(linear_op(), problem, recipe);
  run.set("w", std::vector<float>(2 * 512));
  std::string reason;
  try {
    run.run(linear_op(), problem, recipe);
  } catch (const Error& error) {
    reason = error.what();
  }
  CHECK(reason == "these bytes are no packed weight: pack it with pack-weight first");
}

TEST_CASE("linear with packed weights is right on the CPU in every format") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : linear_op().dtypes(DeviceKind::cpu))
    for (const LinearSizes sizes : {LinearSizes{1, 1, 1}, {3, 192, 37}, {70, 256, 130}})
      for (Options options : formats_of(sizes.k)) {
        if (sizes.m == 3) options["bias"] = "yes";
        verify_families(*backend, linear_op(), {packed_problem(sizes, dtype, options)}, random, 1);
      }
}

TEST_CASE("every configuration of the kernels for packed weights has legal launches") {
  for (const auto& arch : known_architectures()) {
    const DeviceFacts facts = facts_of_architecture(arch);
    const bool has_wgmma = arch == "sm_90a";
    for (const char* name : {"packed_decode", "packed_sm90"}) {
      const Family& family = family_of(linear_op(), name);
      for (const LinearSizes sizes :
           {LinearSizes{1, 64, 8}, {16, 4096, 6144}, {64, 14336, 4096}, {300, 4096, 4096}}) {
        for (const Options& options : formats_of(sizes.k)) {
          const Problem problem =
              canonical(linear_op(), packed_problem(sizes, DType::bf16, options), DeviceKind::cuda);
          CAPTURE(problem.text(), arch, name);
          const bool wgmma = name == std::string("packed_sm90");
          REQUIRE(family.refusal(problem, facts).has_value() ==
                  (wgmma ? !has_wgmma : sizes.m > 64));
          if (family.refusal(problem, facts)) continue;
          const Space space = family.space(problem, facts);
          CHECK(space.violations(family.default_config(problem, facts)).empty());
          CHECK(default_recipe(linear_op(), problem, facts).size() == 1);
          for (const Config& config : space.feasible()) {
            const Program program = family.program(problem, facts, config);
            const auto& launch = std::get<KernelLaunch>(program.steps.at(0));
            REQUIRE(launch.shared_bytes <= facts.shared_bytes_per_block);
            REQUIRE(launch.block.x <= 640);
            REQUIRE(launch.cluster.y <= 8);
          }
        }
      }
    }
  }
}

TEST_CASE("the kernel for packed weights of compute capability 9.0 has any number of tokens") {
  const auto recipe_of = [](const char* arch, std::int64_t m, std::int64_t n = 4096) {
    const DeviceFacts facts = facts_of_architecture(arch);
    const Problem problem =
        canonical(linear_op(), packed_problem({m, 4096, n}, DType::bf16, {}), DeviceKind::cuda);
    std::vector<std::string> families;
    for (const auto& variant : default_recipe(linear_op(), problem, facts))
      families.push_back(variant.family);
    return families;
  };
  CHECK(recipe_of("sm_80", 64) == std::vector<std::string>{"packed_decode"});
  CHECK(recipe_of("sm_80", 65) == std::vector<std::string>{"expand", "product_sm80"});
  // As an H100 timed them: 7.3 and 8.0 us with n=6144.
  CHECK(recipe_of("sm_90a", 1, 6144) == std::vector<std::string>{"packed_sm90"});
  CHECK(recipe_of("sm_90a", 1, 28672) == std::vector<std::string>{"packed_sm90"});
  CHECK(recipe_of("sm_90a", 16) == std::vector<std::string>{"packed_sm90"});
  CHECK(recipe_of("sm_90a", 4096) == std::vector<std::string>{"packed_sm90"});
}

TEST_CASE("CTAs of many tokens and packed weights take one tile after the other") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  const Family& family = family_of(linear_op(), "packed_sm90");
  const auto launch_of = [&](std::int64_t m, const char* weights) {
    const Problem problem = canonical(
        linear_op(), packed_problem({m, 4096, 28672}, DType::bf16, {{"weights", weights}}),
        DeviceKind::cuda);
    const Config config = family.default_config(problem, facts);
    // As an H100 timed int4: 1,334 us with 256 tokens a tile and 1,358 with 128.
    if (m >= 256) CHECK(config.get("tokens") == 256);
    return std::get<KernelLaunch>(family.program(problem, facts, config).steps.at(0));
  };
  for (const char* weights : {"int4", "mxfp4", "fp8"})
    for (const std::int64_t m : {256, 1024, 4096})
      CHECK(launch_of(m, weights).grid.x == static_cast<std::uint32_t>(facts.multiprocessors));
  CHECK(launch_of(64, "int4").grid.x == 28672 / 256);
}

TEST_CASE("a plan has no memory for an expanded weight that its kernel does not need") {
  const DeviceFacts facts = facts_of_architecture("sm_80");
  const auto workspace_of = [&](std::int64_t m) {
    const Problem problem =
        canonical(linear_op(), packed_problem({m, 4096, 4096}, DType::bf16, {}), DeviceKind::cuda);
    TensorLayout layout(linear_op(), problem);
    std::vector<bool> used(layout.tensors().size());
    for (const Variant& variant : default_recipe(linear_op(), problem, facts))
      mark_used(family_of(linear_op(), variant.family).program(problem, facts, variant.config),
                used);
    layout.leave_out_unused(used);
    return layout.workspace_bytes(0);
  };
  CHECK(workspace_of(64) == 0);
  CHECK(workspace_of(65) == 2 * 4096 * 4096);
}

TEST_CASE("linear's baseline with packed weights writes the same") {
  const auto backend = open_cpu();
  check_baselines(*backend, linear_op(),
                  packed_problem({33, 64, 72}, DType::bf16, {{"group", "32"}}), 2e-2);
}

TEST_CASE("linear with packed weights is right on a GPU in every format in bf16", "[gpu]") {
  verify_formats_on_gpu(DType::bf16, 2);
}

TEST_CASE("linear with packed weights is right on a GPU in every format in fp16", "[gpu]") {
  verify_formats_on_gpu(DType::fp16, 3);
}

TEST_CASE("linear with packed weights is right on a GPU at ragged sizes, with every option",
          "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  std::vector<Problem> problems;
  // k that is no multiple of a block, and of a group of 64.
  for (const LinearSizes sizes : {LinearSizes{1, 8, 8}, {9, 72, 24}, {33, 200, 40}, {64, 1000, 48}})
    for (const Options& options : formats_of(sizes.k))
      problems.push_back(packed_problem(sizes, DType::bf16, options));
  verify_families(*backend, linear_op(), problems, random, 1, reads_packed_weights);
  problems.clear();
  for (const LinearSizes sizes : {LinearSizes{3, 96, 40}, {64, 1056, 264}})
    for (const char* more : {"no", "yes"})
      problems.push_back(packed_problem(
          sizes, DType::bf16,
          {{"group", "32"}, {"bias", "yes"}, {"y-scale", more}, {"residual", more}}));
  problems.push_back(packed_problem({4, 256, 64}, DType::bf16, {{"output", "f32"}}));
  verify_families(*backend, linear_op(), problems, random, 1);
  problems.clear();
  for (const Options& options : formats_of(96))
    problems.push_back(packed_problem({7, 96, 33}, DType::f32, options));
  verify_families(*backend, linear_op(), problems, random, 0);
}

TEST_CASE("linear with packed weights is right on a GPU at the sizes of models", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(4);
  std::vector<Problem> problems;
  for (const auto& [k, n] : {std::pair{4096, 6144}, {14336, 4096}, {2048, 16384}})
    for (const std::int64_t m : {1, 16, 64})
      problems.push_back(packed_problem({m, k, n}, DType::bf16, {}));
  problems.push_back(packed_problem({16, 4096, 6144}, DType::bf16, {{"weights", "mxfp4"}}));
  problems.push_back(packed_problem({16, 4096, 6144}, DType::bf16, {{"weights", "fp8"}}));
  verify_families(*backend, linear_op(), problems, random, 3, reads_packed_weights);
}

TEST_CASE("linear with nvfp4 weights is right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(6);
  std::vector<Problem> problems;
  // k that ends within a pair of groups, within a block, and with a block.
  for (const LinearSizes sizes :
       {LinearSizes{1, 80, 24}, {9, 1056, 200}, {40, 400, 72}, {150, 208, 136}})
    for (const DType dtype : {DType::bf16, DType::fp16})
      problems.push_back(packed_problem(sizes, dtype, {{"weights", "nvfp4"}}));
  problems.push_back(packed_problem({1, 4096, 4096}, DType::bf16, {{"weights", "nvfp4"}}));
  verify_families(*backend, linear_op(), problems, random, 2);
}

TEST_CASE("packed weights that wgmma expands are right on a GPU for any number of tokens",
          "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Family& family = family_of(linear_op(), "packed_sm90");
  std::mt19937_64 random(5);
  std::vector<Problem> problems;
  // Tokens and rows that fill no tile, k that ends within a stage, and a share of k for every CTA.
  for (Problem& problem : spread({{7, 4096, 328},
                                  {31, 2048, 1000},
                                  {65, 1152, 456},
                                  {129, 640, 712},
                                  {200, 2560, 4104},
                                  {257, 4096, 1032},
                                  {515, 384, 136}},
                                 3, DType::bf16)) {
    if (problem.size("m") % 2 == 0) problem.options["residual"] = "yes";
    problem = canonical(linear_op(), problem, DeviceKind::cuda);
    if (!family.refusal(problem, backend->facts())) problems.push_back(std::move(problem));
  }
  if (problems.empty()) FFTUNE_SKIP("the device has no wgmma");
  verify_families(*backend, linear_op(), problems, random, 3,
                  [](const Family& of) { return of.name() == "packed_sm90"; });
}

TEST_CASE("weights with f32 scales are rounded once on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const char* weights : {"fp8", "int8"})
    for (const DType dtype : {DType::bf16, DType::fp16})
      for (const std::int64_t m : {33, 70}) {
        const Problem problem =
            canonical(linear_op(), packed_problem({m, 512, 256}, dtype, {{"weights", weights}}),
                      DeviceKind::cuda);
        Verifier verifier(*backend, linear_op(), problem, 8);
        for (const Family* family : linear_op().families()) {
          if (!reads_packed_weights(*family) || family->refusal(problem, backend->facts()))
            continue;
          const Config config = family->default_config(problem, backend->facts());
          CAPTURE(problem.text(), family->name(), config.text());
          const auto compiled =
              backend->compile(family->program(problem, backend->facts(), config));
          REQUIRE(compiled.report.failure == "");
          const auto result = verifier.verify(0, family->stages().size(), {compiled.executable});
          REQUIRE(result.passed);
          // The tolerance has a factor of 1.4 beside one rounding of weights and one of y: a second
          // one of weights makes 1.2 of it.
          CHECK(result.error <= 1.08 / 1.4 * result.tolerance);
        }
      }
}

TEST_CASE("a scale of mxfp4 weights changes nothing but exponents on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const std::int64_t m : {2, 100}) {
    const Problem problem =
        canonical(linear_op(), packed_problem({m, 192, 48}, DType::bf16, {{"weights", "mxfp4"}}),
                  DeviceKind::cuda);
    OpRun run(*backend, linear_op(), problem);
    const auto executables =
        run.compile(linear_op(), problem, default_recipe(linear_op(), problem, backend->facts()));
    const auto with_scale = [&](int byte) {
      run.set("w_scale",
              std::vector<float>(run.values("w_scale").size(), static_cast<float>(byte)));
      run.run(executables);
      return run.values("y");
    };
    const std::vector<float> of_one = with_scale(127);
    for (const int byte : {27, 60, 120, 128, 160}) {
      CAPTURE(m, byte);
      std::vector<float> expected;
      for (const float value : of_one) expected.push_back(std::ldexp(value, byte - 127));
      CHECK(with_scale(byte) == expected);
    }
    for (const float value : with_scale(255)) REQUIRE(std::isnan(value));
  }
}

TEST_CASE("a packed weight of another layout gives NaN on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const std::int64_t m : {2, 100}) {
    const Problem problem = canonical(
        linear_op(), packed_problem({m, 64, 16}, DType::bf16, {{"group", "64"}}), DeviceKind::cuda);
    OpRun run(*backend, linear_op(), problem);
    const Recipe recipe = default_recipe(linear_op(), problem, backend->facts());
    run.run(linear_op(), problem, recipe);
    for (const float value : run.values("y")) REQUIRE(std::isfinite(value));
    std::vector<float> bytes(2 * 512);
    std::array<std::uint8_t, 16> header;
    write_packed_header(header.data(), packed_code::int4, 16, 128);
    std::copy(header.begin(), header.end(), bytes.begin());
    run.set("w", bytes);
    run.run(linear_op(), problem, recipe);
    for (const float value : run.values("y")) REQUIRE(std::isnan(value));
  }
}

TEST_CASE("a packed weight that the launch before writes is read once it is there", "[gpu]") {
  // pack-weight lets the next launch start as soon as it has started itself.
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  const Problem packing = canonical(
      pack_weight_op(),
      {"pack-weight", "fwd", DType::bf16, {{"n", 4096}, {"k", 4096}}, {{"weights", "int4"}}},
      DeviceKind::cuda);
  const auto plain = pack_weight_op().tensors(packing);
  const Variant pack = default_recipe(pack_weight_op(), packing, facts).front();
  for (const std::int64_t m : {1, 16, 100}) {
    const Problem problem =
        canonical(linear_op(), packed_problem({m, 4096, 4096}, DType::bf16, {}), DeviceKind::cuda);
    OpRun run(*backend, linear_op(), problem, {plain[0], plain[1]});
    for (const char* name : {"packed_decode", "packed_sm90", "expand"}) {
      const Family& family = family_of(linear_op(), name);
      if (family.refusal(problem, facts)) continue;
      CAPTURE(m, name);
      Recipe recipe{{name, family.default_config(problem, facts)}};
      if (name == std::string("expand")) {
        const Family& product = family_of(linear_op(), "product_sm80");
        recipe.push_back({"product_sm80", product.default_config(problem, facts)});
      }
      std::vector<std::size_t> places, same;
      for (const TensorSpec& tensor : plain)
        places.push_back(tensor_index(run.specs(), tensor.name));
      for (std::size_t i = 0; i < run.specs().size(); ++i) same.push_back(i);
      Program both;
      append_moved(both,
                   family_of(pack_weight_op(), pack.family).program(packing, facts, pack.config),
                   places, same.size());
      for (std::size_t place = 0; place < recipe.size(); ++place)
        append_moved(both, program_in(recipe, place, linear_op(), problem, facts), same,
                     same.size());
      const auto behind = run.compile({both}), alone = run.compile(linear_op(), problem, recipe);
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        run.draw(seed);
        run.run(behind);
        const auto y = run.bytes("y");
        run.run(alone);
        REQUIRE(y == run.bytes("y"));
      }
    }
  }
}

TEST_CASE("linear's baseline with packed weights writes the same on a GPU too", "[gpu]") {
  on_first_cuda([](Backend& backend) {
    check_baselines(backend, linear_op(), packed_problem({40, 256, 264}, DType::bf16, {}), 2e-2);
  });
}

TEST_CASE("inputs to be timed repeat a part of packed weights behind their header") {
  HostBackend backend;
  for (const char* weights : {"int4", "fp8", "mxfp4", "nvfp4"}) {
    CAPTURE(weights);
    const Op& op = linear_op();
    const auto tensors = op.tensors(canonical(op,
                                              {"linear",
                                               "fwd",
                                               DType::bf16,
                                               {{"m", 1}, {"k", 4096}, {"n", 4096}},
                                               {{"weights", weights}}},
                                              DeviceKind::cuda));
    BufferSets sets(backend, tensors, 1, 5);
    int draws = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto* const noise = tensors[i].draw.target<NoiseDraw>();
      if (noise == nullptr) continue;
      ++draws;
      const auto* const bytes = static_cast<const std::uint8_t*>(sets.tensors(0)[i]);
      const auto all = static_cast<std::size_t>(tensors[i].elements());
      const std::size_t from = static_cast<std::size_t>(noise->from);
      const std::size_t drawn =
          std::min(all, from + ((std::size_t{1} << 21) / noise->unit + 1) * noise->unit);
      std::vector<double> values(drawn);
      tensors[i].draw(5, values);
      CHECK(std::equal(values.begin(), values.end(), bytes));
      CHECK(std::equal(bytes + drawn, bytes + all, bytes + from));
      // A shorter span has the same values.
      std::vector<double> part(from + noise->unit);
      tensors[i].draw(5, part);
      CHECK(std::equal(part.begin(), part.end(), values.begin()));
    }
    CHECK(draws > 0);
  }
}
