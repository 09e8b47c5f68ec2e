// fftune in C++: the C API with owners and exceptions. Header-only, C++17. The rules of fftune.h on
// threads, alignment and buffers apply here too; fftune/ops.h lists the buffers of every op.
//
//   fftune::library::Context context(0);
//   auto plan = context.plan(R"({"op":"ffn","dtype":"bf16","m":4096,"d":1024,"h":2048})");
//   plan.run({x, w_gate, w_up, w_down, y}, workspace, stream);
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "fftune/fftune.h"

namespace fftune::library {

/// A call failed; what() is fftune_last_error().
class Exception : public std::runtime_error {
 public:
  explicit Exception(fftune_status status)
      : std::runtime_error(fftune_last_error()), status_(status) {}
  fftune_status status() const { return status_; }

 private:
  fftune_status status_;
};

inline void check(fftune_status status) {
  if (status != FFTUNE_OK) throw Exception(status);
}

/// A problem on a device, ready to run. It may outlive its context.
class Plan {
 public:
  explicit Plan(fftune_plan* owned) : plan_(owned, &fftune_plan_destroy) {}

  /// Buffers as fftune_plan_run takes them: inputs, then outputs.
  void run(std::initializer_list<void*> buffers, void* workspace, void* stream = nullptr) const {
    run(buffers.begin(), buffers.size(), workspace, stream);
  }
  void run(void* const* buffers, std::size_t count, void* workspace, void* stream = nullptr) const {
    check(fftune_plan_run(plan_.get(), buffers, count, workspace, stream));
  }

  /// The arguments of a launch besides its buffers.
  struct How {
    void* workspace = nullptr;  // of workspace_bytes(), aligned to 256 bytes
    void* stream = nullptr;     // CUstream or cudaStream_t; the CPU ignores it
    std::int64_t tokens = 0;    // for a plan for any number of tokens
  };
  /// Buffers as fftune_plan_launch takes them: read-only ones first, then written ones.
  void launch(std::initializer_list<const void*> inputs, std::initializer_list<void*> outputs,
              const How& how) const {
    launch(inputs.begin(), inputs.size(), outputs.begin(), outputs.size(), how);
  }
  void launch(const void* const* inputs, std::size_t input_count, void* const* outputs,
              std::size_t output_count, const How& how) const {
    const fftune_run run{sizeof(fftune_run), inputs,        input_count, outputs,
                         output_count,       how.workspace, how.stream,  how.tokens};
    check(fftune_plan_launch(plan_.get(), &run));
  }
  /// Lays out a number of tokens before it is first run.
  void prepare(std::int64_t tokens) const { check(fftune_plan_prepare(plan_.get(), tokens)); }
  /// The most tokens of a plan for any number of them; 0 for another plan.
  std::int64_t max_tokens() const { return fftune_plan_max_tokens(plan_.get()); }

  std::size_t buffer_count() const { return fftune_plan_buffer_count(plan_.get()); }
  std::size_t buffer_bytes(std::size_t index) const {
    return fftune_plan_buffer_bytes(plan_.get(), index);
  }
  std::size_t workspace_bytes() const { return fftune_plan_workspace_bytes(plan_.get()); }
  /// JSON; lives as long as the plan.
  std::string_view describe() const { return fftune_plan_describe(plan_.get()); }
  const fftune_plan* get() const { return plan_.get(); }

 private:
  std::unique_ptr<fftune_plan, decltype(&fftune_plan_destroy)> plan_;
};

/// One rank of a group, as fftune_group_create makes it.
class Group {
 public:
  explicit Group(fftune_group* owned) : group_(owned, &fftune_group_destroy) {}

  /// The buffer "group" of collectives.
  void* memory() const { return fftune_group_memory(group_.get()); }
  int rank() const { return place().first; }
  int ranks() const { return place().second; }
  /// Throws Exception if a rank died or a collective failed.
  void check() const { library::check(fftune_group_check(group_.get())); }
  /// Searches a problem with link=peers on all ranks; with a folder rank 0 writes a record there.
  void tune(const std::string& problem_json, std::int64_t budget_milliseconds,
            const char* preset_path = nullptr) const {
    const fftune_group_tune_options options{sizeof options, budget_milliseconds, preset_path};
    library::check(fftune_group_tune_with(group_.get(), problem_json.c_str(), &options));
  }

 private:
  std::pair<int, int> place() const {
    std::pair<int, int> place;
    library::check(fftune_group_place(group_.get(), &place.first, &place.second));
    return place;
  }

  std::unique_ptr<fftune_group, decltype(&fftune_group_destroy)> group_;
};

/// A device with its presets.
class Context {
 public:
  /// A CUDA ordinal, or -1 for the CPU; presets as fftune_context_create finds them.
  explicit Context(int device, const char* preset_path = nullptr)
      : context_(create(device, preset_path), &fftune_context_destroy) {}

  /// Options as fftune_context_create_with takes them; struct_size is filled in.
  Context(int device, fftune_context_options options)
      : context_(create(device, options), &fftune_context_destroy) {}

  /// Where the kernels of this context's plans came from, and the time spent.
  fftune_counters counters() const {
    fftune_counters counters{};
    counters.struct_size = sizeof counters;
    check(fftune_context_counters(context_.get(), &counters));
    return counters;
  }

  /// Compiles the kernels of a problem, as fftune_plan_create does.
  Plan plan(const std::string& problem_json) const {
    fftune_plan* plan = nullptr;
    check(fftune_plan_create(context_.get(), problem_json.c_str(), &plan));
    return Plan(plan);
  }

  /// Waits for the other ranks; struct_size is filled in.
  Group group(fftune_group_options options) const {
    options.struct_size = sizeof options;
    fftune_group* group = nullptr;
    check(fftune_group_create(context_.get(), &options, &group));
    return Group(group);
  }
  const fftune_context* get() const { return context_.get(); }

 private:
  static fftune_context* create(int device, const char* preset_path) {
    fftune_context* context = nullptr;
    check(fftune_context_create(device, preset_path, &context));
    return context;
  }

  static fftune_context* create(int device, fftune_context_options options) {
    options.struct_size = sizeof options;
    fftune_context* context = nullptr;
    check(fftune_context_create_with(device, &options, &context));
    return context;
  }

  std::unique_ptr<fftune_context, decltype(&fftune_context_destroy)> context_;
};

/// A saved model, as fftune_model_open opens it.
class SavedModel {
 public:
  explicit SavedModel(const std::string& path) : model_(open(path), &fftune_model_close) {}

  /// JSON; lives as long as the model.
  std::string_view describe() const { return fftune_model_describe(model_.get()); }
  void read(const char* tensor, const char* dtype, std::size_t first, std::size_t count,
            void* out) const {
    check(fftune_model_read(model_.get(), tensor, dtype, first, count, out));
  }
  void embed(const std::int32_t* ids, std::size_t count, std::int64_t position, const char* dtype,
             void* out, std::size_t bytes) const {
    check(fftune_model_embed(model_.get(), ids, count, position, dtype, out, bytes));
  }

  /// A problem, completed by what the model says of a layer.
  std::string problem(const Context& context, const std::string& problem_json,
                      std::int64_t layer = 0, const char* map = nullptr) const {
    const char* text = nullptr;
    check(
        fftune_model_problem(model_.get(), context.get(), layer, map, problem_json.c_str(), &text));
    return text;
  }
  /// The saved tensors of a plan's buffer and its form; empty where the model does not have it.
  std::string source(const Plan& plan, std::size_t index, std::int64_t layer = 0,
                     const char* map = nullptr) const {
    const char* text = nullptr;
    check(fftune_model_source(model_.get(), layer, map, plan.get(), index, &text));
    return text ? text : "";
  }
  /// Writes the buffer to host memory of plan.buffer_bytes(index).
  void input(const Plan& plan, std::size_t index, void* out, std::int64_t layer = 0,
             const char* map = nullptr) const {
    check(fftune_model_input(model_.get(), layer, map, plan.get(), index, out,
                             plan.buffer_bytes(index)));
  }

 private:
  static fftune_model* open(const std::string& path) {
    fftune_model* model = nullptr;
    check(fftune_model_open(path.c_str(), &model));
    return model;
  }

  std::unique_ptr<fftune_model, decltype(&fftune_model_close)> model_;
};

}  // namespace fftune::library
