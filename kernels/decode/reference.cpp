// The own stages of decode in float64.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/decode/decode.hpp"

namespace fftune::decoding {
namespace {

/// Whether the step of a sequence counts.
bool goes_on(const Sequences& sequences, double ended, double length) {
  return ended == 0 && length < static_cast<double>(sequences.cache);
}

}  // namespace

void define_embed(const Problem& problem, ReferenceTensors& tensors) {
  const Sequences sequences = sequences_of(problem);
  const auto &ids = tensors.at("ids"), &lengths = tensors.at("lengths"),
             &ended = tensors.at("ended"), &embedding = tensors.at("embedding");
  const auto d = static_cast<std::size_t>(sequences.d);
  std::vector<double> x(ids.size() * d), positions, slots, keys;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < static_cast<double>(sequences.vocab))
      for (std::size_t k = 0; k < d; ++k)
        x[i * d + k] =
            embedding[static_cast<std::size_t>(ids[i]) * d + k] * double{sequences.scale};
    const bool alive = goes_on(sequences, ended[i], lengths[i]);
    const double count = alive ? std::max(lengths[i], 0.0) + 1
                               : std::clamp(lengths[i], 1.0, static_cast<double>(sequences.cache));
    keys.push_back(count);
    positions.push_back(count - 1);
    const auto key = static_cast<std::int64_t>(count) - 1;
    std::int64_t slot = static_cast<std::int64_t>(i) * sequences.cache + key;
    if (sequences.page > 0) {
      const auto place = static_cast<std::size_t>(static_cast<std::int64_t>(i) * sequences.table +
                                                  key / sequences.page);
      const auto page = static_cast<std::int64_t>(tensors.at("pages")[place]);
      slot = page < 0 || page >= sequences.rows / sequences.page
                 ? sequences.rows
                 : page * sequences.page + key % sequences.page;
    }
    slots.push_back(static_cast<double>(alive ? slot : sequences.rows));
  }
  tensors["x"] = std::move(x);
  const TensorPlaces at = places_of(problem);
  if (at.at("positions") != absent) tensors["positions"] = std::move(positions);
  if (at.at("slots") == absent) return;
  tensors["slots"] = std::move(slots);
  tensors["key_lengths"] = std::move(keys);
}

void define_states(const Problem& problem, ReferenceTensors& tensors) {
  const Sequences sequences = sequences_of(problem);
  const auto &lengths = tensors.at("lengths"), &ended = tensors.at("ended");
  std::vector<double> indices;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    indices.push_back(goes_on(sequences, ended[i], lengths[i]) ? static_cast<double>(i) : -1);
  tensors["state_indices"] = std::move(indices);
}

void define_advance(const Problem& problem, ReferenceTensors& tensors) {
  const Sequences sequences = sequences_of(problem);
  const auto &chosen = tensors.at("chosen"), &limits = tensors.at("limits");
  auto &ids = tensors.at("ids"), &lengths = tensors.at("lengths"), &steps = tensors.at("steps"),
       &ended = tensors.at("ended"), &out = tensors.at("out");
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!goes_on(sequences, ended[i], lengths[i])) {
      ids[i] = sequences.pad;
      if (ended[i] == 0) ended[i] = 2;
      continue;
    }
    ids[i] = chosen[i];
    if (steps[i] >= 0 && steps[i] < static_cast<double>(sequences.room))
      out[i * static_cast<std::size_t>(sequences.room) + static_cast<std::size_t>(steps[i])] =
          chosen[i];
    ++steps[i];
    lengths[i] = std::max(lengths[i], 0.0) + 1;
    // Its keys and the id that has none yet; a full cache has no room for that.
    const bool is_full = lengths[i] >= static_cast<double>(sequences.cache);
    ended[i] = is_full || lengths[i] + 1 >= limits[i] ? 2 : 0;
    if (sequences.stops == 0) continue;
    const auto& stop = tensors.at("stop");
    if (std::find(stop.begin(), stop.end(), chosen[i]) != stop.end()) ended[i] = 1;
  }
}

}  // namespace fftune::decoding
