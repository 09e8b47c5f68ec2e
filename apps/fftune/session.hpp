// What a command is given: the catalog, the environment, and where its words go.
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
