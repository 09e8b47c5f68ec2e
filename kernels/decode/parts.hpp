// The parts of a decode step: layers, the head, and the choice among ranks.
#pragma once

#include <utility>
#include <vector>

#include "core/problem.hpp"
#include "registry/op.hpp"

namespace fftune::decoding {

/// Options of the head that have another name here, because the layers have theirs.
constexpr std::pair<const char*, const char*> head_options[] = {
    {"choose", "choose"},      {"logprobs", "logprobs"}, {"softcap", "logit-softcap"},
    {"logits", "head-logits"}, {"bias", "head-bias"},    {"weights", "head-weights"},
    {"group", "head-group"},   {"zeros", "head-zeros"}};

/// Whether each rank of a group has a slice of the head's rows.
bool slices_head(const Problem& problem);

/// The layers, then the head, and the choice among ranks. There is one layer of each kind if there
/// are several kinds.
std::vector<OpPart> parts_of(const Problem& problem);
/// The layers of kind a.
OpPart layer_part(const Problem& problem);
OpPart head_part(const Problem& problem);

}  // namespace fftune::decoding
