// Values that random data do not have, on every family: extreme scores, keys that nobody may look
// at, and gradients of what a forward pass wrote.
#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "attention/run.hpp"
#include "support/fields.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Allowed error of a family in 16 bits: the weights' rounding and that of the output, each 0.41 of
/// a unit roundoff, and as much again.
double bound_of(DType dtype) {
  return dtype == DType::f32 ? 2e-5 : 1.2 * dtype_unit_roundoff(dtype);
}

void round_inputs(const Problem& problem, ReferenceTensors& tensors) {
  for (const TensorSpec& spec : attention_op().tensors(problem))
    if (spec.role == Role::input) tensors[spec.name] = rounded(spec.dtype, tensors.at(spec.name));
}

void check_outputs(const Problem& problem, const ReferenceTensors& values,
                   const ReferenceTensors& expected) {
  for (const TensorSpec& spec : attention_op().tensors(problem)) {
    if (spec.role != Role::output) continue;
    CAPTURE(spec.name);
    CHECK(relative_error(values.at(spec.name), expected.at(spec.name)) < bound_of(problem.dtype));
  }
}

std::vector<Problem> extreme_problems(DeviceKind kind, DType dtype) {
  std::vector<Problem> problems;
  for (const char* mask : {"none", "causal", "bool"})
    for (const std::int64_t s : {1, 17, 130})
      problems.push_back(attention_problem(
          kind, "fwd", dtype, {{"s", s}, {"kv", 150}, {"b", 2}, {"heads", 2}, {"dim", 64}},
          {{"mask", mask}, {"lse", "yes"}, {"scale", "1"}}));
  return problems;
}

/// Scores of about ±1e4: one key takes all of the weight, and no exponential may overflow.
void check_extreme_scores(Backend& backend, DType dtype) {
  std::mt19937_64 random(5);
  for (const Problem& problem : extreme_problems(backend.facts().kind, dtype)) {
    ReferenceTensors inputs;
    draw_inputs(problem, random, inputs);
    // Powers of two, so that sums are exact whatever their order: distances are at least 8.
    for (double& value : inputs.at("q")) value = value < 0 ? -8 : 8;
    for (double& value : inputs.at("k")) value = value < 0 ? -32 : 32;
    round_inputs(problem, inputs);
    const auto expected = run_reference(problem, inputs);
    for_each_family(backend.facts(), problem, [&](const Family& family, const Config& config) {
      CAPTURE(problem.text(), family.name(), config.text());
      check_outputs(problem, run_family(backend, family, config, problem, inputs), expected);
    });
  }
}

/// The rows of k and v that a sequence has: its keys in pages of the cache, or in its own rows.
std::vector<bool> rows_in_use(const attention::Layer& layer, const ReferenceTensors& inputs) {
  std::vector<bool> used(static_cast<std::size_t>(layer.kv_tokens()));
  for (std::int64_t sequence = 0; sequence < layer.b; ++sequence) {
    const auto length = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(inputs.at("lengths")[static_cast<std::size_t>(sequence)]), 0,
        layer.kv);
    for (std::int64_t key = 0; key < length; ++key) {
      std::int64_t token = sequence * layer.kv + key;
      if (layer.page > 0) {
        const auto page = static_cast<std::int64_t>(inputs.at("pages")[static_cast<std::size_t>(
            sequence * layer.pages_of_sequence() + key / layer.page)]);
        if (page < 0 || page >= layer.pages) continue;
        token = page * layer.page + key % layer.page;
      }
      used[static_cast<std::size_t>(token)] = true;
    }
  }
  return used;
}

/// Keys beyond a sequence's length, and other pages, hold NaN. `outside`: some pages are none of
/// the cache's, and some lengths are negative or more than there are keys.
void check_foreign_keys(Backend& backend, const Problem& problem, bool outside) {
  std::mt19937_64 random(6);
  const attention::Layer layer = attention::layer_of(problem);
  ReferenceTensors inputs;
  draw_inputs(problem, random, inputs);
  if (outside) {
    constexpr double least = -2147483648.0, most = 2147483647.0;
    inputs.at("lengths")[1] = least;
    inputs.at("lengths")[2] = most;
    const double hostile[] = {-1, least, most, static_cast<double>(layer.pages), 1 << 28, -65536};
    if (layer.page > 0)
      for (std::size_t i = 0; i < inputs.at("pages").size(); ++i)
        if (i % 3 == 1) inputs.at("pages")[i] = hostile[i / 3 % std::size(hostile)];
  }
  round_inputs(problem, inputs);
  const auto expected = run_reference(problem, inputs);
  const auto used = rows_in_use(layer, inputs);
  for (const char* name : {"k", "v"}) {
    auto& values = inputs.at(name);
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!used[i / static_cast<std::size_t>(layer.k_row)])
        values[i] = std::numeric_limits<double>::quiet_NaN();
  }
  for_each_family(backend.facts(), problem, [&](const Family& family, const Config& config) {
    CAPTURE(problem.text(), family.name(), config.text());
    check_outputs(problem, run_family(backend, family, config, problem, inputs), expected);
  });
}

/// With whether some pages and lengths are outside.
std::vector<std::pair<Problem, bool>> foreign_problems(DeviceKind kind, DType dtype) {
  const Options lengths{{"mask", "causal"}, {"lengths", "yes"}};
  const Options sinks{{"mask", "causal"}, {"lengths", "yes"}, {"sinks", "yes"}, {"lse", "yes"}};
  std::vector<std::pair<Problem, bool>> problems;
  for (const std::int64_t page : {0, 16, 64})
    for (const std::int64_t s : {1, 70}) {
      Sizes sizes{{"s", s}, {"kv", 200}, {"b", 5}, {"heads", 4}, {"kv-heads", 2}, {"dim", 64}};
      if (page > 0) sizes.insert({{"page", page}, {"pages", 90}});
      const auto add = [&](const Options& options, bool outside) {
        problems.emplace_back(attention_problem(kind, "fwd", dtype, sizes, options), outside);
      };
      add(lengths, false);
      add(sinks, true);
      sizes["window"] = 40;
      sizes["heads"] = 16;
      sizes["dim"] = s == 1 ? 20 : 128;
      add(sinks, page == 16);
    }
  return problems;
}

void check_foreign_keys(Backend& backend, DType dtype) {
  for (const auto& [problem, outside] : foreign_problems(backend.facts().kind, dtype))
    check_foreign_keys(backend, problem, outside);
}

/// Heads of every alignment: rows of 4, 8 and 16 bytes, and more features than tensor cores take.
std::vector<Problem> problems_of_head_dims(DeviceKind kind, DType dtype) {
  std::vector<Problem> problems;
  const std::int64_t dims[] = {2,  4,  6,   10,  12,  20,  36,  40,  62,  72,  80,
                               88, 96, 100, 112, 130, 152, 232, 252, 254, 264, 512};
  int at = 0;
  for (const std::int64_t dim : dims)
    for (const std::int64_t s : {1, 70}) {
      ++at;
      Sizes sizes{{"s", s}, {"kv", 150}, {"b", 2}, {"heads", 6}, {"kv-heads", 2}, {"dim", dim}};
      Options options{{"mask", "causal"}, {"lse", "yes"}};
      if (at % 3 == 0) sizes["page"] = 16;
      if (at % 3 == 1) sizes["k-row"] = sizes["v-row"] = 10 * dim;
      if (at % 4 == 0) options["layout"] = "thd";
      if (at % 4 == 0 && sizes.contains("page")) options["lengths"] = "yes";
      if (at % 5 == 0) options["sinks"] = "yes";
      for (const char* pass : {"fwd", "bwd"}) {
        if (pass[0] == 'b') {
          if (s == 1 || sizes.contains("page")) continue;
          options.erase("lse");
        }
        problems.push_back(attention_problem(kind, pass, dtype, sizes, options));
      }
    }
  return problems;
}

void check_head_dims(Backend& backend, DType dtype) {
  std::mt19937_64 random(8);
  for (const Problem& problem : problems_of_head_dims(backend.facts().kind, dtype))
    CHECK(verify_variants(backend, attention_op(), problem, random, 1) >= 2);
}

/// Values of the first half of the heads, of a tensor whose rows end with [heads, dim].
std::vector<double> of_first_heads(const std::vector<double>& values, std::int64_t heads,
                                   std::int64_t dim) {
  std::vector<double> first;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (static_cast<std::int64_t>(i) / dim % heads < heads / 2) first.push_back(values[i]);
  return first;
}

/// The second half of all heads holds NaN: the first half's results are as without.
void check_neighbours(Backend& backend, const Problem& problem) {
  std::mt19937_64 random(12);
  const attention::Layer layer = attention::layer_of(problem);
  const auto heads_of = [&](const std::string& name) {
    const bool of_keys = name == "k" || name == "v" || name == "dk" || name == "dv";
    return of_keys ? layer.kv_heads : layer.heads;
  };
  ReferenceTensors inputs;
  draw_inputs(problem, random, inputs);
  round_inputs(problem, inputs);
  const auto expected = run_reference(problem, inputs);
  for (const char* name : {"q", "k", "v", "out", "d_out"}) {
    if (!inputs.contains(name)) continue;
    auto& values = inputs.at(name);
    for (std::size_t i = 0; i < values.size(); ++i)
      if (static_cast<std::int64_t>(i) / layer.dim % heads_of(name) >= heads_of(name) / 2)
        values[i] = std::numeric_limits<double>::quiet_NaN();
  }
  for_each_family(backend.facts(), problem, [&](const Family& family, const Config& config) {
    CAPTURE(problem.text(), family.name(), config.text());
    const auto results = run_family(backend, family, config, problem, inputs);
    for (const TensorSpec& spec : attention_op().tensors(problem)) {
      if (spec.role != Role::output) continue;
      CAPTURE(spec.name);
      const std::int64_t heads = heads_of(spec.name);
      CHECK(relative_error(of_first_heads(results.at(spec.name), heads, layer.dim),
                           of_first_heads(expected.at(spec.name), heads, layer.dim)) <
            2 * bound_of(problem.dtype));
    }
  });
}

std::vector<Problem> neighbour_problems(DeviceKind kind) {
  std::vector<Problem> problems;
  for (const std::int64_t dim : {24, 66, 72, 80, 104, 136, 160})
    for (const char* pass : {"fwd", "bwd"})
      for (const char* layout : {"bshd", "thd"})
        problems.push_back(
            attention_problem(kind, pass, DType::bf16,
                              {{"s", 150}, {"b", 2}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}},
                              {{"mask", "causal"}, {"layout", layout}}));
  return problems;
}

/// A backward family reads what a forward family wrote, in rows without keys too.
void check_chain(Backend& backend, const Problem& forward, const Problem& backward) {
  std::mt19937_64 random(7);
  ReferenceTensors inputs;
  draw_inputs(forward, random, inputs);
  round_inputs(forward, inputs);
  ReferenceTensors saved;
  for_each_family(backend.facts(), forward, [&](const Family& family, const Config& config) {
    if (saved.empty()) saved = run_family(backend, family, config, forward, inputs);
  });
  draw_inputs(backward, random, saved);
  round_inputs(backward, saved);
  const auto expected = run_reference(backward, saved);
  for_each_family(backend.facts(), backward, [&](const Family& family, const Config& config) {
    CAPTURE(backward.text(), family.name(), config.text());
    const auto gradients = run_family(backend, family, config, backward, saved);
    for (const char* name : {"dq", "dk", "dv"}) {
      CAPTURE(name);
      // Gradients of scores cancel, so that what their terms are rounded by counts more.
      CHECK(relative_error(gradients.at(name), expected.at(name)) < 2 * bound_of(backward.dtype));
    }
  });
}

/// Forward passes and their backward passes.
std::vector<std::pair<Problem, Problem>> chains(DeviceKind kind, DType dtype) {
  const Sizes sizes{{"s", 100}, {"b", 2}, {"heads", 4}, {"kv-heads", 2}, {"dim", 64}};
  Sizes shorter = sizes;
  shorter["kv"] = 40;
  std::vector<std::pair<Problem, Problem>> found;
  const auto add = [&](const Sizes& own, const Options& options) {
    Options saving = options;
    saving["lse"] = "yes";
    found.emplace_back(attention_problem(kind, "fwd", dtype, own, saving),
                       attention_problem(kind, "bwd", dtype, own, options));
  };
  add(sizes, {{"mask", "none"}});
  add(shorter, {{"mask", "causal"}});
  add(shorter, {{"mask", "causal"}, {"sinks", "yes"}});
  add(sizes, {{"mask", "bool"}, {"mask-data", "none"}});
  add(sizes, {{"mask", "packed"}, {"mask-data", "upper"}});
  add(sizes, {{"mask", "causal"}, {"layout", "thd"}});
  add(sizes, {{"mask", "causal"}, {"lengths", "yes"}, {"softcap", "5"}});
  return found;
}

void check_chains(Backend& backend, DType dtype) {
  for (const auto& [forward, backward] : chains(backend.facts().kind, dtype))
    check_chain(backend, forward, backward);
}

/// Has the compiler's cache hold what the checks of these problems compile one after the other:
/// that is nearly all of the time that they take on a GPU.
void compile_together(Backend& backend, const std::vector<Problem>& problems) {
  std::vector<Program> programs;
  for (const Problem& problem : problems)
    for_each_family(backend.facts(), problem, [&](const Family& family, const Config& config) {
      programs.push_back(family.program(problem, backend.facts(), config));
    });
  HostThreads threads;
  threads.run(static_cast<int>(programs.size()), threads.max_threads(), [&](int i) {
    CompileResult result = backend.compile(programs[static_cast<std::size_t>(i)]);
  });
}

}  // namespace

TEST_CASE("extreme scores give no NaN on the CPU") {
  const auto backend = open_cpu();
  check_extreme_scores(*backend, DType::f32);
  check_extreme_scores(*backend, DType::bf16);
}

TEST_CASE("memory beyond a sequence's keys changes nothing on the CPU") {
  check_foreign_keys(*open_cpu(), DType::f32);
  check_foreign_keys(*open_cpu(), DType::bf16);
}

TEST_CASE("every even head dim is right on the CPU") {
  check_head_dims(*open_cpu(), DType::f32);
  check_head_dims(*open_cpu(), DType::bf16);
}

TEST_CASE("every even head dim is right on a GPU", "[gpu][dims]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(8);
  // The two types have the same kernels: each has every other problem.
  auto problems = problems_of_head_dims(DeviceKind::cuda, DType::bf16);
  const auto others = problems_of_head_dims(DeviceKind::cuda, DType::fp16);
  for (std::size_t i = 1; i < problems.size(); i += 2) problems[i] = others[i];
  verify_families(*backend, attention_op(), problems, random, 1);
}

TEST_CASE("NaN in a head leaves its neighbours alone on the CPU") {
  const auto backend = open_cpu();
  for (const Problem& problem : neighbour_problems(DeviceKind::cpu))
    check_neighbours(*backend, problem);
}

TEST_CASE("NaN in a head leaves its neighbours alone on the GPU", "[gpu][dims]") {
  FFTUNE_FIRST_CUDA(backend);
  const auto problems = neighbour_problems(DeviceKind::cuda);
  compile_together(*backend, problems);
  for (const Problem& problem : problems) check_neighbours(*backend, problem);
}

TEST_CASE("gradients follow from what the forward pass wrote on the CPU") {
  check_chains(*open_cpu(), DType::f32);
}

TEST_CASE("extreme scores, foreign keys and saved values on the GPU", "[gpu][values]") {
  FFTUNE_FIRST_CUDA(backend);
  const DType dtypes[] = {DType::bf16, DType::fp16, DType::f32};
  std::vector<Problem> problems;
  for (const DType dtype : dtypes) {
    for (const Problem& problem : extreme_problems(DeviceKind::cuda, dtype))
      problems.push_back(problem);
    if (dtype != DType::fp16)
      for (const auto& [problem, outside] : foreign_problems(DeviceKind::cuda, dtype))
        problems.push_back(problem);
    for (const auto& [forward, backward] : chains(DeviceKind::cuda, dtype))
      problems.insert(problems.end(), {forward, backward});
  }
  compile_together(*backend, problems);
  for (const DType dtype : dtypes) {
    check_extreme_scores(*backend, dtype);
    if (dtype != DType::fp16) check_foreign_keys(*backend, dtype);  // bf16 has the same kernels
    check_chains(*backend, dtype);
  }
}

TEST_CASE("leftovers in the workspace do not affect the next run", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(9);
  // Decode cuts sequences of other lengths in other places; tiles of unlike sequences are taken
  // from a counter.
  constexpr std::int64_t sequences = 7;
  for (const auto& [s, kv] :
       {std::pair<std::int64_t, std::int64_t>{1, 2000}, {3, 2000}, {200, 600}}) {
    const Problem problem = attention_problem(
        DeviceKind::cuda, "fwd", DType::bf16,
        {{"s", s}, {"kv", kv}, {"b", sequences}, {"heads", 16}, {"kv-heads", 2}, {"dim", 64}},
        {{"mask", "causal"}, {"lengths", "yes"}});
    for (const Family* family : attention_op().families()) {
      if (family->device_kind() != DeviceKind::cuda || family->is_fallback() ||
          family->refusal(problem, backend->facts()))
        continue;
      auto configs = family->space(problem, backend->facts()).feasible();
      std::shuffle(configs.begin(), configs.end(), random);
      configs.resize(std::min<std::size_t>(configs.size(), 3));
      configs.push_back(family->default_config(problem, backend->facts()));
      for (const Config& config : configs) {
        CAPTURE(problem.text(), family->name(), config.text());
        const auto compiled = backend->compile(family->program(problem, backend->facts(), config));
        REQUIRE(compiled.report.failure == "");
        const auto workspace = workspace_of(*backend, *compiled.executable);
        for (int run = 0; run < 4; ++run) {
          ReferenceTensors inputs;
          auto& lengths = inputs["lengths"];
          for (std::int64_t i = 0; i < sequences; ++i)
            lengths.push_back(static_cast<double>(random() % static_cast<std::uint64_t>(kv + 1)));
          draw_inputs(problem, random, inputs);
          round_inputs(problem, inputs);
          CAPTURE(run);
          check_outputs(
              problem,
              run_compiled(*backend, *compiled.executable, problem, inputs, workspace->data()),
              run_reference(problem, inputs));
        }
      }
    }
  }
}

TEST_CASE("sequences of one new token among prompts are right on the GPU", "[gpu][mixed]") {
  FFTUNE_FIRST_CUDA(backend);
  const Family& family = family_of(attention_op(), "attention_sm90");
  constexpr int decoding = 50;
  std::vector<int> queries(decoding, 1), keys;
  for (const int prompt : {200, 1, 70, 0, 33, 400}) queries.push_back(prompt);
  std::mt19937_64 random(10);
  for (const int own : queries) keys.push_back(own + static_cast<int>(random() % 500));
  ReferenceTensors given{{"offsets", {0}}};
  for (std::size_t i = 0; i < queries.size(); ++i) {
    given["offsets"].push_back(given["offsets"].back() + queries[i]);
    given["lengths"].push_back(keys[i]);
  }
  const auto b = static_cast<std::int64_t>(queries.size());
  const Problem problem =
      attention_problem(DeviceKind::cuda, "fwd", DType::bf16,
                        {{"s", static_cast<std::int64_t>(given["offsets"].back())},
                         {"b", b},
                         {"kv", 1000},
                         {"page", 16},
                         {"heads", 8},
                         {"kv-heads", 2},
                         {"dim", 128}},
                        {{"mask", "causal"}, {"layout", "thd"}, {"lengths", "yes"}});
  draw_inputs(problem, random, given);
  round_inputs(problem, given);
  const auto expected = run_reference(problem, given);
  if (family.refusal(problem, backend->facts())) FFTUNE_SKIP("this device has no wgmma");
  for (const char* scheduler : {"static", "dynamic", "single"})
    for (const int pack : {0, 1}) {
      auto configs = family.space(problem, backend->facts()).feasible();
      std::shuffle(configs.begin(), configs.end(), random);
      const auto chosen = std::find_if(configs.begin(), configs.end(), [&](const Config& config) {
        return config.word("scheduler") == scheduler && config.at("pack_heads") == pack;
      });
      REQUIRE(chosen != configs.end());
      CAPTURE(chosen->text());
      check_outputs(problem, run_family(*backend, family, *chosen, problem, given), expected);
    }
}

TEST_CASE("every CUDA family is right at ragged lengths under every mask", "[gpu][lengths]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(8);
  const std::pair<std::int64_t, std::int64_t> lengths[] = {
      {1, 1}, {2, 65}, {17, 17}, {63, 1000}, {64, 64}, {65, 63}, {1000, 1000}};
  const std::vector<Options> masks{{{"mask", "none"}},
                                   {{"mask", "causal"}},
                                   {{"mask", "bool"}, {"mask-data", "random"}},
                                   {{"mask", "packed"}, {"mask-data", "documents"}},
                                   {{"mask", "packed"}, {"mask-data", "upper"}}};
  // Each pair of head dim and lengths, and of head dim and mask.
  const std::int64_t dims[] = {64, 128, 256};
  std::vector<Problem> problems;
  for (const char* pass : {"fwd", "bwd"})
    for (std::size_t i = 0; i < std::size(lengths); ++i)
      for (std::size_t j = 0; j < masks.size(); ++j)
        problems.push_back(attention_problem(DeviceKind::cuda, pass, DType::bf16,
                                             {{"s", lengths[i].first},
                                              {"kv", lengths[i].second},
                                              {"b", 2},
                                              {"heads", 4},
                                              {"kv-heads", 2},
                                              {"dim", dims[(i + j) % std::size(dims)]}},
                                             masks[j]));
  verify_families(*backend, attention_op(), problems, random, 0);
}

TEST_CASE("on the CPU no lengths or offsets reach beyond the keys that there are") {
  const auto backend = open_cpu();
  std::mt19937_64 random(8);
  const auto same = [&](const Options& options, const char* tensor, std::vector<double> within,
                        std::vector<double> beyond) {
    const Problem problem =
        attention_problem(DeviceKind::cpu, "fwd", DType::f32,
                          {{"s", 7}, {"b", 2}, {"heads", 2}, {"dim", 8}}, options);
    ReferenceTensors inputs;
    draw_inputs(problem, random, inputs);
    for_each_family(backend->facts(), problem, [&](const Family& family, const Config& config) {
      CAPTURE(problem.text(), family.name(), config.text());
      inputs[tensor] = within;
      const auto expected = run_family(*backend, family, config, problem, inputs);
      inputs[tensor] = beyond;
      CHECK(run_family(*backend, family, config, problem, inputs).at("out") == expected.at("out"));
    });
  };
  same({{"lengths", "yes"}}, "lengths", {7, 0}, {1 << 20, -3});
  same({{"layout", "thd"}}, "offsets", {0, 3, 7}, {-5, 3, 100000000});
}
