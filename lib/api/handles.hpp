// What the C API's opaque handles point to.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/fork_count.hpp"
#include "device/backend.hpp"
#include "registry/catalog.hpp"
#include "runtime/plan.hpp"
#include "store/preset_library.hpp"

namespace fftune {

/// A device with its presets; shared by the context and its plans, so that either may go first.
struct Library {
  const Catalog* catalog;
  std::unique_ptr<Backend> backend;
  PresetLibrary presets;
  int forks = fork_count();  // when it was opened

  /// A CUDA context is of no use in a forked child; the CPU's threads are made anew there.
  bool lost_by_fork() const {
    return fork_count() != forks && backend->facts().kind == DeviceKind::cuda;
  }
};

}  // namespace fftune

struct fftune_context {
  std::shared_ptr<fftune::Library> library;
};

struct fftune_plan {
  std::shared_ptr<const fftune::Library> library;
  fftune::Plan plan;
  std::vector<std::size_t> alignments;  // of the buffers, in order
  std::string buffer_names;             // "x, w, y"
  std::string description;
};
