// One token of a language model for each of some sequences: ids in, ids out.
//
//   x           = scale · embedding[ids]
//   last_hidden = layers(x): layer/layer.hpp, with one new token of each sequence
//   chosen      = head(last_hidden): head/head.hpp, the best ids or samples
//   and the sequences advance: their ids, lengths and steps, in place. So n tokens are n runs of
//   one plan, or n launches of one CUDA graph, with no work of the host in between.
//
// The state of sequence i. All of it is int32, and updated by every run:
//
//   ids       the last id, whose key and value are not in the cache yet; then the next id
//   lengths   keys in the cache
//   steps     ids that were chosen so far: the step of a draw
//   ended     0: it goes on; 1: it ended with a stop id; 2: it has as many ids as it may have
//   out       [batch, room]: the id that is chosen in step t goes to column t, if there is one
//
// The host may look at the state, and change it, between two runs. For a sequence that has ended, a
// run writes nothing but its row of `ids`, which becomes `pad`. A sequence ends with an id of
// `stop`. It also ends when it has limits[i] ids, which are its keys and the last id; and with a
// full cache.
//
// It is made of the ops layer and head, and of stages of its own: `embed` in front, which also
// finds positions, slots and lengths for the layers, `states`, which finds the states of sequences
// for layers that have such, and `advance` behind. With the size `layers` the stages of a layer are
// repeated, and weights are called as in the op layer, "layers.3.w_q". Layers may be of several
// kinds (decode/kinds.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "core/problem.hpp"
#include "device/program.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in decode/op.cpp; listed in kernels/catalog.cpp.
const Op& decode_op();

namespace decoding {

constexpr const char *stage_embed = "embed", *stage_states = "states", *stage_advance = "advance";

/// A problem's numbers, as the stages embed and advance take them.
struct Sequences {
  DType dtype = DType::f32;
  std::int64_t batch = 0, d = 0, vocab = 0;
  std::int64_t cache = 0;  // keys that a sequence has room for; without caches its most tokens
  std::int64_t rows = 0;   // of a layer's cache; the slot of a token that has none
  std::int64_t page = 0;   // keys of a page; 0: contiguous
  std::int64_t table = 0;  // pages of a sequence
  std::int64_t stops = 0, room = 0;
  std::int32_t pad = 0;
  float scale = 1;
};
Sequences sequences_of(const Problem& problem);

/// The references of the own stages.
void define_embed(const Problem& problem, ReferenceTensors& tensors);
void define_states(const Problem& problem, ReferenceTensors& tensors);
void define_advance(const Problem& problem, ReferenceTensors& tensors);

/// The tensors that programs of the own stages have: those of one layer.
TensorPlaces places_of(const Problem& problem);

std::vector<const Family*> cuda_families();
/// The families that have all stages in one launch, one for each kind of feed-forward network.
std::vector<const Family*> persistent_tokens();
std::vector<const Family*> cpu_families();

/// Sizes and options of published models.
std::vector<KnownModel> known_models();

}  // namespace decoding
}  // namespace fftune
