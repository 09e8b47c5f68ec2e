#include "fftune/fftune.h"

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <utility>

#include "api/describe.hpp"
#include "api/failure.hpp"
#include "api/handles.hpp"
#include "runtime/choice.hpp"
#include "runtime/devices.hpp"

using namespace fftune;

namespace {

constexpr std::size_t vector_alignment = 16;  // of the kernels' widest loads
constexpr std::size_t workspace_alignment = 256;

bool aligned(const void* address, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(address) % alignment == 0;
}

std::shared_ptr<Library> open_library(int device, const char* preset_path) {
  if (device < -1)
    throw Error(ErrorKind::invalid_input,
                fmt::format("device {} is none: use a CUDA ordinal, or -1 for the CPU", device));
  const Environment environment = read_environment();
  auto folders = environment.preset_folders;
  if (preset_path) {
    if (!std::filesystem::is_directory(preset_path))
      throw Error(ErrorKind::invalid_input,
                  fmt::format("preset_path '{}' is no folder: give one that holds "
                              "<device>/<op>.json, or NULL for the usual folders",
                              preset_path));
    folders.insert(folders.begin(), preset_path);
  }
  const Catalog& catalog = builtin_catalog();
  const std::string spec = device < 0 ? "cpu" : fmt::format("cuda:{}", device);
  auto backend = open_device(spec, *catalog.sources, environment);
  return std::make_shared<Library>(
      Library{&catalog, std::move(backend), PresetLibrary::load(folders), fork_count()});
}

std::unique_ptr<fftune_plan> make_plan(const std::shared_ptr<Library>& library,
                                       const char* problem_text) {
  const DeviceFacts& facts = library->backend->facts();
  ParsedProblem parsed = problem_from_json(problem_text, *library->catalog);
  const Op& op = library->catalog->op(parsed.problem.op);
  if (!parsed.dtype_given) parsed.problem.dtype = op.dtypes(facts.kind).front();
  const Problem problem = canonical(op, std::move(parsed.problem), facts.kind);
  const Choice choice = choose(*library->catalog, op, problem, facts, library->presets);

  Plan plan(*library->backend, op, problem, choice.recipe);
  // Fallbacks and the CPU read element by element, or as the compiler finds fit for any address.
  const bool any_element = facts.kind == DeviceKind::cpu || runs_fallbacks_alone(plan);
  std::vector<std::size_t> alignments;
  std::string names;
  for (std::size_t i = 0; i < plan.buffer_count(); ++i) {
    const auto& tensor = plan.tensors()[i];
    alignments.push_back(any_element ? dtype_bytes(tensor.dtype) : vector_alignment);
    names += (names.empty() ? "" : ", ") + tensor.name;
  }
  std::string description =
      describe(plan, facts, choice, alignments, library->presets.complaints());
  return std::unique_ptr<fftune_plan>(new fftune_plan{
      library, std::move(plan), std::move(alignments), std::move(names), std::move(description)});
}

fftune_status fail_after_fork(const char* function) {
  return fail(FFTUNE_UNAVAILABLE,
              "{}: a CUDA device cannot be used after fork(): create the context in the child, or "
              "start it by spawn",
              function);
}

/// FFTUNE_OK if the arguments are fit to run.
fftune_status check_run(const fftune_plan& handle, void* const* buffers, std::size_t count,
                        const void* workspace) {
  const Plan& plan = handle.plan;
  if (count != plan.buffer_count())
    return fail(FFTUNE_INVALID_INPUT, "fftune_plan_run: {} buffers given, {} needed: {}", count,
                plan.buffer_count(), handle.buffer_names);
  if (!buffers) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_run: buffers is NULL");
  for (std::size_t i = 0; i < count; ++i) {
    if (!buffers[i])
      return fail(FFTUNE_INVALID_INPUT, "fftune_plan_run: buffer {} ({}) is NULL", i,
                  plan.tensors()[i].name);
    if (!aligned(buffers[i], handle.alignments[i]))
      return fail(FFTUNE_INVALID_INPUT,
                  "fftune_plan_run: buffer {} ({}) at {} is not aligned to {} bytes", i,
                  plan.tensors()[i].name, fmt::ptr(buffers[i]), handle.alignments[i]);
  }
  if (plan.workspace_bytes() == 0) return FFTUNE_OK;
  if (!workspace)
    return fail(FFTUNE_INVALID_INPUT, "fftune_plan_run: workspace is NULL, {} bytes are needed",
                plan.workspace_bytes());
  if (!aligned(workspace, workspace_alignment))
    return fail(FFTUNE_INVALID_INPUT, "fftune_plan_run: workspace at {} is not aligned to {} bytes",
                fmt::ptr(workspace), workspace_alignment);
  return FFTUNE_OK;
}

}  // namespace

static_assert(std::string_view(FFTUNE_VERSION) == FFTUNE_VERSION_STRING,
              "fftune.h and CMakeLists.txt name different versions");

const char* fftune_version(void) {
  return FFTUNE_VERSION;
}

const char* fftune_last_error(void) {
  return last_failure().data();
}

fftune_status fftune_context_create(int device, const char* preset_path, fftune_context** out) {
  if (!out) return fail(FFTUNE_INVALID_INPUT, "fftune_context_create: out is NULL");
  *out = nullptr;
  return guarded("fftune_context_create", [&] {
    *out = new fftune_context{open_library(device, preset_path)};
    return FFTUNE_OK;
  });
}

void fftune_context_destroy(fftune_context* context) {
  delete context;
}

fftune_status fftune_plan_create(fftune_context* context, const char* problem_json,
                                 fftune_plan** out) {
  if (!out) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_create: out is NULL");
  *out = nullptr;
  if (!context) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_create: context is NULL");
  if (!problem_json) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_create: problem_json is NULL");
  if (context->library->lost_by_fork()) return fail_after_fork("fftune_plan_create");
  return guarded("fftune_plan_create", [&] {
    *out = make_plan(context->library, problem_json).release();
    return FFTUNE_OK;
  });
}

void fftune_plan_destroy(fftune_plan* plan) {
  delete plan;
}

size_t fftune_plan_buffer_count(const fftune_plan* plan) {
  return plan ? plan->plan.buffer_count() : 0;
}

size_t fftune_plan_buffer_bytes(const fftune_plan* plan, size_t index) {
  return index < fftune_plan_buffer_count(plan) ? plan->plan.tensors()[index].bytes() : 0;
}

size_t fftune_plan_workspace_bytes(const fftune_plan* plan) {
  return plan ? plan->plan.workspace_bytes() : 0;
}

const char* fftune_plan_describe(const fftune_plan* plan) {
  return plan ? plan->description.c_str() : nullptr;
}

fftune_status fftune_plan_run(const fftune_plan* plan, void* const* buffers, size_t buffer_count,
                              void* workspace, void* stream) {
  if (!plan) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_run: plan is NULL");
  if (plan->library->lost_by_fork()) return fail_after_fork("fftune_plan_run");
  return guarded("fftune_plan_run", [&] {
    const fftune_status status = check_run(*plan, buffers, buffer_count, workspace);
    if (status == FFTUNE_OK) plan->plan.run(buffers, workspace, stream);
    return status;
  });
}
