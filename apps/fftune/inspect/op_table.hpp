// The tensors and options of every op as data, from which the Python package derives its ops.
#pragma once

#include <string>

#include "registry/catalog.hpp"

namespace fftune::tool {

/// A JSON document. Each op that is not made of others has its fields, and for each pass every
/// buffer that a problem may have, in the order of the buffers. A buffer is [name, role, dtype,
/// extents, condition]: dtype and extents as in fftune/ops.h, and the condition names the values
/// that options, "dtype" and rare sizes ("given" or "") have where the buffer is. A buffer whose
/// dtype or extents depend on an option is there once for each.
std::string op_table(const Catalog& catalog);

}  // namespace fftune::tool
