// A view with strides ends with the last element that is read (TensorSpec::behind). With a longer
// extent, a buffer behind the view would count as a part of it. With a shorter one, an overlap
// would not be found.
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/open.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

struct Form {
  const char* op;
  std::map<std::string, std::int64_t> sizes;
  std::map<std::string, std::string> options = {};
};

std::vector<Form> forms() {
  std::vector<Form> forms{
      {"head-linear", {{"m", 3}, {"heads", 2}, {"n", 4}, {"k", 6}, {"x-head", 9}}},
      {"indexer",
       {{"b", 2}, {"s", 1}, {"heads", 2}, {"dim", 16}, {"kv", 9}, {"top", 4}, {"k-block", 150}}},
      {"indexer",
       {{"b", 2}, {"s", 1}, {"heads", 2}, {"dim", 16}, {"kv", 9}, {"top", 4}, {"scale-block", 12}},
       {{"k-format", "e4m3"}}},
      {"mla",
       {{"b", 2}, {"s", 2}, {"heads", 2}, {"rank", 16}, {"rope", 8}, {"kv", 5}, {"kv-row", 32}}},
      {"mla",
       {{"b", 2},
        {"s", 2},
        {"heads", 2},
        {"rank", 16},
        {"rope", 8},
        {"kv", 5},
        {"kv-row", 32},
        {"kv-block", 200}}},
      {"gated-rmsnorm", {{"m", 3}, {"d", 8}, {"groups", 2}, {"z-row", 40}}},
      {"gated-rmsnorm",
       {{"m", 3}, {"d", 8}, {"groups", 2}, {"z-row", 5}},
       {{"norm", "none"}, {"gate-for", "norm"}, {"gate", "sigmoid"}}},
      {"causal-conv1d", {{"s", 5}, {"b", 2}, {"channels", 8}, {"width", 4}, {"x-row", 20}}},
      {"causal-conv1d",
       {{"s", 5},
        {"b", 2},
        {"channels", 16},
        {"width", 4},
        {"x-groups", 2},
        {"x-keys", 2},
        {"x-row", 40}}},
      {"causal-conv1d",
       {{"s", 5}, {"b", 2}, {"channels", 8}, {"width", 4}, {"state-row", 50}},
       {{"state", "update"}}},
  };
  for (const char* layout : {"nk", "kn"})
    forms.push_back({"head-linear",
                     {{"m", 3}, {"heads", 2}, {"n", 4}, {"k", 6}, {"w-rows", 15}, {"w-skip", 2}},
                     {{"layout", layout}}});
  for (const char* stride : {"q-row", "k-row", "v-row", "kv-head"}) {
    forms.push_back({"attention", {{"s", 3}, {"b", 2}, {"heads", 2}, {"dim", 8}}, {}});
    forms.back().sizes[stride] = 64;
  }
  for (const char* stride : {"q-row", "q-outer", "q-head", "k-row", "k-outer", "k-head"}) {
    forms.push_back({"rope", {{"s", 3}, {"b", 2}, {"heads", 2}, {"kv-heads", 2}, {"dim", 8}}, {}});
    forms.back().sizes[stride] = 200;
  }
  for (const char* stride : {"q-row", "k-row", "v-row", "gate-row", "gate-block"}) {
    forms.push_back({"gated-delta-rule",
                     {{"s", 3}, {"b", 2}, {"heads", 2}, {"v-heads", 4}, {"dim", 8}, {"v-dim", 8}}});
    forms.back().sizes[stride] = 48;
  }
  forms.push_back({"gated-delta-rule",
                   {{"s", 3},
                    {"b", 2},
                    {"heads", 2},
                    {"dim", 8},
                    {"v-dim", 8},
                    {"states", 2},
                    {"state-block", 160}},
                   {{"indices", "yes"}, {"null-index", "-1"}}});
  for (const char* stride : {"x-row", "b-row", "c-row", "dt-row"}) {
    forms.push_back(
        {"ssd", {{"s", 3}, {"b", 2}, {"heads", 4}, {"dim", 32}, {"state-dim", 16}}, {}});
    forms.back().sizes[stride] = 200;
  }
  forms.push_back({"ssd",
                   {{"s", 3},
                    {"b", 2},
                    {"heads", 2},
                    {"dim", 32},
                    {"state-dim", 16},
                    {"states", 2},
                    {"state-block", 1200}},
                   {{"indices", "yes"}, {"null-index", "-1"}}});
  forms.push_back({"qkv",
                   {{"m", 3}, {"d", 16}, {"heads", 2}, {"dim", 8}, {"cache-head", 16}},
                   {{"cache", "yes"}}});
  for (const char* stride : {"state-block", "conv-block"}) {
    const std::map<std::string, std::int64_t> sizes{{"batch", 2}, {"d", 16},    {"h", 32},
                                                    {"heads", 2}, {"dim", 8},   {"v-dim", 8},
                                                    {"width", 4}, {stride, 400}};
    forms.push_back({"layer", sizes, {{"mixer", "gated-delta-rule"}, {"conv-indices", "yes"}}});
    forms.back().sizes["states"] = 2;
    forms.push_back({"decode", sizes, {{"mixer", "gated-delta-rule"}}});
    forms.back().sizes["cache"] = 20;
    forms.back().sizes["vocab"] = 40;
  }
  for (const char* op : {"layer", "decode"}) {
    forms.push_back({op,
                     {{"batch", 2},
                      {"d", 16},
                      {"h", 32},
                      {"heads", 2},
                      {"dim", 8},
                      {"cache", 20},
                      {"kv-head", 16}}});
    if (forms.back().op == std::string("decode")) forms.back().sizes["vocab"] = 40;
  }
  return forms;
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// Whether the size is a number of elements from a part of a tensor to the next.
bool is_stride(const SizeField& field) {
  for (const char* words : {"stride ", "to the next", "as q-row", "as q-outer", "as q-head",
                            "as x-row", "as b-row", "as state-block", "rows of a head in w;"})
    if (contains(field.help, words)) return true;
  return false;
}

class Views {
 public:
  Views(Backend& backend, const Form& form)
      : op_(builtin_catalog().op(form.op)),
        problem_(canonical(op_, {form.op, "fwd", DType::f32, form.sizes, form.options},
                           DeviceKind::cpu)),
        run_(backend, op_, problem_),
        executables_(run_.compile(op_, problem_, fallback_recipe(op_, problem_, backend.facts()))),
        is_whole_(contains(form.op, "layer") || contains(form.op, "decode")) {}

  void check() {
    CAPTURE(problem_.text());
    for (const TensorSpec& spec : run_.specs()) {
      const bool given = spec.role == Role::input || spec.role == Role::updated;
      if (!given || dtype_bytes(spec.dtype) != 4 || spec.name == "offsets") continue;
      const auto end = static_cast<std::size_t>(spec.elements() - spec.behind);
      CAPTURE(spec.name, spec.elements(), end);
      if (spec.behind > 0) CHECK(outputs_with(spec, end, 1e4F) == outputs_with(spec, end, 0));
      // The last row of a cache may be no sequence's.
      if (is_whole_ || contains(spec.name, "cache")) continue;
      const auto plain = outputs_with(spec, end - 1, 0);
      CHECK((outputs_with(spec, end - 1, 1e4F) != plain ||
             outputs_with(spec, end - 1, -1e4F) != plain));
    }
  }

 private:
  /// Runs with `value` in the element and all behind it. Returns the outputs. Sequence i has state
  /// i.
  std::vector<std::vector<float>> outputs_with(const TensorSpec& view, std::size_t element,
                                               float value) {
    run_.draw(1);
    for (const TensorSpec& spec : run_.specs())
      if (spec.name == "state_indices") {
        const std::vector<std::int32_t> indices{0, 1};
        const auto* first = reinterpret_cast<const std::byte*>(indices.data());
        run_.write(spec.name, {first, first + sizeof(std::int32_t) * indices.size()});
      }
    auto values = run_.values(view.name);
    for (std::size_t i = element; i < values.size(); ++i) values[i] = value;
    run_.set(view.name, values);
    run_.run(executables_);
    std::vector<std::vector<float>> all;
    for (const TensorSpec& spec : run_.specs())
      if (spec.role != Role::input && spec.name != view.name) all.push_back(run_.values(spec.name));
    return all;
  }

  const Op& op_;
  Problem problem_;
  OpRun run_;
  OpRun::Executables executables_;
  bool is_whole_;  // some inputs of a whole layer are not read by each problem
};

}  // namespace

TEST_CASE("a view ends with the last element that is read") {
  const auto backend = open_cpu();
  std::map<std::string, std::set<std::string>> tried;
  for (const Form& form : forms()) {
    for (const auto& [name, value] : form.sizes) tried[form.op].insert(name);
    CAPTURE(form.op);
    Views(*backend, form).check();
  }
  for (const auto& op : builtin_catalog().ops)
    for (const SizeField& field : op->sizes())
      if (is_stride(field)) {
        CAPTURE(op->name(), field.name);
        CHECK(tried[std::string(op->name())].count(field.name) == 1);
      }
}
