// What the C API's opaque handles point to.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

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
