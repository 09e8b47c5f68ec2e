// The input of a command: the catalog, the environment, and its output.
#pragma once

#include "apps/fftune/output.hpp"
#include "registry/catalog.hpp"
#include "runtime/environment.hpp"

namespace fftune::tool {

struct Session {
  const Catalog& catalog;
  const Environment& environment;
  const Output& output;
};

}  // namespace fftune::tool
