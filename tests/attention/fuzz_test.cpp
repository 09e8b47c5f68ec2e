// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/problems.hpp"
#include "kernels/attention/copy_heads.cuh"
#include "kernels/attention/sm90/params.cuh"
#include "support/fuzz_cases.hpp"
#include "support/tensor_maps.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Problems of ragged tiles, few enough that two warpgroups may divide the keys of one.
std::vector<Problem> few_tiles() {
  std::vector<Problem> problems;
  const auto add = [&](DType dtype, std::int64_t dim, Sizes sizes, Options options) {
    sizes.insert({{"b", 3}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}});
    problems.push_back(
        attention_problem(DeviceKind::cuda, "fwd", dtype, std::move(sizes), std::move(options)));
  };
  add(DType::bf16, 128, {{"s", 65}}, {{"mask", "causal"}});
  add(DType::bf16, 64, {{"s", 1000}}, {{"mask", "causal"}, {"lse", "yes"}});
  add(DType::bf16, 128, {{"s", 63}, {"kv", 1000}}, {});
  add(DType::fp16, 96, {{"s", 300}, {"kv", 100}}, {{"mask", "causal"}, {"lse", "yes"}});
  add(DType::bf16, 128, {{"s", 130}, {"kv", 400}, {"window", 50}}, {{"mask", "causal"}});
  add(DType::bf16, 128, {{"s", 70}, {"kv", 300}}, {{"mask", "causal"}, {"lengths", "yes"}});
  add(DType::bf16, 64, {{"s", 70}, {"kv", 300}, {"page", 16}}, {{"lengths", "yes"}});
  add(DType::bf16, 128, {{"s", 700}}, {{"mask", "causal"}, {"layout", "thd"}, {"lse", "yes"}});
  add(DType::bf16, 64, {{"s", 200}},
      {{"bias", "yes"}, {"softcap", "2"}, {"sinks", "yes"}, {"mask", "causal"}});
  return problems;
}

struct ChosenVariant {
  Problem problem;
  DrawnVariant variant;
  CompileResult compiled;
};

void verify_chosen(Backend& backend, std::vector<ChosenVariant>& cases, std::mt19937_64& random) {
  HostThreads threads;
  threads.run(static_cast<int>(cases.size()), threads.max_threads(), [&](int i) {
    auto& each = cases[static_cast<std::size_t>(i)];
    each.compiled = backend.compile(
        each.variant.family->program(each.problem, backend.facts(), each.variant.config));
  });
  for (const ChosenVariant& each : cases) {
    Verifier verifier(backend, attention_op(), each.problem, random());
    verify_variant(verifier, each.variant, each.compiled);
  }
}

/// Adds a variant that is as wanted, if there is one.
template <class Wanted>
void add_variant(std::vector<ChosenVariant>& cases, const Problem& problem, const Family& family,
                 const std::vector<Config>& configs, Draw& draw, const Wanted& wanted) {
  std::vector<Config> some;
  std::copy_if(configs.begin(), configs.end(), std::back_inserter(some), wanted);
  if (some.empty()) return;
  const auto at = static_cast<std::size_t>(draw.below(std::ssize(some)));
  cases.push_back({problem, {&family, some[at], 0, 1}, {}});
}

/// Adds the default and another variant, if the family serves the problem.
void add_two_variants(std::vector<ChosenVariant>& cases, const Problem& problem,
                      const Family& family, const DeviceFacts& facts, Draw& draw) {
  if (family.refusal(problem, facts)) return;
  cases.push_back({problem, {&family, family.default_config(problem, facts), 0, 1}, {}});
  add_variant(cases, problem, family, family.space(problem, facts).feasible(), draw,
              [](const Config&) { return true; });
}

/// Few tiles and random problems with a variant of wgmma each that is as wanted.
template <class Wanted>
void verify_tiles(const Wanted& wanted, std::uint64_t seed) {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  const Family& family = family_of(attention_op(), "attention_sm90");
  Draw draw(seed);
  std::vector<Problem> problems = few_tiles();
  for (int i = 0; i < 1200; ++i)
    problems.push_back(random_attention(DeviceKind::cuda, draw, std::int64_t{1} << 18));
  std::vector<ChosenVariant> cases;
  for (const Problem& problem : problems) {
    if (family.refusal(problem, facts)) continue;
    const auto configs = family.space(problem, facts).feasible();
    add_variant(cases, problem, family, configs, draw,
                [&](const Config& config) { return wanted(problem, config); });
  }
  verify_chosen(*backend, cases, draw.random());
}

}  // namespace

const FuzzCases<attention_op, random_attention, FuzzCounts{.small = 2000, .gpu = 75}>
    attention_cases("attention", "[random1]");
const FuzzCases<attention_op, random_attention_of_values,
                FuzzCounts{.small = 1000, .larger = 30, .gpu = 150}>
    values_cases("attention with values of other features than keys", "[values]");

// In parts, each of a minute or so: a run on a device may be limited in time.
TEST_CASE("random problems of attention are right on the GPU, second part", "[gpu][random2]") {
  verify_on_gpu(attention_op(), random_attention, 75, 20, 4);
}
TEST_CASE("random problems of attention are right on the GPU, third part", "[gpu][random3]") {
  verify_on_gpu(attention_op(), random_attention, 75, 20, 5);
}
TEST_CASE("random problems of attention are right on the GPU, fourth part", "[gpu][random4]") {
  verify_on_gpu(attention_op(), random_attention, 75, 20, 6);
}
TEST_CASE("random problems of attention are right on the GPU, fifth part", "[gpu][random5]") {
  verify_on_gpu(attention_op(), random_attention, 75, 20, 7);
}
TEST_CASE("random problems of attention are right on the GPU, sixth part", "[gpu][random6]") {
  verify_on_gpu(attention_op(), random_attention, 75, 20, 8);
}

TEST_CASE("tiles whose keys are divided are right on the GPU", "[gpu][split]") {
  verify_tiles([](const Problem&, const Config& config) { return config.at("split_keys") != 0; },
               6);
}
TEST_CASE("tiles in pairs are right on the GPU", "[gpu][paired]") {
  verify_tiles(
      [](const Problem&, const Config& config) { return config.word("scheduler") == "paired"; }, 7);
}
TEST_CASE(
    "tiles of several warpgroups, which under a causal mask end with the last query, are "
    "right on the GPU",
    "[gpu][warpgroups]") {
  verify_tiles(
      [](const Problem& problem, const Config& config) {
        return problem.option("mask") == "causal" && config.at("split_keys") == 0 &&
               config.at("mma_warpgroups") > 1 && config.word("scheduler") != "paired";
      },
      9);
}

TEST_CASE("tiles of several heads, and pages that several warps copy, are right on the GPU",
          "[gpu][pack]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  const Family& family = family_of(attention_op(), "attention_sm90");
  Draw draw(8);
  std::vector<Problem> problems;
  const auto add = [&](std::int64_t heads, std::int64_t dim, Sizes sizes, Options options) {
    sizes.insert({{"heads", heads}, {"kv-heads", 2}, {"dim", dim}, {"b", 40}});
    options.emplace("mask", "causal");
    problems.push_back(attention_problem(DeviceKind::cuda, "fwd", DType::bf16, std::move(sizes),
                                         std::move(options)));
  };
  const Options packed{{"layout", "thd"}, {"lengths", "yes"}, {"lse", "yes"}};
  add(8, 128, {{"s", 700}, {"kv", 300}, {"page", 16}}, packed);
  add(14, 128, {{"s", 2000}, {"kv", 500}, {"page", 16}}, packed);
  add(16, 64, {{"s", 100}, {"kv", 300}, {"page", 32}, {"window", 50}}, packed);
  add(6, 96, {{"s", 65}, {"kv", 200}}, {{"lengths", "yes"}, {"sinks", "yes"}, {"lse", "yes"}});
  for (int i = 0; i < 120; ++i)
    problems.push_back(random_attention(DeviceKind::cuda, draw, std::int64_t{1} << 18));
  std::vector<ChosenVariant> cases;
  for (const Problem& problem : problems) {
    if (family.refusal(problem, facts)) continue;
    const auto configs = family.space(problem, facts).feasible();
    const auto add_one = [&](const auto& wanted) {
      add_variant(cases, problem, family, configs, draw, wanted);
    };
    for (const char* scheduler : {"single", "dynamic"})
      add_one([&](const Config& config) {
        return config.at("pack_heads") != 0 && config.word("scheduler") == scheduler;
      });
    if (attention::layer_of(problem).page > 0)
      add_one([](const Config& config) { return config.at("pack_heads") == 0; });
  }
  verify_chosen(*backend, cases, draw.random());
}

TEST_CASE("every way to add up dq is right on the GPU", "[gpu][dq]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  std::mt19937_64 random(7);
  std::vector<ChosenVariant> cases;
  for (const std::int64_t dim : {64, 128, 256})
    for (const char* deterministic : {"no", "yes"}) {
      const Problem problem =
          attention_problem(DeviceKind::cuda, "bwd", DType::bf16,
                            {{"s", 200}, {"b", 1}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}},
                            {{"mask", "causal"}, {"deterministic", deterministic}});
      const Family& family = family_of(attention_op(), "attention_bwd_sm90");
      if (family.refusal(problem, facts)) continue;
      const auto configs = family.space(problem, facts).feasible();
      for (const char* way : {"bulk", "direct"}) {
        const auto first = std::find_if(configs.begin(), configs.end(), [&](const Config& config) {
          return config.word("dq") == way && config.at("ahead") == (dim == 64 ? 1 : 0);
        });
        if (first != configs.end()) cases.push_back({problem, {&family, *first, 0, 1}, {}});
      }
    }
  verify_chosen(*backend, cases, random);
}

namespace {

/// Problems with keys that several heads of queries read, and a variant for each number of copies.
std::vector<ChosenVariant> variants_of_copies(const DeviceFacts& facts) {
  const Family& family = family_of(attention_op(), "attention_bwd_sm90_copies");
  const std::pair<Sizes, Options> problems[] = {
      {{{"s", 100}, {"heads", 12}, {"kv-heads", 2}, {"dim", 184}}, {{"mask", "causal"}}},
      {{{"s", 70}, {"kv", 90}, {"heads", 4}, {"kv-heads", 1}, {"dim", 64}}, {{"mask", "none"}}},
      {{{"s", 130}, {"heads", 6}, {"kv-heads", 3}, {"dim", 64}},
       {{"mask", "causal"}, {"layout", "thd"}}},
      {{{"s", 80}, {"heads", 6}, {"kv-heads", 2}, {"dim", 72}, {"k-row", 200}, {"v-row", 152}},
       {{"mask", "causal"}, {"deterministic", "yes"}}}};
  std::vector<ChosenVariant> cases;
  for (auto [sizes, options] : problems) {
    sizes.insert({"b", 2});
    const Problem problem = attention_problem(DeviceKind::cuda, "bwd", DType::bf16, sizes, options);
    if (family.refusal(problem, facts)) continue;
    std::set<std::int64_t> tried;
    for (const Config& config : family.space(problem, facts).feasible())
      if (tried.insert(config.at("copies")).second)
        cases.push_back({problem, {&family, config, 0, 1}, {}});
  }
  return cases;
}

}  // namespace

TEST_CASE("gradients of copied keys and values are right on the GPU", "[gpu][dq][copies]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  auto cases = variants_of_copies(backend->facts());
  verify_chosen(*backend, cases, random);
}

TEST_CASE("keys and values are copied for every number that divides their heads of queries") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  std::vector<std::int64_t> copies;
  for (const ChosenVariant& variant : variants_of_copies(facts))
    copies.push_back(variant.variant.config.at("copies"));
  CHECK(copies == std::vector<std::int64_t>{2, 3, 6, 2, 4, 2, 3});
  const Family& family = family_of(attention_op(), "attention_bwd_sm90_copies");
  const auto problem = [](std::int64_t heads, std::int64_t kv_heads) {
    return attention_problem(
        DeviceKind::cuda, "bwd", DType::bf16,
        {{"s", 256}, {"b", 1}, {"heads", heads}, {"kv-heads", kv_heads}, {"dim", 184}},
        {{"mask", "causal"}});
  };
  // Four key blocks of each of two heads leave most SMs idle: a copy for each head of queries.
  CHECK(family.default_config(problem(12, 2), facts).at("copies") == 6);
  CHECK(family.refusal(problem(12, 12), facts));
  CHECK(family.refusal(problem(17, 1), facts));
  // No GPU has timed it.
  CHECK(default_recipe(attention_op(), problem(12, 2), facts).front().family ==
        "attention_bwd_sm90");
}

namespace {

struct BackwardVariants {
  int seed, draws;
  std::int64_t elements;  // of a problem, at most
  std::size_t least, most;
  std::function<bool(const Problem&)> serves;
  std::function<bool(const Config&)> is_wanted;
};

const BackwardVariants fewest_registers{
    .seed = 9,
    .draws = 600,
    .elements = std::int64_t{1} << 18,
    .least = 10,
    .most = 600,
    .serves = [](const Problem& problem) { return problem.size("dim") == 128; },
    .is_wanted = [](const Config& config) { return config.at("bm") == 80; }};

const BackwardVariants idle_warps{.seed = 11,
                                  .draws = 800,
                                  .elements = std::int64_t{1} << 19,
                                  .least = 16,
                                  .most = 32,
                                  // With three groups or more of one head each.
                                  .serves =
                                      [](const Problem& problem) {
                                        const attention::Layer layer = attention::layer_of(problem);
                                        return layer.b * layer.kv_heads >= 3;
                                      },
                                  .is_wanted =
                                      [](const Config& config) {
                                        return config.word("around") == "beside" &&
                                               config.at("group") == 1;
                                      }};

/// One wanted variant of attention_bwd_sm90 for each random problem that it serves.
std::vector<ChosenVariant> chosen_backward(const BackwardVariants& of, const DeviceFacts& facts,
                                           Draw& draw) {
  const Family& family = family_of(attention_op(), "attention_bwd_sm90");
  std::vector<ChosenVariant> cases;
  for (int i = 0; i < of.draws && cases.size() < of.most; ++i) {
    const Problem problem = random_attention(DeviceKind::cuda, draw, of.elements);
    if (problem.pass != "bwd" || !of.serves(problem) || family.refusal(problem, facts)) continue;
    add_variant(cases, problem, family, family.space(problem, facts).feasible(), draw,
                of.is_wanted);
  }
  CHECK(cases.size() > of.least);
  return cases;
}

void verify_backward(const BackwardVariants& of) {
  FFTUNE_FIRST_CUDA(backend);
  Draw draw(of.seed);
  auto cases = chosen_backward(of, backend->facts(), draw);
  verify_chosen(*backend, cases, draw.random());
}

}  // namespace

TEST_CASE("tiles with the fewest registers to spare are right on the GPU", "[gpu][dq]") {
  verify_backward(fewest_registers);
}

TEST_CASE("idle warps that prepare and convert other heads are right on the GPU", "[gpu][dq]") {
  verify_backward(idle_warps);
}

TEST_CASE("variants of the backward pass for a GPU are chosen without one") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  for (const BackwardVariants& of : {fewest_registers, idle_warps}) {
    Draw draw(of.seed);
    chosen_backward(of, facts, draw);
  }
}

namespace {

/// The family of sm_90a that serves a problem.
std::string wgmma_family(const Problem& problem) {
  if (problem.pass == "bwd") return "attention_bwd_sm90";
  return problem.size("dim") > 256 ? "attention_wide_sm90" : "attention_sm90";
}

/// Both passes at a head dim, in one of several forms.
std::vector<Problem> problems_of_width(std::int64_t dim, std::size_t form) {
  const std::pair<Sizes, Options> forms[] = {
      {{{"s", 200}}, {{"mask", "causal"}}},
      {{{"s", 70}, {"kv", 300}}, {{"mask", "none"}, {"sinks", "yes"}}},
      {{{"s", 300}}, {{"mask", "causal"}, {"layout", "thd"}}},
      {{{"s", 190}, {"window", 70}}, {{"mask", "causal"}}},
      {{{"s", 129}, {"kv", 260}}, {{"mask", "causal"}, {"lengths", "yes"}}},
      {{{"s", 150}}, {{"mask", "packed"}, {"mask-data", "documents"}}},
      {{{"s", 140}, {"q-row", 8 * dim}, {"k-row", 8 * dim}}, {{"mask", "none"}}}};
  auto [sizes, options] = forms[form % std::size(forms)];
  sizes.insert({{"b", 3}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}});
  const DType dtype = form % 3 == 2 ? DType::fp16 : DType::bf16;
  std::vector<Problem> problems{attention_problem(DeviceKind::cuda, "bwd", dtype, sizes, options)};
  options["lse"] = "yes";
  problems.push_back(attention_problem(DeviceKind::cuda, "fwd", dtype, sizes, options));
  if (dim > 256 && form % 2 == 0) {
    // Few queries, whose keys are divided.
    Sizes few = sizes;
    few["s"] = 2;
    few["kv"] = 700;
    few.erase("window");
    problems.push_back(attention_problem(DeviceKind::cuda, "fwd", dtype, few,
                                         {{"mask", "causal"}, {"lengths", "yes"}, {"lse", "yes"}}));
  }
  if (dim % 8 != 0) return problems;
  sizes["page"] = 16;
  sizes.erase("k-row");
  if (options.contains("layout")) options["lengths"] = "yes";
  problems.push_back(attention_problem(DeviceKind::cuda, "fwd", dtype, sizes, options));
  return problems;
}

/// Forward problems whose values have other features than keys, as latent attention's and others.
struct Widths {
  std::int64_t keys, values;
};
constexpr Widths other_values[] = {{192, 128}, {96, 64},  {128, 64}, {64, 128},  {256, 128},
                                   {144, 48},  {80, 16},  {48, 80},  {192, 256}, {16, 240},
                                   {144, 40},  {192, 72}, {32, 8},   {64, 248}};

std::vector<Problem> problems_of_values(const Widths& widths, std::size_t form) {
  std::vector<Problem> problems;
  for (Problem problem : problems_of_width(widths.keys, form)) {
    if (problem.pass == "bwd") continue;
    problem.sizes["v-dim"] = widths.values;
    problems.push_back(
        attention_problem(DeviceKind::cuda, "fwd", problem.dtype, problem.sizes, problem.options));
  }
  return problems;
}

}  // namespace

TEST_CASE("wgmma serves every even head dim, up to 256 in both passes and to 512 forward") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  for (std::int64_t dim = 2; dim <= 512; dim += 2)
    for (const Problem& problem : problems_of_width(dim, static_cast<std::size_t>(dim / 2))) {
      if (problem.pass == "bwd" && dim > 256) continue;
      CAPTURE(problem.text());
      for (const Family* family : attention_op().families()) {
        if (family->device_kind() != DeviceKind::cuda || family->refusal(problem, facts)) continue;
        // The first family that serves is the fastest.
        CHECK(family->name() == wgmma_family(problem));
        break;
      }
    }
}

TEST_CASE("tensor maps are of whole rows, of heads, or of copies of heads") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  const auto program_of = [&](const char* pass, std::int64_t dim) {
    const Problem problem = attention_problem(
        DeviceKind::cuda, pass, DType::bf16,
        {{"s", 200}, {"b", 3}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}}, {{"mask", "causal"}});
    const Family& family = family_of(attention_op(), wgmma_family(problem));
    return family.program(problem, facts, family.default_config(problem, facts));
  };
  const auto launch_at = [](const Program& program, std::size_t step) {
    return std::get<KernelLaunch>(program.steps.at(step));
  };
  for (const char* pass : {"fwd", "bwd"}) {
    CAPTURE(pass);
    const std::size_t main = pass == std::string("bwd") ? 1 : 0;
    for (const TensorMapArgument& map : tensor_maps_of(launch_at(program_of(pass, 80), main))) {
      CHECK((map.columns == 4 * 80 || map.columns == 2 * 80));
      CHECK((map.rows == 200 && map.matrices == 3));
    }
    for (const TensorMapArgument& map : tensor_maps_of(launch_at(program_of(pass, 72), main))) {
      CHECK((map.columns == 72 && (map.rows == 4 || map.rows == 2) && map.matrices == 600));
      CHECK((map.box_rows == 1 && map.box_matrices >= 48));
    }
    const Program copied = program_of(pass, 66);
    const KernelLaunch copy = launch_at(copied, 0);
    REQUIRE(copy.parameters.has_value());
    std::vector<std::size_t> copies;
    for (const ParameterStruct::Field& field : copy.parameters->fields)
      if (const auto* to = std::get_if<ScratchArgument>(&field.value)) {
        CHECK(field.offset == offsetof(attention_copy_params, to) + 8 * copies.size());
        copies.push_back(to->scratch);
      }
    const auto maps = tensor_maps_of(launch_at(copied, main + 1));
    REQUIRE((copies.size() == maps.size() && copy.grid.y == maps.size()));
    if (main == 0) {
      // By this the kernel finds a head of k.
      constexpr std::size_t at =
          offsetof(attention_sm90_params, attention) + offsetof(attention_params, kv_head);
      std::int32_t elements = 0;
      const KernelLaunch launch = launch_at(copied, 1);
      for (const ParameterStruct::Field& field : launch.parameters->fields)
        if (field.offset == at) elements = std::get<std::int32_t>(field.value);
      CHECK(elements == 80);
    }
    for (const TensorMapArgument& map : maps) {
      const auto scratch = std::get<ScratchArgument>(map.matrix).scratch;
      CHECK(std::count(copies.begin(), copies.end(), scratch) == 1);
      CHECK((map.columns == 4 * 80 || map.columns == 2 * 80));
      CHECK(copied.scratch.at(scratch).bytes ==
            static_cast<std::size_t>(map.columns * map.rows * map.matrices * 2));
    }
  }
}

TEST_CASE("heads of every width are right in wgmma's kernels on the GPU", "[gpu][widths]") {
  FFTUNE_FIRST_CUDA(backend);
  Draw draw(13);
  std::vector<ChosenVariant> cases;
  std::vector<std::int64_t> dims{2,   20,  36,  66,  100, 130, 190, 250, 258, 264, 300,
                                 320, 328, 384, 400, 408, 448, 456, 480, 500, 504, 512};
  for (std::int64_t dim = 8; dim <= 256; dim += 8) dims.push_back(dim);
  for (std::size_t i = 0; i < dims.size(); ++i)
    for (const Problem& problem : problems_of_width(dims[i], i)) {
      if (problem.pass == "bwd" && dims[i] > 256) continue;
      const Family& family = family_of(attention_op(), wgmma_family(problem));
      add_two_variants(cases, problem, family, backend->facts(), draw);
    }
  verify_chosen(*backend, cases, draw.random());
}

TEST_CASE("wgmma serves values of multiples of 8 features beside keys of multiples of 16") {
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  const Family& family = family_of(attention_op(), "attention_sm90");
  for (std::size_t form = 0; form < 7; ++form) {
    for (const Widths& widths : other_values)
      for (const Problem& problem : problems_of_values(widths, form)) {
        CAPTURE(problem.text());
        CHECK(family.refusal(problem, facts) == std::nullopt);
      }
    for (const Widths& widths : {Widths{192, 76}, {24, 16}, {192, 272}})
      for (const Problem& problem : problems_of_values(widths, form))
        CHECK(family.refusal(problem, facts) != std::nullopt);
  }
}

TEST_CASE("values of other widths than keys are right in wgmma's kernel on the GPU",
          "[gpu][widths]") {
  FFTUNE_FIRST_CUDA(backend);
  const Family& family = family_of(attention_op(), "attention_sm90");
  Draw draw(15);
  std::vector<ChosenVariant> cases;
  std::size_t form = 0;
  for (int times = 0; times < 2; ++times)
    for (const Widths& widths : other_values)
      for (const Problem& problem : problems_of_values(widths, form++))
        add_two_variants(cases, problem, family, backend->facts(), draw);
  verify_chosen(*backend, cases, draw.random());
}

TEST_CASE("heads of more than 256 features are right in mma.sync's kernel on the GPU",
          "[gpu][widths]") {
  FFTUNE_FIRST_CUDA(backend);
  const Family& family = family_of(attention_op(), "attention_wide_sm80");
  Draw draw(14);
  std::vector<ChosenVariant> cases;
  std::size_t form = 0;
  for (const std::int64_t dim : {258, 264, 300, 320, 400, 480, 510, 512})
    for (int i = 0; i < 2; ++i)
      for (const Problem& of_width : problems_of_width(dim, form++)) {
        if (of_width.pass == "bwd") continue;
        // Where wgmma serves, too, it has more queries.
        Problem problem = of_width;
        problem.sizes["s"] = std::min<std::int64_t>(problem.size("s"), 64 - 5 * i);
        if (family.refusal(problem, backend->facts())) continue;
        for (const Config& config : family.space(problem, backend->facts()).feasible())
          cases.push_back({problem, {&family, config, 0, 1}, {}});
      }
  CHECK(cases.size() > 20);
  verify_chosen(*backend, cases, draw.random());
}

TEST_CASE("sequences cut among CTAs are right on the GPU", "[gpu][cut]") {
  FFTUNE_FIRST_CUDA(backend);
  Draw draw(8);
  const Family& family = family_of(attention_op(), "attention_decode");
  struct Cut {
    std::int64_t b, s, kv, heads, kv_heads, page;
  };
  std::vector<ChosenVariant> cases;
  for (const Cut& cut :
       {Cut{1, 1, 8192, 8, 8, 0}, Cut{1, 2, 5000, 16, 4, 0}, Cut{2, 3, 3001, 8, 2, 0},
        Cut{1, 1, 4097, 4, 1, 0}, Cut{4, 1, 2048, 8, 4, 0}, Cut{3, 1, 1000, 6, 6, 0},
        Cut{1, 5, 2999, 8, 2, 16}, Cut{1, 1, 700, 32, 32, 0}})
    for (const std::int64_t dim : {64, 128, 256}) {
      std::map<std::string, std::int64_t> sizes{{"b", cut.b},   {"s", cut.s},
                                                {"kv", cut.kv}, {"heads", cut.heads},
                                                {"dim", dim},   {"kv-heads", cut.kv_heads}};
      if (cut.page > 0) sizes["page"] = cut.page;
      const Problem problem = attention_problem(DeviceKind::cuda, "fwd", DType::bf16, sizes,
                                                {{"mask", "causal"}, {"lse", "yes"}});
      if (family.refusal(problem, backend->facts())) continue;
      const auto configs = family.space(problem, backend->facts()).feasible();
      for (int i = 0; i < 2; ++i) {
        const auto at = static_cast<std::size_t>(draw.below(std::ssize(configs)));
        cases.push_back({problem, {&family, configs[at], 0, 1}, {}});
      }
    }
  verify_chosen(*backend, cases, draw.random());
}

TEST_CASE("query blocks of the backward pass end with a causal mask's queries") {
  // Eight heads of 1,024 queries took 413 us in blocks of 112 on an H100, and 357 in blocks of 128.
  const DeviceFacts facts = products_of_architecture("sm_90a").front();
  const auto queries = [&](std::int64_t s, std::int64_t dim) {
    const Problem problem =
        attention_problem(DeviceKind::cuda, "bwd", DType::bf16,
                          {{"b", 8}, {"s", s}, {"heads", 32}, {"dim", dim}}, {{"mask", "causal"}});
    for (const Family* family : attention_op().families())
      if (family->name() == "attention_bwd_sm90")
        return family->default_config(problem, facts).at("bm");
    return std::int64_t{0};
  };
  CHECK(queries(1024, 64) == 128);
  CHECK(queries(2048, 64) == 128);
  CHECK(queries(2048, 128) == 64);
}
