// fftune/ops.h: the problems and buffers of every op, as the registry has them.
#pragma once

#include <string>

#include "registry/catalog.hpp"

namespace fftune::tool {

/// The whole header, which is one comment after another.
std::string ops_header(const Catalog& catalog);

}  // namespace fftune::tool
