// No value of an index leads outside the tensors: every family of every op whose inputs are indices
// (pages, slots, positions, lengths, offsets, ids, counts, masks and their flags), with values that
// no caller should give, between guards. A run afterwards with proper values gives what it gives in
// a fresh workspace.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "families/small_problems.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "support/each_op.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

bool is_index(const TensorSpec& spec) {
  return (spec.role == Role::input || spec.role == Role::updated) &&
         (spec.dtype == DType::i32 || spec.dtype == DType::i64 || spec.dtype == DType::u8);
}

struct Form {
  const char* op;
  const char* pass;
  Sizes sizes;
  Options options;
};

void add_attention(std::vector<Form>& forms) {
  for (const std::int64_t s : {2, 70})
    for (const std::int64_t dim : {64, 20}) {
      const Sizes sizes{{"s", s},     {"kv", 150},     {"b", 3},
                        {"heads", 4}, {"kv-heads", 2}, {"dim", dim}};
      const auto add = [&](const char* pass, Sizes more, Options options) {
        more.insert(sizes.begin(), sizes.end());
        options.emplace("mask", "causal");
        forms.push_back({"attention", pass, std::move(more), std::move(options)});
      };
      add("fwd", {{"page", 16}}, {{"lengths", "yes"}});
      add("fwd", {{"page", 64}, {"pages", 20}, {"window", 40}}, {{"sinks", "yes"}});
      add("fwd", {{"page", 16}}, {{"layout", "thd"}, {"lengths", "yes"}});
      add("fwd", {}, {{"mask", "packed"}, {"lse", "yes"}});
      for (const char* pass : {"fwd", "bwd"}) {
        add(pass, {}, {{"lengths", "yes"}});
        add(pass, {}, {{"layout", "thd"}});
        add(pass, {}, {{"mask", "packed"}, {"mask-heads", "each"}});
        add(pass, {}, {{"mask", "bool"}});
      }
      add("bwd", {}, {{"layout", "thd"}, {"deterministic", "yes"}, {"sinks", "yes"}});
    }
  // Offsets of queries are those of keys.
  for (const char* pass : {"fwd", "bwd"})
    forms.push_back({"attention",
                     pass,
                     {{"s", 333}, {"b", 5}, {"heads", 2}, {"dim", 128}},
                     {{"layout", "thd"}, {"mask", "causal"}}});
}

std::vector<Form> forms(DeviceKind kind) {
  std::vector<Form> forms;
  add_attention(forms);
  forms.push_back({"pack-mask", "fwd", {{"s", 70}, {"kv", 150}, {"b", 2}}, {}});
  const Sizes delta{{"s", 130}, {"b", 3}, {"heads", 1}, {"v-heads", 2}, {"dim", 64}, {"v-dim", 64}};
  for (const char* pass : {"fwd", "bwd"})
    forms.push_back({"gated-delta-rule", pass, delta, {{"layout", "thd"}}});
  forms.push_back({"gated-delta-rule", "fwd", delta, {{"indices", "yes"}}});
  const Sizes ssd{{"s", 130},  {"b", 3},          {"heads", 2},
                  {"dim", 64}, {"state-dim", 32}, {"groups", 2}};
  for (const char* pass : {"fwd", "bwd"}) forms.push_back({"ssd", pass, ssd, {{"layout", "thd"}}});
  forms.push_back({"ssd", "fwd", ssd, {{"indices", "yes"}}});
  const Sizes latent{{"b", 3}, {"s", 2}, {"kv", 150}, {"heads", 4}, {"rank", 64}, {"rope", 16}};
  for (const std::int64_t page : {0, 16, 7}) {
    Sizes sizes = latent;
    if (page > 0) sizes.insert({{"page", page}, {"pages", 40}});
    forms.push_back({"mla", "fwd", sizes, {{"lengths", "yes"}, {"lse", "yes"}}});
    sizes.insert({"top", 20});
    forms.push_back({"mla", "fwd", sizes, {{"lengths", "yes"}}});
  }
  forms.push_back({"indexer",
                   "fwd",
                   {{"b", 3}, {"s", 2}, {"kv", 150}, {"heads", 4}, {"dim", 16}, {"top", 20}},
                   {{"lengths", "yes"}}});
  forms.push_back({"indexer",
                   "fwd",
                   {{"b", 3},
                    {"s", 2},
                    {"kv", 150},
                    {"heads", 4},
                    {"dim", 16},
                    {"top", 20},
                    {"page", 16},
                    {"pages", 40}},
                   {{"lengths", "yes"}, {"k-format", "e4m3"}}});
  Sizes before = {{"m", 70}, {"heads", 4}, {"nope", 12}, {"rope", 8}, {"rank", 24}};
  before.insert({{"positions", 50}, {"cache-slots", 90}});
  forms.push_back({"mla-rope", "fwd", before, {}});
  const Sizes sequences{{"s", 130}, {"b", 3}, {"channels", 24}, {"width", 4}};
  for (const char* pass : {"fwd", "bwd"})
    forms.push_back({"causal-conv1d", pass, sequences, {{"layout", "sc"}}});
  Sizes cached = sequences;
  cached.insert({{"slots", 5}, {"entries", 5}});
  for (const char* order : {"entries", "channels"})
    forms.push_back({"causal-conv1d",
                     "fwd",
                     cached,
                     {{"layout", "sc"},
                      {"state", "update"},
                      {"state-order", order},
                      {"has-state", "yes"},
                      {"accepted", "yes"}}});
  const Sizes heads{{"heads", 4}, {"kv-heads", 2}};
  for (const char* slots : {"i32", "i64"})
    for (const std::int64_t m : {3, 70})
      for (const std::int64_t dim : {64, 20})
        forms.push_back({"qkv",
                         "fwd",
                         {{"m", m},
                          {"d", 136},
                          {"heads", 4},
                          {"kv-heads", 2},
                          {"dim", dim},
                          {"positions", 50},
                          {"cache-slots", 90}},
                         {{"cache", "yes"}, {"slots", slots}, {"rotation", "halves"}}});
  // On a GPU as wide as the kernel of all layers needs.
  const std::int64_t width = kind == DeviceKind::cuda ? 1024 : 128;
  for (const std::int64_t s : {1, 5})
    for (const char* angles : {"table", "base"})
      forms.push_back({"layer",
                       "fwd",
                       {{"s", s},
                        {"batch", 2},
                        {"cache", 40},
                        {"d", width},
                        {"h", width},
                        {"heads", 8},
                        {"kv-heads", 2},
                        {"dim", 64}},
                       {{"angles", angles}}});
  forms.push_back({"layer",
                   "fwd",
                   {{"batch", 2},
                    {"cache", 40},
                    {"d", width},
                    {"h", width},
                    {"heads", 8},
                    {"kv-heads", 2},
                    {"dim", 64},
                    {"page", 16}},
                   {}});
  for (const char* choose : {"argmax", "sample", "filtered"})
    for (const std::int64_t page : {0, 16}) {
      Sizes sizes{{"batch", 3}, {"cache", 40}, {"d", 64},     {"h", 96},   {"heads", 4},
                  {"dim", 16},  {"room", 7},   {"vocab", 50}, {"stops", 2}};
      if (page > 0) sizes["page"] = page;
      forms.push_back({"decode", "fwd", std::move(sizes), {{"choose", choose}}});
    }
  for (const char* pass : {"fwd", "bwd"})
    for (const char* layout : {"thd", "bshd"})
      forms.push_back({"rope",
                       pass,
                       {{"s", 70}, {"b", 3}, {"heads", 2}, {"dim", 20}, {"positions", 30}},
                       {{"layout", layout}, {"starts", "yes"}}});
  for (const char* pass : {"fwd", "bwd"})
    for (const std::int64_t m : {3, 70}) {
      forms.push_back(
          {"moe-ffn", pass, {{"m", m}, {"d", 64}, {"h", 32}, {"experts", 6}, {"top-k", 2}}, {}});
      forms.push_back({"moe-ffn",
                       pass,
                       {{"m", m}, {"d", 64}, {"h", 32}, {"experts", 6}, {"top-k", 2}},
                       {{"bias", "all"}}});
      forms.push_back({"masked-ffn", pass, {{"m", m}, {"d", 64}, {"h", 32}}, {}});
      forms.push_back({"masked-linear", pass, {{"m", m}, {"k", 64}, {"n", 32}}, {}});
    }
  forms.push_back({"moe-route", "bwd", {{"m", 70}, {"experts", 37}, {"top-k", 4}}, {}});
  for (const char* ids : {"i32", "i64"})
    forms.push_back({"ngram-block",
                     "fwd",
                     {{"b", 4}, {"len", 40}, {"vocab", 50}, {"prefix", 9}},
                     {{"ids", ids}, {"lengths", "own"}, {"ngrams", "own"}}});
  for (const char* choose : {"sample", "filtered"}) {
    forms.push_back({"sample", "fwd", {{"m", 5}, {"vocab", 300}}, {{"choose", choose}}});
    forms.push_back({"head", "fwd", {{"m", 5}, {"d", 64}, {"vocab", 300}}, {{"choose", choose}}});
  }
  for (const char* pass : {"fwd", "bwd"}) {
    forms.push_back(
        {"cross-entropy", pass, {{"m", 5}, {"vocab", 300}}, {{"class-weights", "yes"}}});
    forms.push_back({"linear-cross-entropy",
                     pass,
                     {{"m", 20}, {"d", 64}, {"vocab", 304}},
                     {{"class-weights", "yes"}, {"workspace", "0"}}});
  }
  forms.push_back({"all-argmax", "fwd", {{"m", 5}, {"vocab", 300}, {"ranks", 2}}, {}});
  forms.push_back({"masked-softmax",
                   "fwd",
                   {{"s", 20}, {"b", 2}, {"heads", 2}, {"n", 40}},
                   {{"mask", "bool"}}});
  return forms;
}

/// Values that no caller should give among those that one may, or none of these.
void write_hostile(OpRun& run, const TensorSpec& spec, std::mt19937_64& random) {
  auto bytes = run.bytes(spec.name);
  const bool keeps_some = random() % 3 != 0;
  for (std::int64_t i = 0; i < spec.elements(); ++i) {
    if (keeps_some && random() % 2 == 0) continue;
    const std::int64_t near = spec.shape.front() * (spec.shape.size() > 1 ? spec.shape[1] : 1);
    const std::int64_t values[] = {-1,
                                   -2,
                                   -(1 << 20),
                                   std::numeric_limits<std::int32_t>::min(),
                                   std::numeric_limits<std::int32_t>::max(),
                                   1 << 30,
                                   near,
                                   near + 1,
                                   1 << 20,
                                   static_cast<std::int64_t>(random()),
                                   static_cast<std::int64_t>(random() % 300)};
    const std::int64_t value = values[random() % std::size(values)];
    const std::size_t size = dtype_bytes(spec.dtype);
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * size, &value, size);
  }
  run.write(spec.name, bytes);
}

/// A recipe with the variant, whose other stages are fallbacks'.
std::optional<Recipe> recipe_with(const Op& op, const Problem& problem, const DeviceFacts& facts,
                                  const DrawnVariant& variant) {
  Recipe recipe;
  std::size_t stage = 0;
  const std::size_t end = variant.first_stage + variant.stage_count;
  bool added = false;
  for (const Variant& other : fallback_recipe(op, problem, facts)) {
    const std::size_t count = family_of(op, other.family).stages().size();
    const bool overlaps = stage < end && stage + count > variant.first_stage;
    if (overlaps && (stage < variant.first_stage || stage + count > end)) return std::nullopt;
    if (overlaps && !added) recipe.push_back({std::string(variant.family->name()), variant.config});
    added = added || overlaps;
    if (!overlaps) recipe.push_back(other);
    stage += count;
  }
  return recipe;
}

/// Whether values are the same, but for the order of sums.
bool alike(const std::vector<float>& first, const std::vector<float>& second) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (first[i] == second[i] || (std::isnan(first[i]) && std::isnan(second[i]))) continue;
    difference += std::pow(double{first[i]} - double{second[i]}, 2);
    norm += std::pow(double{second[i]}, 2);
  }
  return difference <= 1e-4 * norm;
}

int check_form(Backend& backend, const Form& form, DType dtype, std::mt19937_64& random) {
  const Op& op = builtin_catalog().op(form.op);
  const DeviceFacts& facts = backend.facts();
  const Problem problem =
      canonical(op, {form.op, form.pass, dtype, form.sizes, form.options}, facts.kind);
  int families = 0;
  for (const DrawnVariant& variant : draw_variants(facts, op, problem, random, 0)) {
    const auto recipe = recipe_with(op, problem, facts, variant);
    if (!recipe) continue;
    ++families;
    CAPTURE(problem.text(), recipe_text(*recipe));
    OpRun run(backend, op, problem);
    const auto executables = run.compile(op, problem, *recipe);
    run.run(executables);
    std::map<std::string, std::vector<float>> expected;
    for (const TensorSpec& spec : run.specs())
      if (spec.role != Role::input) expected[spec.name] = run.values(spec.name);
    for (int round = 0; round < 4; ++round) {
      run.draw(1);
      for (const TensorSpec& spec : run.specs())
        if (is_index(spec)) write_hostile(run, spec, random);
      run.run(executables);
      CHECK(run.damage().empty());
    }
    run.draw(1);
    run.run(executables);
    for (const auto& [name, values] : expected) {
      CAPTURE(name);
      CHECK(alike(run.values(name), values));
    }
  }
  return families;
}

void check_forms(Backend& backend, const Op& op, DType dtype) {
  std::mt19937_64 random(11);
  for (const Form& form : forms(backend.facts().kind)) {
    if (form.op != op.name()) continue;
    INFO(form.op << " " << form.pass);
    const auto dtypes = op.dtypes_of_pass(backend.facts().kind, form.pass);
    if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) continue;
    CHECK(check_form(backend, form, dtype, random) > 0);
  }
}

void stay_inside_on_cpu(const Op& op) {
  const auto backend = open_cpu();
  for (const DType dtype : {DType::f32, DType::bf16}) check_forms(*backend, op, dtype);
}

void stay_inside_on_gpu(const Op& op) {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::f32}) check_forms(*backend, op, dtype);
}

}  // namespace

TEST_CASE("every index that an op takes is among the forms with hostile ones") {
  std::map<std::string, std::set<std::string>> tried;
  for (const Form& form : forms(DeviceKind::cpu)) {
    const Op& op = builtin_catalog().op(form.op);
    const Problem problem =
        canonical(op, {form.op, form.pass, DType::f32, form.sizes, form.options}, DeviceKind::cpu);
    for (const TensorSpec& spec : op.tensors(problem))
      if (is_index(spec)) tried[form.op].insert(form.pass + (" " + spec.name));
  }
  for (const Op* op : builtin_catalog().ops)
    for (const auto& pass : op->passes()) {
      std::vector<Options> all{{}};
      for (const OptionField& field : options_of(*op, pass))
        for (const std::string& choice : field.choices) all.push_back({{field.name, choice}});
      for (const Options& options : all) {
        Problem problem = example_problem(*op, pass, DType::f32, options);
        CAPTURE(problem.text());
        std::vector<TensorSpec> tensors;
        try {
          problem = canonical(*op, problem, DeviceKind::cpu);
          tensors = op->tensors(problem);
        } catch (const Error&) {
          continue;  // options that do not go together
        }
        for (const TensorSpec& spec : tensors) {
          CAPTURE(spec.name);
          // Codes, zero points and scales of packed weights are numbers.
          const bool packed = packed_format(problem).packed ||
                              option_or(problem, "head-weights", "dense") != "dense";
          if (packed && spec.dtype == DType::u8) continue;
          // Addresses of the ranks' memory are pointers, as those of the tensors are.
          if (spec.name == "group") continue;
          if (is_index(spec))
            CHECK(tried[std::string(op->name())].contains(pass + " " + spec.name));
        }
      }
    }
}

FFTUNE_TEST_EACH_OP(stay_inside_on_cpu, "no index leads outside the tensors on the CPU", "");
FFTUNE_TEST_EACH_OP(stay_inside_on_gpu, "no index leads outside the tensors on a GPU",
                    "[gpu][small]");
