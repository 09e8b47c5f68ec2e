// Saved models in the C API.
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "api/edge.hpp"
#include "api/handles.hpp"
#include "core/fail.hpp"
#include "core/fork.hpp"
#include "device/host_threads.hpp"
#include "fftune/fftune.h"
#include "saved/inputs.hpp"
#include "saved/language_model.hpp"
#include "store/json.hpp"
#include "store/preset_file.hpp"

using namespace fftune;

namespace {

JsonValue description_of(const SavedModel& model) {
  const auto* const embedding = find_embedding(model);
  JsonValue description{{"layers", count_layers(model)}};
  if (embedding != nullptr && embedding->saved.shape.size() == 2) {
    description["vocab"] = embedding->saved.shape[0];
    description["d"] = embedding->saved.shape[1];
    if (const auto dtype = dtype_of(embedding->saved.element))
      description["dtype"] = dtype_name(*dtype);
  }
  const auto* const positions = find_in_model(model, layer_prefix(model, 0), positions_name);
  description["learned_positions"] = positions != nullptr;
  JsonValue tensors(JsonValue::Array{});
  for (const auto& [name, tensor] : model.tensors()) {
    JsonValue own{{"name", name}, {"dtype", element_name(tensor.saved.element)}};
    const std::string why = tensor.quantised ? tensor.quantised->unreadable() : "";
    if (why.empty()) own["shape"] = tensor.saved.shape;
    own["quantised"] = tensor.quantised != nullptr;
    if (!why.empty()) own["unreadable"] = why;
    tensors.push_back(std::move(own));
  }
  description["tensors"] = std::move(tensors);
  if (model.config() != nullptr) description["config"] = *model.config();
  return description;
}

/// Keeps the text for as long as the model is open.
const char* kept(const fftune_model& model, std::string text) {
  const std::lock_guard lock(model.mutex.own());
  return model.texts.insert(std::move(text)).first->c_str();
}

std::string completed_problem(const fftune_model& model, const Library& library, std::int64_t layer,
                              const char* map, const char* problem_text) {
  const ParsedProblem parsed = problem_from_json(problem_text, library.catalog);
  const Op& op = library.catalog.op(parsed.problem.op);
  const DeviceKind kind = library.backend->facts().kind;
  GivenProblem given{.options = parsed.problem.options, .pass = parsed.problem.pass};
  for (const auto& [name, size] : parsed.problem.sizes) given.sizes[name] = fmt::to_string(size);
  if (parsed.dtype_given) given.dtypes = dtype_name(parsed.problem.dtype);

  const SavedInputs saved(library.catalog, op, model.model, layer, map ? map : "");
  saved.require_any();
  saved.complete(given, kind);
  Problem problem = parsed.problem;
  problem.dtype =
      given.dtypes.empty() ? op.dtypes_of_pass(kind, given.pass).at(0) : parse_dtype(given.dtypes);
  for (const auto& [name, size] : given.sizes)
    if (const auto number = whole_number(size)) problem.sizes[name] = *number;
  for (const auto& [name, value] : given.options)
    if (!value.empty()) problem.options[name] = value;
  problem = canonical(op, std::move(problem), kind);
  saved.require_fit(problem);
  saved.require_all_used(problem);

  if (!parsed.any_tokens) return problem_json(problem);
  const std::string tokens(op.token_size());
  JsonValue json = parse_json(problem_json(problem));
  json[tokens] = JsonValue{{"max", problem.size(tokens)}};
  return json_line(json);
}

/// The inputs of a plan, and one of its buffers.
struct PlanInput {
  PlanInput(const fftune_model& model, std::int64_t layer, const char* map, const fftune_plan& plan,
            std::size_t index)
      : saved(plan.library->catalog, plan.plan ? plan.plan->op() : plan.token_plan->op(),
              model.model, layer, map ? map : "") {
    if (index >= plan.buffer_count())
      fftune::fail("index {} is none: the plan has {} buffers: {}", index, plan.buffer_count(),
                   plan.buffer_names);
    spec = plan.tensors()[index];
  }

  SavedInputs saved;
  TensorSpec spec;
};

}  // namespace

fftune_status fftune_model_open(const char* path, fftune_model** out) {
  constexpr const char* function = "fftune_model_open";
  if (!out) return fail(FFTUNE_INVALID_INPUT, "{}: out is NULL", function);
  *out = nullptr;
  if (!path) return fail(FFTUNE_INVALID_INPUT, "{}: path is NULL", function);
  return guarded(function, [&] {
    const UntornByFork whole;
    auto model = std::make_unique<fftune_model>();
    model->model = std::make_shared<const SavedModel>(path);
    model->description = json_line(description_of(*model->model));
    *out = model.release();
    began(*out);
    return FFTUNE_OK;
  });
}

void fftune_model_close(fftune_model* model) {
  destroy(model, "fftune_model_close");
}

const char* fftune_model_describe(const fftune_model* model) {
  if (!model) return nullptr;
  used(model, "fftune_model_describe");
  return model->description.c_str();
}

fftune_status fftune_model_read(const fftune_model* model, const char* tensor, const char* dtype,
                                size_t first, size_t count, void* out) {
  constexpr const char* function = "fftune_model_read";
  if (!model || !tensor || !dtype || (!out && count > 0))
    return fail(FFTUNE_INVALID_INPUT, "{}: an argument is NULL", function);
  used(model, function);
  return guarded(function, [&] {
    const auto& saved = model->model->at(tensor);
    const DType type = parse_dtype(dtype);
    model->model->require_readable(saved);
    const auto all = static_cast<std::size_t>(saved.saved.elements());
    if (first > all || count > all - first)
      fftune::fail("'{}' has {} elements, not {} from {} on", tensor, all, count, first);
    model->model->read(saved, first, type, static_cast<std::byte*>(out), count);
    return FFTUNE_OK;
  });
}

fftune_status fftune_model_embed(const fftune_model* model, const int32_t* ids, size_t count,
                                 int64_t position, const char* dtype, void* out, size_t bytes) {
  constexpr const char* function = "fftune_model_embed";
  if (!model || !ids || !dtype || !out)
    return fail(FFTUNE_INVALID_INPUT, "{}: an argument is NULL", function);
  used(model, function);
  return guarded(function, [&] {
    embed(*model->model, {ids, count}, position, parse_dtype(dtype),
          {static_cast<std::byte*>(out), bytes});
    return FFTUNE_OK;
  });
}

fftune_status fftune_model_problem(const fftune_model* model, const fftune_context* context,
                                   int64_t layer, const char* map, const char* problem_json,
                                   const char** out) {
  constexpr const char* function = "fftune_model_problem";
  if (!out) return fail(FFTUNE_INVALID_INPUT, "{}: out is NULL", function);
  *out = nullptr;
  if (!model || !context || !problem_json)
    return fail(FFTUNE_INVALID_INPUT, "{}: an argument is NULL", function);
  used(model, function);
  used(context, function);
  return guarded(function, [&] {
    const UntornByFork whole;
    *out = kept(*model, completed_problem(*model, *context->library, layer, map, problem_json));
    return FFTUNE_OK;
  });
}

fftune_status fftune_model_source(const fftune_model* model, int64_t layer, const char* map,
                                  const fftune_plan* plan, size_t index, const char** out) {
  constexpr const char* function = "fftune_model_source";
  if (!out) return fail(FFTUNE_INVALID_INPUT, "{}: out is NULL", function);
  *out = nullptr;
  if (!model || !plan) return fail(FFTUNE_INVALID_INPUT, "{}: an argument is NULL", function);
  used(model, function);
  used(plan, function);
  return guarded(function, [&] {
    const UntornByFork whole;
    const PlanInput input(*model, layer, map, *plan, index);
    if (std::string text = input.saved.source_text(input.spec); !text.empty())
      *out = kept(*model, std::move(text));
    return FFTUNE_OK;
  });
}

fftune_status fftune_model_input(const fftune_model* model, int64_t layer, const char* map,
                                 const fftune_plan* plan, size_t index, void* out, size_t bytes) {
  constexpr const char* function = "fftune_model_input";
  if (!model || !plan || !out)
    return fail(FFTUNE_INVALID_INPUT, "{}: an argument is NULL", function);
  used(model, function);
  used(plan, function);
  return guarded(function, [&] {
    const auto input = [&] {
      const UntornByFork whole;
      return PlanInput(*model, layer, map, *plan, index);
    }();
    if (bytes != input.spec.bytes())
      fftune::fail("{} has {} bytes, not {}", input.spec.name, input.spec.bytes(), bytes);
    HostThreads threads;
    if (!input.saved.fill(input.spec, {static_cast<std::byte*>(out), bytes}, threads))
      fftune::fail("the model has no {}: fftune_model_source says what it has", input.spec.name);
    return FFTUNE_OK;
  });
}
