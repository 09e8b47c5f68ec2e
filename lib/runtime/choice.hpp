// Choosing the recipe that serves a problem: a preset record by the lookup rules, or the default.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "store/preset_library.hpp"

namespace fftune {

struct Choice {
  Recipe recipe;
  std::optional<PresetMatch> preset;  // none: the op's default for this device
  bool stale = false;                 // the preset's kernel sources have changed since
  /// Where the preset's shape is far from the problem's, how: "m is 16 times the record's". Empty:
  /// near, or no preset.
  std::string far;
  std::string reason;  // which rule chose it and why, one line
};

/// The record that serves the problem, or the op's default. A record of the whole op comes before
/// those of its parts, which serve where none of the whole does. The default serves where there is
/// no record, and where a record of another device was made with other kernel sources. It also
/// serves where a record of another shape or device should be slower: by the cost model, or because
/// the default is one launch of the whole. `problem` must be canonical. Throws Error(unavailable)
/// only if no family at all can serve it.
Choice choose(const Catalog& catalog, const Op& op, const Problem& problem,
              const DeviceFacts& facts, const PresetLibrary& presets);

/// The variants that records of its parts name for the stages of an op made of ops, as variants of
/// the whole. A search may begin with them; some may be illegal there. Empty for other ops.
Recipe recorded_in_parts(const Catalog& catalog, const Op& op, const Problem& problem,
                         const DeviceFacts& facts, const PresetLibrary& presets);

/// A record of another shape was the fastest there, but its tiles may fit this shape badly. It
/// serves if the cost model predicts at most this many times the default's time. The record was
/// measured and the model is an estimate, but the farther away, the less the record says of this
/// shape. Both numbers were chosen from the times of the winners of one landscape in others.
double most_misfit(bool is_far);

/// The sizes by which a record is far from a problem, the token size by more than 4 times, another
/// by more than 2: "m is 16 times the record's, d is 1/4 of the record's". Empty: it is near.
std::string far_words(const Op& op, const Problem& problem, const Problem& record);

/// The sum of the families' own estimates of their variants, in seconds; none if one has no model.
std::optional<double> estimate_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                                  const Recipe& recipe);

/// Why the record's recipe cannot serve `problem` on the device, one line; empty if it can: its
/// families cover the op's stages in order, each exactly once, and every variant is legal.
std::string record_illegality(const Op& op, const Problem& problem, const DeviceFacts& facts,
                              const PresetRecord& record);

/// The families of the record whose device sources are not those that it was tuned with.
std::vector<std::string> stale_families(const Catalog& catalog, const Op& op,
                                        const PresetRecord& record);

}  // namespace fftune
