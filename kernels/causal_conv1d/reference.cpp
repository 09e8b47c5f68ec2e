#include <algorithm>
#include <cstddef>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/causal_conv1d/causal_conv1d.hpp"

namespace fftune::causal_conv1d {
namespace {

Sequence sequence_in(const Layer& layer, const ReferenceTensors& tensors, std::int64_t i) {
  return sequence_of(layer, i, [&](Count count, std::int64_t at) {
    const auto& values = tensors.at(count_names[static_cast<std::size_t>(count)]);
    return static_cast<std::int64_t>(values[static_cast<std::size_t>(at)]);
  });
}

const std::vector<double>* states_in(const Layer& layer, const ReferenceTensors& tensors) {
  if (layer.state == State::none) return nullptr;
  return &tensors.at(layer.state == State::update ? "state" : "initial");
}

std::size_t place_in(const Layer& layer, const Sequence& sequence, std::int64_t entry,
                     std::int64_t channel) {
  return static_cast<std::size_t>(sequence.slot * layer.state_row + entry * layer.entry_step() +
                                  channel * layer.channel_step());
}

/// Where x has a channel of a token.
std::int64_t x_column(const Layer& layer, std::int64_t channel) {
  if (layer.x_groups == 0) return channel;
  const std::int64_t keys = layer.x_groups * layer.x_keys;
  const bool is_value = channel >= 2 * keys;
  const std::int64_t own = is_value ? channel - 2 * keys : channel % keys;
  const std::int64_t of_group = is_value ? layer.group_values() : layer.x_keys;
  const std::int64_t part = is_value ? 2 : channel / keys;
  return own / of_group * layer.x_block() + part * layer.x_keys + own % of_group;
}

/// One channel of a sequence: all inputs that its outputs depend on, the width - 1 of the history
/// first.
std::vector<double> inputs_of(const Layer& layer, const ReferenceTensors& tensors,
                              const Sequence& sequence, std::int64_t channel) {
  const std::int64_t before = layer.width - 1;
  std::vector<double> inputs(static_cast<std::size_t>(before + sequence.end - sequence.begin));
  const auto* const states = states_in(layer, tensors);
  if (states && sequence.has_state)
    for (std::int64_t i = 0; i < before; ++i)
      inputs[static_cast<std::size_t>(i)] =
          (*states)[place_in(layer, sequence, sequence.first_entry + i, channel)];
  const auto& x = tensors.at("x");
  const std::int64_t column = x_column(layer, channel);
  for (std::int64_t t = sequence.begin; t < sequence.end; ++t) {
    double& input = inputs[static_cast<std::size_t>(before + t - sequence.begin)];
    input = x[static_cast<std::size_t>(t * layer.x_row + column)];
    if (layer.gates)
      input *= x[static_cast<std::size_t>(t * layer.x_row + 2 * layer.channels + channel)];
  }
  return inputs;
}

/// The sum of the taps at a token, before the activation.
double sum_at(const Layer& layer, const ReferenceTensors& tensors,
              const std::vector<double>& inputs, std::int64_t token, std::int64_t channel) {
  double sum = layer.bias ? tensors.at("bias")[static_cast<std::size_t>(channel)] : 0;
  for (std::int64_t j = 0; j < layer.width; ++j)
    sum += tensors.at("w")[static_cast<std::size_t>(channel * layer.width + j)] *
           inputs[static_cast<std::size_t>(token + j)];
  return sum;
}

/// The new state of one channel, the old one before it: of each entry, or nothing where it stays.
void renew(const Layer& layer, const Sequence& sequence, std::int64_t channel,
           const std::vector<double>& inputs, const std::vector<double>& from,
           std::vector<double>& to) {
  const std::int64_t n = sequence.end - sequence.begin;
  std::vector<double> old(static_cast<std::size_t>(layer.entries));
  for (std::int64_t e = 0; e < layer.entries; ++e)
    if (sequence.has_state || n == 0)
      old[static_cast<std::size_t>(e)] = from[place_in(layer, sequence, e, channel)];
  for (std::int64_t e = 0; e < layer.entries; ++e) {
    double value = 0;
    if (layer.accepted && n > 0) {
      if (e + 1 >= static_cast<std::int64_t>(inputs.size())) continue;
      value = inputs[static_cast<std::size_t>(e + 1)];
    } else {
      const std::int64_t place = e + n;  // among the old entries and the tokens behind them
      value = place < layer.entries
                  ? old[static_cast<std::size_t>(place)]
                  : inputs[static_cast<std::size_t>(layer.width - 1 + place - layer.entries)];
    }
    to[place_in(layer, sequence, e, channel)] = value;
  }
}

void forward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  auto y =
      large_vector<double>(static_cast<std::size_t>(layer.tokens() * layer.channels), parallel);
  std::vector<double> states;
  if (layer.state == State::update) states = tensors.at("state");
  if (layer.state == State::pass) states.resize(tensors.at("initial").size());
  parallel.run(static_cast<int>(layer.channels), parallel.max_threads(), [&](int channel) {
    for (std::int64_t i = 0; i < layer.b; ++i) {
      const Sequence sequence = sequence_in(layer, tensors, i);
      if (sequence.slot < 0) continue;
      const auto inputs = inputs_of(layer, tensors, sequence, channel);
      for (std::int64_t t = sequence.begin; t < sequence.end; ++t) {
        double& result = y[static_cast<std::size_t>(t * layer.channels + channel)];
        result = activate(layer.act, sum_at(layer, tensors, inputs, t - sequence.begin, channel));
        if (layer.gates)
          result *=
              tensors.at("x")[static_cast<std::size_t>(t * layer.x_row + layer.channels + channel)];
      }
      if (layer.state != State::none)
        renew(layer, sequence, channel, inputs, *states_in(layer, tensors), states);
    }
  });
  tensors["y"] = std::move(y);
  if (layer.state != State::none)
    tensors[layer.state == State::update ? "state" : "final"] = std::move(states);
}

void backward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  const std::int64_t before = layer.width - 1;
  auto dx =
      large_vector<double>(static_cast<std::size_t>(layer.tokens() * layer.channels), parallel);
  std::vector<double> dw(static_cast<std::size_t>(layer.channels * layer.width));
  std::vector<double> dbias(static_cast<std::size_t>(layer.channels));
  const bool passes = layer.state == State::pass;
  std::vector<double> d_initial(passes ? tensors.at("initial").size() : 0);
  parallel.run(static_cast<int>(layer.channels), parallel.max_threads(), [&](int channel) {
    const auto own = static_cast<std::size_t>(channel);
    for (std::int64_t i = 0; i < layer.b; ++i) {
      const Sequence sequence = sequence_in(layer, tensors, i);
      const std::int64_t n = sequence.end - sequence.begin;
      const auto inputs = inputs_of(layer, tensors, sequence, channel);
      std::vector<double> gradients(static_cast<std::size_t>(n));
      for (std::int64_t t = 0; t < n; ++t) {
        const double gradient = activation_gradient(
            layer.act, sum_at(layer, tensors, inputs, t, channel),
            tensors.at(
                "dy")[static_cast<std::size_t>((sequence.begin + t) * layer.channels) + own]);
        gradients[static_cast<std::size_t>(t)] = gradient;
        dbias[own] += gradient;
        for (std::int64_t j = 0; j < layer.width; ++j)
          dw[own * static_cast<std::size_t>(layer.width) + static_cast<std::size_t>(j)] +=
              gradient * inputs[static_cast<std::size_t>(t + j)];
      }
      // Every tap counts: beyond the sequence's tokens the gradient is 0.
      std::vector<double> d_inputs(inputs.size());
      for (std::int64_t place = 0; place < before + n; ++place)
        for (std::int64_t j = 0; j < layer.width; ++j) {
          const std::int64_t t = place - j;
          const double gradient = t >= 0 && t < n ? gradients[static_cast<std::size_t>(t)] : 0.0;
          d_inputs[static_cast<std::size_t>(place)] +=
              gradient *
              tensors.at(
                  "w")[own * static_cast<std::size_t>(layer.width) + static_cast<std::size_t>(j)];
        }
      // Of the old entries and the tokens behind them.
      const std::int64_t older = layer.entries - before;
      for (std::int64_t place = passes ? 0 : layer.entries; place < layer.entries + n; ++place) {
        double value = place < older ? 0 : d_inputs[static_cast<std::size_t>(place - older)];
        if (passes && place >= n)
          value += tensors.at("d_final")[place_in(layer, sequence, place - n, channel)];
        if (place < layer.entries)
          d_initial[place_in(layer, sequence, place, channel)] = value;
        else
          dx[static_cast<std::size_t>((sequence.begin + place - layer.entries) * layer.channels) +
             own] = value;
      }
    }
  });
  tensors["dx"] = std::move(dx);
  tensors["dw"] = std::move(dw);
  tensors["dbias"] = std::move(dbias);
  if (passes) tensors["d_initial"] = std::move(d_initial);
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  if (layer.backward)
    backward(layer, tensors, parallel);
  else
    forward(layer, tensors, parallel);
}

}  // namespace fftune::causal_conv1d
