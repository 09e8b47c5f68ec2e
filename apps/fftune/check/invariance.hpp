// fftune check --batch-invariance: that the bits of a row do not depend on the rows beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "device/backend.hpp"
#include "registry/catalog.hpp"
#include "store/preset_library.hpp"

namespace fftune::tool {

/// The problems that are checked, with batch-invariant=yes, each of one token: of every op that has
/// the option, in the forms and element types that kernels differ for.
std::vector<Problem> invariance_problems(const Catalog& catalog, DeviceKind kind);

/// The size of a problem that counts its rows: tokens; of attention sequences of one query, or the
/// queries of a packed sequence, which are its last ones.
std::string invariance_rows(const Op& op, const Problem& problem);

struct InvarianceResult {
  int recipes = 0;         // that the library chose for all numbers of tokens
  std::string difference;  // the first one, for people; empty: all bits are the same
};

/// Runs the recipes that the library chooses for `most` tokens, and for each of `counts`, which are
/// at most `most`, on some of the same rows. Compares each row with that of the first run.
/// `cancelled` may be empty. Throws like Plan.
InvarianceResult check_invariance(const Catalog& catalog, Backend& backend,
                                  const PresetLibrary& presets, const Problem& problem,
                                  std::int64_t most, std::span<const std::int64_t> counts,
                                  const std::function<bool()>& cancelled = {});

}  // namespace fftune::tool
