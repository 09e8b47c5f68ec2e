#include "fftune/fftune.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <utility>

#include "api/describe.hpp"
#include "api/edge.hpp"
#include "api/handles.hpp"
#include "core/fork.hpp"
#include "ranks/rank_search.hpp"
#include "runtime/choice.hpp"
#include "runtime/device_sources.hpp"
#include "runtime/devices.hpp"
#include "runtime/launcher.hpp"

using namespace fftune;

namespace {

constexpr std::size_t vector_alignment = 16;  // of the kernels' widest loads
constexpr std::size_t workspace_alignment = 256;

bool aligned(const void* address, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(address) % alignment == 0;
}

fftune_context_options options_of(const char* preset_path) {
  fftune_context_options options{};
  options.struct_size = sizeof options;
  options.preset_path = preset_path;
  return options;
}

CpuOptions cpu_options(const fftune_context_options& options) {
  if (options.threads < 0)
    throw Error(ErrorKind::invalid_input,
                fmt::format("fftune_context_options.threads is {}: use 0 for the usual number, or "
                            "1 or more",
                            options.threads));
  CpuOptions cpu{.threads = options.threads};
  if (options.parallel_for)
    cpu.run_tasks = [run = options.parallel_for, pool = options.pool](
                        int tasks, const std::function<void(int)>& task) {
      const auto call = [](void* state, int index) {
        (*static_cast<const std::function<void(int)>*>(state))(index);
      };
      run(pool, tasks, call, const_cast<std::function<void(int)>*>(&task));
    };
  return cpu;
}

std::shared_ptr<Library> open_library(int device, const fftune_context_options& options) {
  if (device < -1)
    throw Error(ErrorKind::invalid_input,
                fmt::format("device {} is none: use a CUDA ordinal, or -1 for the CPU", device));
  Environment environment = read_environment();
  if (options.bundle_path) environment.bundle = options.bundle_path;
  if (options.no_jit) environment.no_jit = true;
  auto folders = environment.preset_folders;
  if (const char* path = options.preset_path) {
    std::error_code error;
    if (!std::filesystem::is_directory(path, error))
      throw Error(ErrorKind::invalid_input,
                  fmt::format("preset_path '{}' is not a folder: give one that holds "
                              "<device>/<op>.json, or NULL for the usual folders",
                              path));
    folders.insert(folders.begin(), path);
  }
  const std::string spec = device < 0 ? "cpu" : fmt::format("cuda:{}", device);
  auto library = std::make_shared<Library>();
  library->catalog = builtin_catalog();
  library->device_sources = device_sources(*library->catalog.sources, environment);
  if (library->device_sources) library->catalog.sources = library->device_sources.get();
  library->backend =
      open_device(spec, *library->catalog.sources, environment, cpu_options(options));
  library->presets = PresetLibrary::load(folders);
  library->preset_complaints = library->presets.complaints();
  std::copy(environment.preset_complaints.begin(), environment.preset_complaints.end(),
            std::back_inserter(library->preset_complaints));
  return library;
}

/// The extents of a plan's buffers. One that does not grow by the same bytes with each token counts
/// as with one token.
std::vector<BufferExtent> buffer_extents(const fftune_plan& handle) {
  std::vector<BufferExtent> extents;
  if (handle.plan) {
    for (const auto& tensor : handle.tensors()) extents.push_back({tensor.extent_bytes()});
    return extents;
  }
  const TokenPlan& plan = *handle.token_plan;
  const auto tensors_of = [&](std::int64_t tokens) {
    return plan.op().tensors(plan.most().with_size(plan.op().token_size(), tokens));
  };
  const auto of_one = tensors_of(1), of_two = tensors_of(2);
  for (std::size_t i = 0; i < handle.buffer_count(); ++i) {
    const std::size_t one = of_one[i].extent_bytes(), two = of_two[i].extent_bytes();
    const BufferExtent grown{one, two - std::min(one, two)};
    const bool is_linear = grown.of(plan.most_tokens()) == handle.tensors()[i].extent_bytes();
    extents.push_back(is_linear ? grown : BufferExtent{one});
  }
  return extents;
}

void describe_buffers(fftune_plan& handle, bool any_element) {
  for (std::size_t i = 0; i < handle.buffer_count(); ++i) {
    const auto& tensor = handle.tensors()[i];
    handle.alignments.push_back(any_element ? dtype_bytes(tensor.dtype) : vector_alignment);
    handle.buffer_names += (handle.buffer_names.empty() ? "" : ", ") + tensor.name;
    if (tensor.role == Role::input) handle.places_of_inputs.push_back(i);
    if (tensor.role == Role::updated) handle.places_of_outputs.push_back(i);
  }
  for (std::size_t i = 0; i < handle.buffer_count(); ++i)
    if (handle.tensors()[i].role == Role::output) handle.places_written_whole.push_back(i);
  const auto& written = handle.places_written_whole;
  handle.places_of_outputs.insert(handle.places_of_outputs.end(), written.begin(), written.end());

  handle.extents = buffer_extents(handle);
  for (std::size_t i = 0; i < handle.buffer_count(); ++i) {
    const auto alias = std::find_if(written.begin(), written.end(), [&](std::size_t place) {
      return handle.tensors()[place].name == handle.tensors()[i].may_alias;
    });
    handle.aliases.push_back(alias == written.end() ? handle.buffer_count() : *alias);
  }
}

std::unique_ptr<fftune_plan> make_plan(const std::shared_ptr<Library>& library,
                                       const char* problem_text) {
  const auto start = std::chrono::steady_clock::now();
  Backend& backend = *library->backend;
  const DeviceFacts& facts = backend.facts();
  ParsedProblem parsed = problem_from_json(problem_text, library->catalog);
  const Op& op = library->catalog.op(parsed.problem.op);
  if (!parsed.dtype_given) parsed.problem.dtype = op.dtypes(facts.kind).front();
  const Problem problem = canonical(op, std::move(parsed.problem), facts.kind);

  auto handle = std::make_unique<fftune_plan>();
  handle->library = library;
  // Fallbacks and the CPU read element by element, or as the compiler finds fit for any address.
  bool any_element = facts.kind == DeviceKind::cpu;
  Choice choice;
  if (parsed.any_tokens) {
    handle->token_plan =
        std::make_unique<const TokenPlan>(library->catalog, backend, op, problem, library->presets);
    const auto& segments = handle->token_plan->segments();
    any_element |= std::all_of(segments.begin(), segments.end(), [&](const TokenSegment& segment) {
      return runs_fallbacks_alone(op, segment.choice.recipe);
    });
    choice = segments.back().choice;
  } else {
    choice = choose(library->catalog, op, problem, facts, library->presets);
    if (auto recipe = library->recipe_of_ranks(unrepeated(op, problem))) {
      choice = Choice();
      choice.recipe = std::move(*recipe);
      choice.reason = "a search on the ranks of a group";
    }
    handle->plan = std::make_unique<const Plan>(backend, op, problem, choice.recipe);
    any_element |= runs_fallbacks_alone(op, choice.recipe);
  }
  describe_buffers(*handle, any_element);
  handle->description = describe({.op = &op,
                                  .problem = &problem,
                                  .facts = &facts,
                                  .choice = &choice,
                                  .plan = handle.get(),
                                  .warnings = backend.warnings(),
                                  .complaints = library->preset_complaints});
  const auto spent = std::chrono::steady_clock::now() - start;
  library->plan_nanoseconds += static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
  ++library->plans;
  return handle;
}

fftune_status fail_after_fork(const char* function) {
  return fail(FFTUNE_UNAVAILABLE,
              "{}: a CUDA device cannot be used after fork(): create the context in the child, or "
              "start it by spawn",
              function);
}

fftune_status check_buffer(const fftune_plan& handle, const char* function, std::size_t place,
                           const void* buffer) {
  const auto& name = handle.tensors()[place].name;
  if (!buffer)
    return fail(FFTUNE_INVALID_INPUT, "{}: buffer {} ({}) is NULL", function, place, name);
  if (!aligned(buffer, handle.alignments[place]))
    return fail(FFTUNE_INVALID_INPUT, "{}: buffer {} ({}) at {} is not aligned to {} bytes",
                function, place, name, fmt::ptr(buffer), handle.alignments[place]);
  return FFTUNE_OK;
}

/// FFTUNE_OK if no output overlaps another buffer: kernels read inputs behind what they write. Nor
/// may the workspace.
fftune_status check_overlaps(const fftune_plan& handle, const char* function, std::int64_t tokens,
                             const void* const* buffers, const void* workspace) {
  const auto first = [&](std::size_t place) {
    return reinterpret_cast<std::uintptr_t>(buffers[place]);
  };
  const auto behind = [&](std::size_t place) {
    return first(place) + handle.extents[place].of(tokens);
  };
  for (const std::size_t output : handle.places_written_whole) {
    const std::uintptr_t begin = first(output), end = behind(output);
    for (std::size_t other = 0; other < handle.buffer_count(); ++other) {
      if (first(other) >= end || behind(other) <= begin || other == output) continue;
      if (handle.aliases[other] == output && first(other) == begin) continue;
      return fail(FFTUNE_INVALID_INPUT,
                  "{}: output {} ({}) overlaps buffer {} ({}): give it memory of its own", function,
                  output, handle.tensors()[output].name, other, handle.tensors()[other].name);
    }
  }
  const auto scratch = reinterpret_cast<std::uintptr_t>(workspace);
  const std::uintptr_t scratch_end = scratch + handle.workspace_bytes();
  for (std::size_t place = 0; scratch != scratch_end && place < handle.buffer_count(); ++place)
    if (first(place) < scratch_end && behind(place) > scratch)
      return fail(FFTUNE_INVALID_INPUT,
                  "{}: the workspace, {} bytes, overlaps buffer {} ({}): give it memory of its own",
                  function, handle.workspace_bytes(), place, handle.tensors()[place].name);
  return FFTUNE_OK;
}

fftune_status check_workspace(const fftune_plan& handle, const char* function,
                              const void* workspace) {
  if (handle.workspace_bytes() == 0) return FFTUNE_OK;
  if (!workspace)
    return fail(FFTUNE_INVALID_INPUT, "{}: workspace is NULL, {} bytes are needed", function,
                handle.workspace_bytes());
  if (!aligned(workspace, workspace_alignment))
    return fail(FFTUNE_INVALID_INPUT, "{}: workspace at {} is not aligned to {} bytes", function,
                fmt::ptr(workspace), workspace_alignment);
  return FFTUNE_OK;
}

/// FFTUNE_OK if the arguments are fit to run.
fftune_status check_run(const fftune_plan& handle, void* const* buffers, std::size_t count,
                        const void* workspace) {
  constexpr const char* function = "fftune_plan_run";
  if (handle.token_plan)
    return fail(FFTUNE_INVALID_INPUT,
                "{}: this plan is for any {} up to {}: use fftune_plan_launch, which says how many",
                function, handle.token_plan->op().token_size(), handle.token_plan->most_tokens());
  if (count != handle.buffer_count())
    return fail(FFTUNE_INVALID_INPUT, "{}: {} buffers given, {} needed: {}", function, count,
                handle.buffer_count(), handle.buffer_names);
  if (!buffers) return fail(FFTUNE_INVALID_INPUT, "{}: buffers is NULL", function);
  for (std::size_t i = 0; i < count; ++i)
    if (const auto status = check_buffer(handle, function, i, buffers[i]); status != FFTUNE_OK)
      return status;
  if (const auto status = check_workspace(handle, function, workspace); status != FFTUNE_OK)
    return status;
  return check_overlaps(handle, function, 1, buffers, workspace);
}

/// The names of the buffers at the places.
std::string names_at(const fftune_plan& handle, const std::vector<std::size_t>& places) {
  std::string names;
  for (const auto place : places)
    names += (names.empty() ? "" : ", ") + handle.tensors()[place].name;
  return names.empty() ? "none" : names;
}

fftune_status check_tokens(const fftune_plan& handle, const char* function, std::int64_t tokens) {
  const Op& op = handle.plan ? handle.plan->op() : handle.token_plan->op();
  const auto name = op.token_size();
  if (handle.token_plan) {
    const auto most = handle.token_plan->most_tokens();
    if (tokens >= 1 && tokens <= most) return FFTUNE_OK;
    return fail(FFTUNE_INVALID_INPUT, "{}: {}={} is out of range: this plan is for 1 to {}",
                function, name, tokens, most);
  }
  const auto own = handle.plan->problem().size(name);
  if (tokens == 0 || tokens == own) return FFTUNE_OK;
  return fail(FFTUNE_INVALID_INPUT,
              "{}: this plan is for {}={}, not {}: make one with \"{}\": {{\"max\": {}}}", function,
              name, own, tokens, name, std::max(own, tokens));
}

/// Puts a launch's buffers in the order of fftune_plan_run; FFTUNE_OK if they are fit to run.
template <typename Pointer>
fftune_status place_buffers(const fftune_plan& handle, const char* what, Pointer const* given,
                            std::size_t count, const std::vector<std::size_t>& places,
                            void** buffers) {
  constexpr const char* function = "fftune_plan_launch";
  if (count != places.size())
    return fail(FFTUNE_INVALID_INPUT, "{}: {} {} given, {} needed: {}", function, count, what,
                places.size(), names_at(handle, places));
  if (count > 0 && !given) return fail(FFTUNE_INVALID_INPUT, "{}: {} is NULL", function, what);
  for (std::size_t i = 0; i < count; ++i) {
    const auto status = check_buffer(handle, function, places[i], given[i]);
    if (status != FFTUNE_OK) return status;
    // Programs take one array of addresses; what they only read they do not write.
    buffers[places[i]] = const_cast<void*>(static_cast<const void*>(given[i]));
  }
  return FFTUNE_OK;
}

fftune_status launch(const fftune_plan& handle, const fftune_run& run) {
  std::array<void*, most_tensors> buffers;
  auto status = check_tokens(handle, "fftune_plan_launch", run.tokens);
  if (status == FFTUNE_OK)
    status = place_buffers(handle, "inputs", run.inputs, run.input_count, handle.places_of_inputs,
                           buffers.data());
  if (status == FFTUNE_OK)
    status = place_buffers(handle, "outputs", run.outputs, run.output_count,
                           handle.places_of_outputs, buffers.data());
  if (status == FFTUNE_OK) status = check_workspace(handle, "fftune_plan_launch", run.workspace);
  // A plan for one token count has these extents for any.
  if (status == FFTUNE_OK)
    status = check_overlaps(handle, "fftune_plan_launch", std::max<std::int64_t>(run.tokens, 1),
                            buffers.data(), run.workspace);
  if (status != FFTUNE_OK) return status;
  if (handle.plan)
    handle.plan->run(buffers.data(), run.workspace, run.stream);
  else
    handle.token_plan->run(run.tokens, buffers.data(), run.workspace, run.stream);
  return FFTUNE_OK;
}

/// Creates a context into `out` by `function`.
template <typename Options>
fftune_status create_context(const char* function, int device, const Options& options,
                             fftune_context** out) {
  if (!out) return fail(FFTUNE_INVALID_INPUT, "{}: out is NULL", function);
  *out = nullptr;
  return guarded(function, [&] {
    const UntornByFork whole;
    *out = new fftune_context{open_library(device, options())};
    began(*out);
    return FFTUNE_OK;
  });
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
  return create_context(
      "fftune_context_create", device, [&] { return options_of(preset_path); }, out);
}

fftune_status fftune_context_create_with(int device, const fftune_context_options* options,
                                         fftune_context** out) {
  constexpr auto least = offsetof(fftune_context_options, preset_path);
  return create_context(
      "fftune_context_create_with", device,
      [&] {
        return options ? read_struct(*options, "fftune_context_options", least)
                       : options_of(nullptr);
      },
      out);
}

fftune_status fftune_context_counters(const fftune_context* context, fftune_counters* counters) {
  if (!context) return fail(FFTUNE_INVALID_INPUT, "fftune_context_counters: context is NULL");
  if (!counters) return fail(FFTUNE_INVALID_INPUT, "fftune_context_counters: counters is NULL");
  used(context, "fftune_context_counters");
  return guarded("fftune_context_counters", [&] {
    const auto size = counters->struct_size;
    if (size < sizeof size)
      throw Error(
          ErrorKind::invalid_input,
          fmt::format("fftune_counters.struct_size is {}: set it to sizeof(fftune_counters)",
                      size));
    const Library& library = *context->library;
    const CompileCounters compiled = library.backend->counters();
    fftune_counters own{};
    own.struct_size = size;
    own.compilations = compiled.compiled;
    own.compile_nanoseconds = static_cast<std::uint64_t>(compiled.compile_seconds * 1e9);
    own.kernels_from_cache = compiled.from_cache;
    own.kernels_from_bundle = compiled.from_bundle;
    own.plans = library.plans;
    own.plan_nanoseconds = library.plan_nanoseconds;
    std::memcpy(counters, &own, std::min(size, sizeof own));
    return FFTUNE_OK;
  });
}

void fftune_context_destroy(fftune_context* context) {
  destroy(context, "fftune_context_destroy");
}

fftune_status fftune_plan_create(fftune_context* context, const char* problem_json,
                                 fftune_plan** out) {
  if (!out) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_create: out is NULL");
  *out = nullptr;
  if (!context) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_create: context is NULL");
  if (!problem_json) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_create: problem_json is NULL");
  used(context, "fftune_plan_create");
  if (context->library->lost_by_fork()) return fail_after_fork("fftune_plan_create");
  return guarded("fftune_plan_create", [&] {
    const UntornByFork whole;
    *out = make_plan(context->library, problem_json).release();
    began(*out);
    return FFTUNE_OK;
  });
}

void fftune_plan_destroy(fftune_plan* plan) {
  destroy(plan, "fftune_plan_destroy");
}

size_t fftune_plan_buffer_count(const fftune_plan* plan) {
  if (!plan) return 0;
  used(plan, "fftune_plan_buffer_count");
  return plan->buffer_count();
}

size_t fftune_plan_buffer_bytes(const fftune_plan* plan, size_t index) {
  if (!plan) return 0;
  used(plan, "fftune_plan_buffer_bytes");
  return index < plan->buffer_count() ? plan->tensors()[index].bytes() : 0;
}

size_t fftune_plan_workspace_bytes(const fftune_plan* plan) {
  if (!plan) return 0;
  used(plan, "fftune_plan_workspace_bytes");
  return plan->workspace_bytes();
}

int64_t fftune_plan_max_tokens(const fftune_plan* plan) {
  if (!plan) return 0;
  used(plan, "fftune_plan_max_tokens");
  return plan->token_plan ? plan->token_plan->most_tokens() : 0;
}

const char* fftune_plan_describe(const fftune_plan* plan) {
  if (!plan) return nullptr;
  used(plan, "fftune_plan_describe");
  return plan->description.c_str();
}

fftune_status fftune_plan_run(const fftune_plan* plan, void* const* buffers, size_t buffer_count,
                              void* workspace, void* stream) {
  if (!plan) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_run: plan is NULL");
  used(plan, "fftune_plan_run");
  if (plan->library->lost_by_fork()) return fail_after_fork("fftune_plan_run");
  return guarded("fftune_plan_run", [&] {
    const fftune_status status = check_run(*plan, buffers, buffer_count, workspace);
    if (status == FFTUNE_OK) plan->plan->run(buffers, workspace, stream);
    return status;
  });
}

fftune_status fftune_plan_launch(const fftune_plan* plan, const fftune_run* run) {
  if (!plan) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_launch: plan is NULL");
  if (!run) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_launch: run is NULL");
  used(plan, "fftune_plan_launch");
  if (plan->library->lost_by_fork()) return fail_after_fork("fftune_plan_launch");
  return guarded("fftune_plan_launch", [&] {
    return launch(*plan, read_struct(*run, "fftune_run", offsetof(fftune_run, tokens)));
  });
}

fftune_status fftune_plan_prepare(const fftune_plan* plan, int64_t tokens) {
  if (!plan) return fail(FFTUNE_INVALID_INPUT, "fftune_plan_prepare: plan is NULL");
  used(plan, "fftune_plan_prepare");
  if (plan->library->lost_by_fork()) return fail_after_fork("fftune_plan_prepare");
  return guarded("fftune_plan_prepare", [&] {
    const UntornByFork whole;
    const auto status = check_tokens(*plan, "fftune_plan_prepare", tokens);
    if (status == FFTUNE_OK && plan->token_plan) plan->token_plan->prepare(tokens);
    return status;
  });
}

fftune_status fftune_group_create(fftune_context* context, const fftune_group_options* options,
                                  fftune_group** out) {
  if (!out) return fail(FFTUNE_INVALID_INPUT, "fftune_group_create: out is NULL");
  *out = nullptr;
  if (!context) return fail(FFTUNE_INVALID_INPUT, "fftune_group_create: context is NULL");
  if (!options) return fail(FFTUNE_INVALID_INPUT, "fftune_group_create: options is NULL");
  used(context, "fftune_group_create");
  if (context->library->lost_by_fork()) return fail_after_fork("fftune_group_create");
  return guarded("fftune_group_create", [&] {
    const auto own = read_struct(*options, "fftune_group_options",
                                 offsetof(fftune_group_options, timeout_milliseconds));
    GroupOptions group{.name = own.name ? own.name : "",
                       .rank = own.rank,
                       .ranks = own.ranks,
                       .max_bytes = own.max_bytes};
    if (own.ranks == 0) {
      const LaunchedRank launched = launched_rank();
      group.rank = launched.rank;
      group.ranks = launched.ranks;
      // A path is where it is. A launcher's ranks of one host are not all of those of several.
      if (group.name.starts_with("tcp://"))
        throw Error(ErrorKind::invalid_input,
                    "ranks is 0 in a group across hosts: give its rank and ranks");
      if (!group.name.starts_with('/')) group.name = launched.job + group.name;
    }
    group.nccl = own.nccl != 0 || group.name.starts_with("tcp://");
    if (own.timeout_milliseconds != 0)
      group.timeout = std::chrono::milliseconds(own.timeout_milliseconds);
    auto handle = std::make_unique<fftune_group>();
    handle->library = context->library;
    handle->group = std::make_unique<const Group>(*context->library->backend, group);
    *out = handle.release();
    began(*out);
    return FFTUNE_OK;
  });
}

void* fftune_group_memory(const fftune_group* group) {
  if (!group) return nullptr;
  used(group, "fftune_group_memory");
  return group->group->memory();
}

fftune_status fftune_group_place(const fftune_group* group, int* rank, int* ranks) {
  if (!group) return fail(FFTUNE_INVALID_INPUT, "fftune_group_place: group is NULL");
  used(group, "fftune_group_place");
  if (rank) *rank = group->group->rank();
  if (ranks) *ranks = group->group->ranks();
  return FFTUNE_OK;
}

fftune_status fftune_group_check(const fftune_group* group) {
  if (!group) return fail(FFTUNE_INVALID_INPUT, "fftune_group_check: group is NULL");
  used(group, "fftune_group_check");
  return guarded("fftune_group_check", [&] {
    group->group->check();
    return FFTUNE_OK;
  });
}

fftune_status fftune_group_tune(fftune_group* group, const char* problem_json,
                                int64_t budget_milliseconds) {
  const fftune_group_tune_options options{sizeof options, budget_milliseconds, nullptr};
  return fftune_group_tune_with(group, problem_json, &options);
}

fftune_status fftune_group_tune_with(fftune_group* group, const char* problem_json,
                                     const fftune_group_tune_options* options) {
  constexpr const char* function = "fftune_group_tune";
  if (!group) return fail(FFTUNE_INVALID_INPUT, "{}: group is NULL", function);
  if (!problem_json) return fail(FFTUNE_INVALID_INPUT, "{}: problem_json is NULL", function);
  if (!options) return fail(FFTUNE_INVALID_INPUT, "{}: options is NULL", function);
  used(group, function);
  if (group->library->lost_by_fork()) return fail_after_fork(function);
  return guarded(function, [&] {
    const auto own = read_struct(*options, "fftune_group_tune_options",
                                 offsetof(fftune_group_tune_options, preset_path));
    const Library& library = *group->library;
    Backend& backend = *library.backend;
    ParsedProblem parsed = problem_from_json(problem_json, library.catalog);
    const Op& op = library.catalog.op(parsed.problem.op);
    if (!parsed.dtype_given) parsed.problem.dtype = op.dtypes(backend.facts().kind).front();
    const Problem problem =
        unrepeated(op, canonical(op, std::move(parsed.problem), backend.facts().kind));
    if (!problem.has("link", "peers") || parsed.any_tokens)
      return fail(FFTUNE_INVALID_INPUT,
                  "{}: {} is no problem of a group: give link=peers and all sizes", function,
                  problem.text());
    if (problem.size("ranks") != group->group->ranks())
      return fail(FFTUNE_INVALID_INPUT,
                  "{}: {} has ranks={}, and the group has {}: give the problem of this group",
                  function, problem.text(), problem.size("ranks"), group->group->ranks());
    if (own.budget_milliseconds < 0)
      return fail(FFTUNE_INVALID_INPUT, "{}: the budget is {} ms: give 0 or more", function,
                  own.budget_milliseconds);
    if (own.preset_path && !*own.preset_path)
      return fail(FFTUNE_INVALID_INPUT, "{}: preset_path is empty: give a folder, or NULL",
                  function);
    auto start = choose(library.catalog, op, problem, backend.facts(), library.presets).recipe;
    std::vector<Recipe> present;
    if (auto found_before = library.recipe_of_ranks(problem))
      present.push_back(std::move(*found_before));
    const auto found =
        search_on_ranks(backend, *group->group, library.catalog, op, problem, std::move(start),
                        {.budget = std::chrono::milliseconds(own.budget_milliseconds),
                         .presets = own.preset_path ? own.preset_path : "",
                         .present = std::move(present)});
    const std::lock_guard lock(library.recipes_mutex);
    library.recipes_of_ranks[problem.text()] = found.recipe;
    return FFTUNE_OK;
  });
}

void fftune_group_destroy(fftune_group* group) {
  if (!group) return;
  ended(group, "fftune_group_destroy");
  delete group;
}
