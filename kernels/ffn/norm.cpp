#include "kernels/ffn/norm.hpp"

#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <variant>

#include "core/error.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::ffn {
namespace {

constexpr const char* usual_eps = "1e-06";

/// The tensors by rmsnorm's names, and by those of ffn.
constexpr std::array<std::pair<const char*, const char*>, 5> tensor_names{
    {{"x", "x"}, {"residual", "x_residual"}, {"w", "w_norm"}, {"y", "normalised"}, {"sum", "sum"}}};

/// The norm as a problem of rmsnorm.
Problem norm_of(const Problem& problem) {
  const auto option = [&](const char* name, const char* usual) {
    return problem.options.contains(name) ? problem.option(name) : usual;
  };
  Problem norm{"rmsnorm",
               "fwd",
               problem.dtype,
               {{"m", problem.size("m")}, {"d", problem.size("d")}},
               {{"convention", option("convention", "llama")},
                {"residual", form_of(problem).adds_before ? "yes" : "no"},
                {"save", "nothing"},
                {"weights", "same"},
                {"eps", option("eps", usual_eps)}}};
  if (is_batch_invariant(problem)) norm.options["batch-invariant"] = "yes";
  return norm;
}

const Family& family_of_rmsnorm(std::string_view name) {
  for (const Family* family : rmsnorm_op().families())
    if (family->name() == name) return *family;
  throw Error(ErrorKind::internal, "rmsnorm has no family " + std::string(name));
}

std::string name_here(std::string_view name) {
  for (const auto& [there, here] : tensor_names)
    if (name == there) return here;
  return std::string(name);
}

/// Where rmsnorm's tensors, in their order, are among ffn's.
std::vector<std::size_t> places_here(const Problem& problem) {
  const auto here = ffn_op().tensors(problem);
  std::vector<std::size_t> places;
  for (const auto& tensor : rmsnorm_op().tensors(norm_of(problem)))
    places.push_back(tensor_index(here, name_here(tensor.name)));
  return places;
}

HostFunction moved(const HostFunction& function, const std::vector<std::size_t>& places) {
  return [=](const HostCall& call) {
    std::array<void*, tensor_names.size()> tensors{};
    for (std::size_t i = 0; i < places.size(); ++i) tensors[i] = call.tensors[places[i]];
    function({tensors.data(), call.scratch, call.parallel});
  };
}

/// Appends `from`, whose tensors are rmsnorm's, to a program whose tensors are ffn's.
void append_moved(Program& program, Program from, const std::vector<std::size_t>& places,
                  std::size_t host_tensors) {
  const std::size_t first_kernel = program.kernels.size(), first_scratch = program.scratch.size();
  program.kernels.insert(program.kernels.end(), from.kernels.begin(), from.kernels.end());
  program.scratch.insert(program.scratch.end(), from.scratch.begin(), from.scratch.end());
  for (auto& step : from.steps) {
    if (auto* launch = std::get_if<KernelLaunch>(&step)) {
      launch->kernel += first_kernel;
      for (auto& argument : launch->arguments) {
        if (auto* tensor = std::get_if<TensorArgument>(&argument))
          tensor->tensor = places.at(tensor->tensor);
        if (auto* scratch = std::get_if<ScratchArgument>(&argument))
          scratch->scratch += first_scratch;
      }
    } else if (const auto* function = std::get_if<HostFunction>(&step)) {
      program.host_tensors = host_tensors;
      step = moved(*function, places);
    }
    program.steps.push_back(std::move(step));
  }
}

/// The parameters by which a family of rmsnorm keeps its output out of the caches.
constexpr const char* around_caches[] = {"evict_first", "nontemporal"};

/// A family of rmsnorm for the stage.
class NormFamily final : public Family {
 public:
  NormFamily(const Family& rows, std::string_view name) : rows_(rows), name_(name) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return rows_.summary(); }
  DeviceKind device_kind() const override { return rows_.device_kind(); }
  std::vector<std::string> stages() const override { return {stage_norm}; }
  bool is_fallback() const override { return rows_.is_fallback(); }
  std::vector<std::string> sources() const override { return rows_.sources(); }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (!form_of(problem).normalises) return "it is for a norm in front: norm=rms or add-rms";
    return rows_.refusal(norm_of(problem), facts);
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    Space space = rows_.space(norm_of(problem), facts);
    const Config config = default_config(problem, facts);
    for (const char* name : around_caches)
      if (config.contains(name))
        space.constraint("gate_up reads the result next, so it stays in the cache",
                         [name](const Config& c) { return c.at(name) == 0; }, {name});
    return space;
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    Config config = rows_.default_config(norm_of(problem), facts);
    for (const char* name : around_caches)
      if (config.contains(name)) config.set(name, 0);
    return config;
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    Program program;
    append_moved(program, rows_.program(norm_of(problem), facts, config), places_here(problem),
                 ffn_op().tensors(problem).size());
    return program;
  }

 private:
  const Family& rows_;
  std::string_view name_;
};

}  // namespace

std::vector<OptionField> norm_options() {
  return {
      rare_option("norm",
                  "norm in front of the products; rms: RMSNorm of x; add-rms: RMSNorm of x plus a "
                  "residual, and their sum is written",
                  {"none", "rms", "add-rms"}, "fwd"),
      rare_option("convention",
                  "where the norm rounds, and whether w_norm is kept as its distance from 1",
                  {"llama", "gemma", "t5"}, "fwd"),
      rare_number("eps", "added to the norm's mean square", usual_eps, {0, 1}, "fwd")};
}

std::string norm_contradiction(const Problem& problem) {
  if (form_of(problem).normalises) {
    if (is_quantised(problem))
      return "norm=" + problem.option("norm") +
             " is for bf16, fp16 and f32: fp8 has the scale of "
             "an x that is quantised already";
    if (problem.size("d") > norm::most_features)
      return "norm=" + problem.option("norm") + " is of at most " +
             std::to_string(norm::most_features) +
             " features: d=" + std::to_string(problem.size("d"));
    return "";
  }
  for (const char* name : {"convention", "eps"})
    if (problem.options.contains(name))
      return std::string(name) + "=" + problem.option(name) +
             " is of a norm: give norm=rms or norm=add-rms too";
  return "";
}

std::vector<TensorSpec> norm_tensors(const Problem& problem, Role role) {
  std::vector<TensorSpec> tensors;
  if (!form_of(problem).normalises) return tensors;
  for (TensorSpec tensor : rmsnorm_op().tensors(norm_of(problem))) {
    tensor.name = name_here(tensor.name);
    tensor.may_alias.clear();  // one kernel of all stages reads rows that another block adds
    if (tensor.name == "normalised") tensor.role = Role::intermediate;
    if (tensor.name != "x" && tensor.role == role) tensors.push_back(std::move(tensor));
  }
  return tensors;
}

StageSpec norm_stage(const Problem& problem) {
  StageSpec stage = rmsnorm_op().stages(norm_of(problem)).front();
  stage.name = stage_norm;
  for (auto* names : {&stage.inputs, &stage.outputs})
    for (auto& name : *names) name = name_here(name);
  return stage;
}

void norm_reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const StageSpec stage = rmsnorm_op().stages(norm_of(problem)).front();
  ReferenceTensors rows;
  for (const auto& name : stage.inputs) rows[name] = tensors.at(name_here(name));
  rmsnorm_op().reference(norm_of(problem), 0, rows, parallel);
  for (const auto& name : stage.outputs) tensors[name_here(name)] = std::move(rows.at(name));
}

std::vector<const Family*> norm_families() {
  static const NormFamily rows(family_of_rmsnorm("forward_rows"), "norm_rows");
  static const NormFamily fallback(family_of_rmsnorm("forward_fallback"), "norm_fallback");
  static const NormFamily cpu(family_of_rmsnorm("cpu_forward"), "cpu_norm");
  return {&rows, &fallback, &cpu};
}

void append_norm(Baseline& baseline, const Problem& problem, const DeviceFacts& facts) {
  if (!form_of(problem).normalises) return;
  const Problem norm = norm_of(problem);
  auto places = places_here(problem);
  const std::size_t own = ffn_op().tensors(problem).size();
  if (facts.kind == DeviceKind::cpu) {
    const Family& rows = family_of_rmsnorm("cpu_forward");
    return append_moved(baseline.program,
                        rows.program(norm, facts, rows.default_config(norm, facts)), places, own);
  }
  Baseline plain = norm::baselines(norm, facts).front();
  for (auto& tensor : plain.extra) {
    places.push_back(own + baseline.extra.size());
    tensor.name = "unweighed";
    baseline.extra.push_back(std::move(tensor));
  }
  append_moved(baseline.program, std::move(plain.program), places, own);
}

}  // namespace fftune::ffn
