// The types behind the C API's opaque handles.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/fork.hpp"
#include "device/backend.hpp"
#include "registry/catalog.hpp"
#include "runtime/group.hpp"
#include "runtime/plan.hpp"
#include "runtime/token_plan.hpp"
#include "saved/model.hpp"
#include "store/preset_library.hpp"

namespace fftune {

/// A device with its presets; shared by the context and its plans, so that either may go first.
struct Library {
  std::unique_ptr<const SourceSet> device_sources;  // null: the catalog has those built in
  Catalog catalog;
  std::unique_ptr<Backend> backend;
  PresetLibrary presets;
  std::vector<std::string> preset_complaints;  // of its files, and of folders that are not there
  int forks = fork_count();                    // when it was opened
  /// Recipes that searches on a group's ranks found, by the text of the problem.
  mutable std::mutex recipes_mutex;
  mutable std::map<std::string, Recipe> recipes_of_ranks;
  std::optional<Recipe> recipe_of_ranks(const Problem& problem) const {
    const std::lock_guard lock(recipes_mutex);
    const auto found = recipes_of_ranks.find(problem.text());
    return found == recipes_of_ranks.end() ? std::nullopt : std::optional(found->second);
  }
  std::atomic<std::uint64_t> plans{0};
  std::atomic<std::uint64_t> plan_nanoseconds{0};

  /// A CUDA context is of no use in a forked child; the CPU's threads are made anew there.
  bool lost_by_fork() const {
    return fork_count() != forks && backend->facts().kind == DeviceKind::cuda;
  }
};

/// Bytes of a buffer from its first element to the end of its last one, with some tokens.
struct BufferExtent {
  std::size_t one_token = 0, more_token = 0;
  std::size_t of(std::int64_t tokens) const {
    return one_token + static_cast<std::size_t>(tokens - 1) * more_token;
  }
};

}  // namespace fftune

struct fftune_context {
  std::shared_ptr<fftune::Library> library;
};

struct fftune_plan {
  std::shared_ptr<const fftune::Library> library;
  // One of the two.
  std::unique_ptr<const fftune::Plan> plan;
  std::unique_ptr<const fftune::TokenPlan> token_plan;
  // Facts about the buffers, in order.
  std::vector<std::size_t> alignments;
  std::vector<std::size_t> places_of_inputs;   // those that are only read
  std::vector<std::size_t> places_of_outputs;  // updated, then outputs
  std::string buffer_names;                    // "x, w, y"
  // Facts that tell whether an output overlaps another buffer:
  std::vector<std::size_t> places_written_whole;  // those of role output
  std::vector<fftune::BufferExtent> extents;
  std::vector<std::size_t> aliases;  // the output that a buffer may be; buffer_count(): none
  std::string description;

  const std::vector<fftune::TensorSpec>& tensors() const {
    return plan ? plan->tensors() : token_plan->tensors();
  }
  std::size_t buffer_count() const {
    return plan ? plan->buffer_count() : token_plan->buffer_count();
  }
  std::size_t workspace_bytes() const {
    return plan ? plan->workspace_bytes() : token_plan->workspace_bytes();
  }
};

struct fftune_model {
  std::shared_ptr<const fftune::SavedModel> model;
  std::string description;
  mutable fftune::ForkMutex mutex;
  mutable std::set<std::string> texts;  // that callers were given
};

struct fftune_group {
  std::shared_ptr<const fftune::Library> library;
  std::unique_ptr<const fftune::Group> group;
};

namespace fftune {

// Which handles of the C API are live, in builds with assertions: what is called with one that was
// destroyed is named there.

#ifdef NDEBUG
inline void began(const void*) {}
inline void used(const void*, const char*) {}
inline void ended(const void*, const char*) {}
#else
/// A handle was created.
void began(const void* handle);
/// `function` was called with it. Ends the process by a failed assertion if it is not live.
void used(const void* handle, const char* function);
/// It is destroyed by `function`. Ends the process by a failed assertion if it is not live.
void ended(const void* handle, const char* function);
#endif

/// Destroys a handle by the function of that name; null is none.
template <class Handle>
void destroy(Handle* handle, const char* function) {
  if (!handle) return;
  ended(handle, function);
  const UntornByFork whole;
  delete handle;
}

}  // namespace fftune
