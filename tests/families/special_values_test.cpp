// NaN and infinities in each input of every family: a result is NaN or infinite exactly where the
// float64 reference is, and no place that is independent of them changes. The reference's own
// special values are held to PyTorch's by python/tests/test_special_values.py.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "runtime/devices.hpp"
#include "runtime/environment.hpp"
#include "support/catch.hpp"
#include "support/each_op.hpp"
#include "support/verify_variants.hpp"
#include "verify/input_data.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr std::uint64_t seed = 1;
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// Random values, but for a few places of one tensor: its last element, and others spread over it.
/// A NaN or an infinity is put there as it is, other numbers are times the tensor's usual size.
class FewPlaces final : public GivenTensors {
 public:
  FewPlaces(std::string name, std::vector<double> numbers)
      : name_(std::move(name)), numbers_(std::move(numbers)) {}

  bool fill(const TensorSpec& spec, std::span<std::byte> out, Parallel& parallel) const override {
    if (spec.name != name_) return false;
    const std::int64_t rows = spec.shape.at(0), elements = spec.elements();
    random_rows(seed, spec.name, spec.dtype, spec.scale, spec.mean, rows, elements / rows,
                out.data(), parallel);
    const auto places = std::ssize(numbers_);
    for (std::int64_t i = 0; i < places; ++i) {
      const std::int64_t at =
          std::max<std::int64_t>(0, elements - 1 - i * elements / places - i * 5);
      const double number = numbers_[static_cast<std::size_t>(i)];
      const double value = std::isfinite(number) ? spec.mean + number * spec.scale : number;
      encode(spec.dtype, std::span<const double>(&value, 1),
             out.data() + static_cast<std::size_t>(at) * dtype_bytes(spec.dtype));
    }
    return true;
  }

 private:
  std::string name_;
  std::vector<double> numbers_;
};

struct Compiled {
  std::string variant;
  std::size_t first_stage, stage_count;
  std::shared_ptr<const Executable> executable;
};

/// A problem with variants that serve it.
struct Case {
  Problem problem;
  std::vector<Compiled> variants;
};

/// The default and, where it is another, the last feasible configuration.
void compile_few(Backend& backend, const Op& op, const Family& family, Case& of) {
  const DeviceFacts& facts = backend.facts();
  std::vector<Config> configs{family.default_config(of.problem, facts)};
  const auto feasible = family.space(of.problem, facts).feasible();
  if (!feasible.empty() && feasible.back() != configs.front()) configs.push_back(feasible.back());
  for (const auto& config : configs) {
    const auto result = backend.compile(family.program(of.problem, facts, config));
    CAPTURE(of.problem.text(), family.name(), config.text(), result.report.failure);
    REQUIRE(result.executable);
    of.variants.push_back({Variant{std::string(family.name()), config}.id(),
                           first_stage(op, family, of.problem), family.stages().size(),
                           result.executable});
  }
}

/// No option, and each choice of each option. A CPU takes minutes for every choice in every dtype:
/// there each choice has one dtype, `place` of `count`, in turn.
std::vector<Options> forms_of_dtype(const Op& op, const std::string& pass, DeviceKind kind,
                                    std::size_t place, std::size_t count) {
  std::vector<Options> forms{{}};
  std::size_t choices = 0;
  for (const auto& field : options_of(op, pass))
    for (std::size_t i = 1; i < field.choices.size(); ++i)
      if (choices++ % count == place || kind != DeviceKind::cpu)
        forms.push_back({{field.name, field.choices[i]}});
  return forms;
}

/// Small problems of the pass that have these forms, and its families' variants.
std::vector<Case> cases_of(Backend& backend, const Op& op, const std::string& pass, DType dtype,
                           const std::vector<Options>& forms) {
  const DeviceFacts& facts = backend.facts();
  std::vector<Case> cases;
  for (const Options& form : forms)
    for (const Family* family : op.families()) {
      if (family->device_kind() != facts.kind) continue;
      const auto problem = small_problem(op, *family, pass, dtype, form, facts);
      if (!problem) continue;
      // Every form of an op's parts is tried by itself.
      if (!form.empty() && !op.parts(*problem).empty()) continue;
      auto known = std::find_if(cases.begin(), cases.end(),
                                [&](const Case& other) { return other.problem == *problem; });
      if (known == cases.end()) known = cases.insert(known, {*problem, {}});
      compile_few(backend, op, *family, *known);
    }
  return cases;
}

/// NaN, or both infinities, in one input.
void verify_special_values(Backend& backend, const Op& op, const Case& of, const TensorSpec& input,
                           const std::vector<double>& numbers) {
  const FewPlaces special(input.name, numbers);
  std::deque<FewPlaces> others;  // adding to it moves none
  InputData data(seed, &special);
  for (const unsigned replaced : {1u, 2u, 3u}) {  // the first place, the second, both
    auto& group = data.substitutes.emplace_back();
    for (const auto& [up, down] : {std::pair(0.9, -0.4), {-0.7, 1.1}, {2.3, -1.9}})
      group.push_back(&others.emplace_back(
          input.name, std::vector{(replaced & 1) != 0 ? up : numbers.at(0),
                                  (replaced & 2) != 0 ? down : numbers.at(1)}));
  }
  Verifier verifier(backend, op, of.problem, data);
  for (const auto& each : of.variants) {
    CAPTURE(of.problem.text(), each.variant, input.name, numbers.front());
    const auto result = verifier.verify(each.first_stage, each.stage_count, {each.executable});
    CAPTURE(result.failure, result.error, result.tolerance);
    CHECK(result.passed);
  }
}

void verify_special_values(Backend& backend, const Op& op) {
  const DeviceKind kind = backend.facts().kind;
  for (const auto& pass : op.passes()) {
    const auto dtypes = op.dtypes_of_pass(kind, pass);
    for (std::size_t i = 0; i < dtypes.size(); ++i) {
      const DType dtype = dtypes[i];
      const auto forms = forms_of_dtype(op, pass, kind, i, dtypes.size());
      for (const Case& each : cases_of(backend, op, pass, dtype, forms))
        for (const TensorSpec& input : op.tensors(each.problem)) {
          const bool given = input.role == Role::input || input.role == Role::updated;
          if (!given || input.draw || !input.pattern.empty() || is_integer(input.dtype)) continue;
          verify_special_values(backend, op, each, input, {nan, nan});
          // fp8 has no infinities. Kernels multiply sums by factors such as fp8's scales and a
          // reciprocal deviation: infinity times a sum is infinite where one times each of its
          // terms is NaN.
          const bool is_factor =
              input.mean != 0 || (dtype == DType::fp8 && input.dtype == DType::f32);
          if (is_factor || input.dtype == DType::fp8) continue;
          verify_special_values(backend, op, each, input, {infinity, -infinity});
        }
    }
  }
}

void verify_special_values_on_cpu(const Op& op) {
  if (is_nested(op)) return;  // its parts, which are made of ops, are tried by themselves
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  verify_special_values(*backend, op);
}

void verify_special_values_on_gpu(const Op& op) {
  if (is_nested(op)) return;
  on_first_cuda([&](Backend& backend) { verify_special_values(backend, op); });
}

}  // namespace

FFTUNE_TEST_EACH_OP(verify_special_values_on_cpu,
                    "NaN and infinities are the reference's on the CPU", "[special]");
FFTUNE_TEST_EACH_OP(verify_special_values_on_gpu, "NaN and infinities are the reference's on a GPU",
                    "[gpu][special]");
