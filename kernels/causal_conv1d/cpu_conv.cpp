// Forward: blocks of tokens in vectors of channels, on all threads, and then the new states of all
// sequences. Backward: each task has some channels of all tokens, so that no sum is shared.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"

namespace fftune::causal_conv1d {
namespace {

constexpr std::size_t most_taps = most_width;

/// The tensors of a call.
class Call {
 public:
  Call(const Layer& layer, const TensorPlaces& at, const HostCall& call)
      : layer_(&layer), bytes_(static_cast<std::int64_t>(dtype_bytes(layer.dtype))) {
    for (std::size_t i = 0; i < counts_.size(); ++i)
      counts_[i] = address_of(call, at.at(count_names[i]));
  }

  std::int64_t count(Count which, std::int64_t i) const {
    const void* const values = counts_[static_cast<std::size_t>(which)];
    if (which == Count::has_state) return static_cast<const std::uint8_t*>(values)[i];
    return static_cast<const std::int32_t*>(values)[i];
  }
  Sequence sequence(std::int64_t i) const {
    return sequence_of(*layer_, i,
                       [this](Count which, std::int64_t at) { return count(which, at); });
  }
  /// The sequence of a token; b behind the last one.
  std::int64_t sequence_at(std::int64_t token) const {
    if (!layer_->packed) return token / layer_->s;
    const auto* const offsets =
        static_cast<const std::int32_t*>(counts_[static_cast<std::size_t>(Count::offsets)]);
    return std::upper_bound(offsets + 1, offsets + layer_->b + 1, token) - (offsets + 1);
  }
  std::byte* row(void* matrix, std::int64_t token, std::int64_t stride,
                 std::int64_t channel = 0) const {
    return static_cast<std::byte*>(matrix) + (token * stride + channel) * bytes_;
  }
  std::byte* state(void* states, const Sequence& sequence, std::int64_t entry,
                   std::int64_t channel = 0) const {
    return static_cast<std::byte*>(states) +
           (sequence.slot * layer_->state_row + entry * layer_->entry_step() +
            channel * layer_->channel_step()) *
               bytes_;
  }
  /// Copies channels between rows whose neighbours are `to_step` and `from_step` elements apart.
  void copy(std::byte* to, std::int64_t to_step, const std::byte* from, std::int64_t from_step,
            std::int64_t channels) const {
    const auto bytes = static_cast<std::size_t>(bytes_);
    if (to_step == 1 && from_step == 1) {
      std::memmove(to, from, static_cast<std::size_t>(channels) * bytes);
      return;
    }
    for (std::int64_t c = 0; c < channels; ++c)
      std::memcpy(to + c * to_step * bytes_, from + c * from_step * bytes_, bytes);
  }

 private:
  const Layer* layer_;
  std::int64_t bytes_;
  std::array<const void*, std::size(count_names)> counts_{};
};

/// w [channels, width] as taps [width, channels] in float, with the bias behind them, or zeros.
void decode_taps(const Layer& layer, const void* w, const void* bias, float* taps) {
  const auto channels = static_cast<std::size_t>(layer.channels),
             width = static_cast<std::size_t>(layer.width);
  const auto* const from = static_cast<const std::byte*>(w);
  std::array<float, most_taps> of_channel{};
  for (std::size_t c = 0; c < channels; ++c) {
    decode(layer.weight_dtype, from + c * width * dtype_bytes(layer.weight_dtype),
           std::span(of_channel.data(), width));
    for (std::size_t j = 0; j < width; ++j) taps[j * channels + c] = of_channel[j];
  }
  const std::span<float> added(taps + width * channels, channels);
  if (bias)
    decode(layer.weight_dtype, bias, added);
  else
    std::fill(added.begin(), added.end(), 0.0f);
}

std::size_t taps_bytes(const Layer& layer) {
  return static_cast<std::size_t>((layer.width + 1) * layer.channels) * sizeof(float);
}

/// The rows of a call's inputs as states hold them: those of x, or with gates their products.
struct Inputs {
  void* rows = nullptr;
  std::int64_t row = 0;  // elements from one to the next
};

/// The new state of a sequence. The entries are written from the oldest on, so that one in place is
/// read before it is overwritten.
void renew_state(const Layer& layer, const Call& tensors, const Sequence& sequence,
                 const Inputs& inputs, void* before, void* after) {
  const std::int64_t n = sequence.end - sequence.begin, step = layer.channel_step();
  if (sequence.slot < 0 || (n == 0 && before == after)) return;
  const std::vector<std::byte> zeros(static_cast<std::size_t>(layer.channels) * sizeof(float));
  // The place of an entry among the old ones and the tokens, which begin at `tokens_at`.
  const std::int64_t first = layer.accepted ? sequence.first_entry + 1 : n;
  const std::int64_t tokens_at =
      layer.accepted ? sequence.first_entry + layer.width - 1 : layer.entries;
  for (std::int64_t e = 0; e < layer.entries; ++e) {
    const std::int64_t token = first + e - tokens_at;
    if (token >= n) return;
    std::byte* const to = tensors.state(after, sequence, e);
    if (token >= 0)
      tensors.copy(to, step, tensors.row(inputs.rows, sequence.begin + token, inputs.row), 1,
                   layer.channels);
    else if (sequence.has_state)
      tensors.copy(to, step, tensors.state(before, sequence, first + e), step, layer.channels);
    else
      tensors.copy(to, step, zeros.data(), 1, layer.channels);
  }
}

RowWork work(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return {.rows = layer.tokens(),
          .row_bytes = layer.channels * static_cast<std::int64_t>(dtype_bytes(layer.dtype))};
}

/// Products of B and the values of each token in float, with gates, and what follows them.
class GatedInputs {
 public:
  GatedInputs(const Layer& layer, const Call& tensors, void* x, std::byte* products)
      : layer_(layer), tensors_(tensors), x_(x), products_(reinterpret_cast<float*>(products)) {}

  float* row(std::int64_t token) const { return products_ + token * layer_.channels; }
  /// Part 0, 1 or 2 of a token.
  void load(std::int64_t token, std::int64_t part, std::span<float> to) const {
    decode(layer_.dtype, tensors_.row(x_, token, layer_.x_row, part * layer_.channels), to);
  }
  void multiply(std::int64_t token, std::span<float> values) const {
    const std::span<float> own(row(token), values.size());
    load(token, 0, own);
    load(token, 2, values);
    for (std::size_t c = 0; c < own.size(); ++c) own[c] *= values[c];
  }

 private:
  const Layer& layer_;
  const Call& tensors_;
  void* x_;
  float* products_;
};

/// y of the tokens, with gates: sums and products in float, which are rounded once.
void convolve_gated(const Layer& layer, const RowTasks& tasks, const RowKernels& kernels,
                    const Call& tensors, const HostCall& call, const GatedInputs& inputs,
                    const float* taps, float* histories, void* states, void* y) {
  const std::int64_t before = layer.width - 1;
  const auto channels = static_cast<std::size_t>(layer.channels),
             width = static_cast<std::size_t>(layer.width);
  const auto history = [&](std::int64_t i, std::int64_t place) {
    return histories + (i * before + place) * layer.channels;
  };
  call.parallel.run(static_cast<int>(layer.b), tasks.threads, [&](int i) {
    const Sequence sequence = tensors.sequence(i);
    std::vector<std::byte> entry(channels * dtype_bytes(layer.dtype));
    for (std::int64_t place = 0; place < before; ++place) {
      const std::span<float> to(history(i, place), channels);
      std::fill(to.begin(), to.end(), 0.0f);
      if (sequence.slot < 0 || !sequence.has_state) continue;
      tensors.copy(entry.data(), 1, tensors.state(states, sequence, sequence.first_entry + place),
                   layer.channel_step(), layer.channels);
      decode(layer.dtype, entry.data(), to);
    }
  });
  tasks.run(call.parallel, kernels.fence,
            [&, own = std::vector<float>(channels)](std::int64_t token) mutable {
              inputs.multiply(token, own);
            });
  tasks.run(call.parallel, kernels.fence,
            [&, sum = std::vector<float>(channels),
             factor = std::vector<float>(channels)](std::int64_t token) mutable {
              const std::int64_t i = tensors.sequence_at(token);
              std::byte* const out = tensors.row(y, token, layer.channels);
              const Sequence sequence = i < layer.b ? tensors.sequence(i) : Sequence{};
              if (sequence.slot < 0 || token < sequence.begin || token >= sequence.end) {
                std::fill_n(out, channels * dtype_bytes(layer.dtype), std::byte{0});
                return;
              }
              std::array<const void*, most_taps> rows{};
              for (std::int64_t j = 0; j < layer.width; ++j) {
                const std::int64_t own = token - before + j;
                rows[static_cast<std::size_t>(j)] = own >= sequence.begin
                                                        ? inputs.row(own)
                                                        : history(i, own - sequence.begin + before);
              }
              kernels.convolve(layer.act, rows.data(), taps, channels, width,
                               layer.bias ? taps + width * channels : nullptr, sum.data(), channels,
                               false);
              inputs.load(token, 1, factor);
              for (std::size_t c = 0; c < channels; ++c) sum[c] *= factor[c];
              encode(layer.dtype, std::span<const float>(sum), out);
            });
}

Program gated_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const RowTasks tasks(work(problem), config);
  const RowKernels& kernels = row_kernels(facts.arch, DType::f32);
  const TensorPlaces at(tensors_of(layer));
  const auto floats = [&](std::int64_t rows) {
    return Scratch{static_cast<std::size_t>(rows * layer.channels) * sizeof(float), false};
  };
  return host_program(
      at.count(),
      {{taps_bytes(layer), false},
       floats(layer.tokens()),
       floats(layer.b * (layer.width - 1)),
       {static_cast<std::size_t>(layer.tokens() * work(problem).row_bytes), false}},
      [=, &kernels](const HostCall& call) {
        const auto tensor = [&](const char* name) { return address_of(call, at.at(name)); };
        const Call tensors(layer, at, call);
        auto* const taps = reinterpret_cast<float*>(call.scratch[0]);
        decode_taps(layer, tensor("w"), tensor("bias"), taps);
        const GatedInputs inputs(layer, tensors, tensor("x"), call.scratch[1]);
        const bool updates = layer.state == State::update;
        void* const old_states = tensor(updates ? "state" : "initial");
        convolve_gated(layer, tasks, kernels, tensors, call, inputs, taps,
                       reinterpret_cast<float*>(call.scratch[2]), old_states, tensor("y"));
        if (layer.state == State::none) return;
        std::byte* const rounded = call.scratch[3];
        tasks.run(call.parallel, kernels.fence, [&](std::int64_t token) {
          encode(
              layer.dtype,
              std::span<const float>(inputs.row(token), static_cast<std::size_t>(layer.channels)),
              tensors.row(rounded, token, layer.channels));
        });
        call.parallel.run(static_cast<int>(layer.b), tasks.threads, [&](int i) {
          renew_state(layer, tensors, tensors.sequence(i), {rounded, layer.channels}, old_states,
                      tensor(updates ? "state" : "final"));
        });
      });
}

Program forward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  if (layer.gates) return gated_program(problem, facts, config);
  const RowTasks tasks(work(problem), config);
  const RowKernels& kernels = row_kernels(facts.arch, layer.dtype);
  const TensorPlaces at(tensors_of(layer));
  const auto row_bytes = static_cast<std::size_t>(work(problem).row_bytes);
  const std::int64_t before = layer.width - 1;
  // Histories of states whose channels are apart, as rows; and rows of x in the channels' order.
  const bool gathers = layer.state != State::none && layer.channels_first;
  const bool is_grouped = layer.x_groups > 0;
  return host_program(
      at.count(),
      {{taps_bytes(layer), false},
       {row_bytes, false},
       {gathers ? static_cast<std::size_t>(layer.b * before) * row_bytes : 0, false},
       {is_grouped ? static_cast<std::size_t>(layer.tokens()) * row_bytes : 0, false}},
      [=, &kernels](const HostCall& call) {
        const auto tensor = [&](const char* name) { return address_of(call, at.at(name)); };
        const Call tensors(layer, at, call);
        auto* const taps = reinterpret_cast<float*>(call.scratch[0]);
        decode_taps(layer, tensor("w"), tensor("bias"), taps);
        std::byte* const zeros = call.scratch[1];
        std::fill_n(zeros, row_bytes, std::byte{0});
        void* const y = tensor("y");
        Inputs inputs{tensor("x"), layer.x_row};
        if (is_grouped) {
          void* const x = inputs.rows;
          inputs = {call.scratch[3], layer.channels};
          tasks.run(call.parallel, kernels.fence, [&](std::int64_t token) {
            layer.for_each_run([&](std::int64_t channel, std::int64_t column, std::int64_t count) {
              tensors.copy(tensors.row(inputs.rows, token, inputs.row, channel), 1,
                           tensors.row(x, token, layer.x_row, column), 1, count);
            });
          });
        }
        const bool updates = layer.state == State::update;
        void* const old_states = tensor(updates ? "state" : "initial");
        void* const new_states = tensor(updates ? "state" : "final");
        const auto gathered = [&](std::int64_t i, std::int64_t place) {
          return call.scratch[2] + static_cast<std::size_t>(i * before + place) * row_bytes;
        };
        if (gathers)
          call.parallel.run(static_cast<int>(layer.b), tasks.threads, [&](int i) {
            const Sequence sequence = tensors.sequence(i);
            for (std::int64_t place = 0; sequence.slot >= 0 && place < before; ++place)
              tensors.copy(gathered(i, place), 1,
                           tensors.state(old_states, sequence, sequence.first_entry + place),
                           layer.channel_step(), layer.channels);
          });
        tasks.run(call.parallel, kernels.fence, [&](std::int64_t token) {
          const std::int64_t i = tensors.sequence_at(token);
          std::byte* const out = tensors.row(y, token, layer.channels);
          const Sequence sequence = i < layer.b ? tensors.sequence(i) : Sequence{};
          if (sequence.slot < 0 || token < sequence.begin || token >= sequence.end) {
            std::fill_n(out, row_bytes, std::byte{0});
            return;
          }
          std::array<const void*, most_taps> rows{};
          for (std::int64_t j = 0; j < layer.width; ++j) {
            const std::int64_t own = token - before + j, place = own - sequence.begin + before;
            const std::byte* row = zeros;
            if (own >= sequence.begin)
              row = tensors.row(inputs.rows, own, inputs.row);
            else if (sequence.has_state)
              row = gathers ? gathered(i, place)
                            : tensors.state(old_states, sequence, sequence.first_entry + place);
            rows[static_cast<std::size_t>(j)] = row;
          }
          const auto channels = static_cast<std::size_t>(layer.channels),
                     width = static_cast<std::size_t>(layer.width);
          kernels.convolve(layer.act, rows.data(), taps, channels, width,
                           layer.bias ? taps + width * channels : nullptr, out, channels,
                           tasks.nontemporal);
        });
        if (layer.state == State::none) return;
        call.parallel.run(static_cast<int>(layer.b), tasks.threads, [&](int i) {
          renew_state(layer, tensors, tensors.sequence(i), inputs, old_states, new_states);
        });
      });
}

// --- The backward pass ---

/// One task of the backward pass: some neighbouring channels of all sequences.
class Channels {
 public:
  Channels(const Layer& layer, const RowKernels& kernels, const Call& tensors, std::int64_t first,
           std::int64_t count)
      : layer_(layer),
        kernels_(kernels),
        tensors_(tensors),
        first_(first),
        count_(count),
        ring_(static_cast<std::size_t>(layer.width * count)),
        zeros_(static_cast<std::size_t>(count)),
        history_(static_cast<std::size_t>((layer.width - 1) * count) * sizeof(float)),
        of_states_(static_cast<std::size_t>(2 * count) * sizeof(float)) {}

  void *dy = nullptr, *x = nullptr, *dx = nullptr;
  void *initial = nullptr, *d_final = nullptr, *d_initial = nullptr;
  const float* taps = nullptr;  // [width + 1, channels], with the bias
  float* d_taps = nullptr;      // the same of the gradients

  void differentiate(const Sequence& sequence) {
    const std::int64_t before = layer_.width - 1, n = sequence.end - sequence.begin;
    const bool passes = layer_.state == State::pass;
    if (passes) take_history(sequence);
    if (passes)
      for (std::int64_t e = 0; e < layer_.entries - before; ++e) move_on(sequence, e);
    for (std::int64_t t = 0; t < n + before; ++t) {
      if (t < n) make_gradient(sequence, t);
      const std::int64_t done = t - before;
      if (done >= 0 || passes) finish(sequence, t, done);
    }
  }
  void clear(std::int64_t token) {
    std::memset(tensors_.row(dx, token, layer_.channels, first_), 0,
                static_cast<std::size_t>(count_) * dtype_bytes(layer_.dtype));
  }

 private:
  std::size_t count() const { return static_cast<std::size_t>(count_); }
  float* ring(std::int64_t t) { return ring_.data() + t % layer_.width * count_; }
  std::byte* history(std::int64_t place) {
    return history_.data() + static_cast<std::size_t>(place * count_) * dtype_bytes(layer_.dtype);
  }
  /// The channels of an entry as a row.
  std::byte* gather(void* states, const Sequence& sequence, std::int64_t entry, std::byte* to) {
    tensors_.copy(to, 1, tensors_.state(states, sequence, entry, first_), layer_.channel_step(),
                  count_);
    return to;
  }
  void take_history(const Sequence& sequence) {
    for (std::int64_t place = 0; place + 1 < layer_.width; ++place)
      gather(initial, sequence, sequence.first_entry + place, history(place));
  }
  /// d_initial of an entry that is no part of the history: that of its place in the final state.
  void move_on(const Sequence& sequence, std::int64_t entry) {
    const std::int64_t n = sequence.end - sequence.begin;
    std::byte* const row = of_states_.data();
    if (entry >= n)
      gather(d_final, sequence, entry - n, row);
    else
      std::memset(row, 0, count() * dtype_bytes(layer_.dtype));
    tensors_.copy(tensors_.state(d_initial, sequence, entry, first_), layer_.channel_step(), row, 1,
                  count_);
  }
  /// g of token t of the sequence.
  void make_gradient(const Sequence& sequence, std::int64_t t) {
    const std::int64_t before = layer_.width - 1;
    std::array<const void*, most_taps> rows{};
    for (std::int64_t j = 0; j <= before; ++j) {
      const std::int64_t place = t - before + j;
      const void* row = zeros_.data();  // of any element type
      if (place >= 0)
        row = tensors_.row(x, sequence.begin + place, layer_.x_row, first_);
      else if (layer_.state == State::pass)
        row = history(place + before);
      rows[static_cast<std::size_t>(j)] = row;
    }
    const auto channels = static_cast<std::size_t>(layer_.channels);
    const std::int64_t of_bias = layer_.width * layer_.channels;
    kernels_.convolve_gradient(layer_.act, rows.data(), taps + first_, channels,
                               static_cast<std::size_t>(layer_.width), taps + of_bias + first_,
                               tensors_.row(dy, sequence.begin + t, layer_.channels, first_),
                               ring(t), d_taps + first_, d_taps + of_bias + first_, count());
  }
  /// dx of the token `done`, or d_initial of one before the first, once g of token t is known.
  void finish(const Sequence& sequence, std::int64_t t, std::int64_t done) {
    const std::int64_t n = sequence.end - sequence.begin;
    std::array<const float*, most_taps> rows{};
    for (std::int64_t j = 0; j < layer_.width; ++j)
      rows[static_cast<std::size_t>(j)] = t - j >= 0 && t - j < n ? ring(t - j) : zeros_.data();
    const std::int64_t place = layer_.entries + done;  // among the old entries and the tokens
    std::byte* const row = of_states_.data();
    std::byte* const other = row + count() * sizeof(float);
    const std::byte* const more = layer_.state == State::pass && place >= n
                                      ? gather(d_final, sequence, place - n, other)
                                      : nullptr;
    std::byte* const to =
        done >= 0 ? tensors_.row(dx, sequence.begin + done, layer_.channels, first_) : row;
    kernels_.spread(rows.data(), taps + first_, static_cast<std::size_t>(layer_.channels),
                    static_cast<std::size_t>(layer_.width), more, to, count());
    if (done < 0)
      tensors_.copy(tensors_.state(d_initial, sequence, place, first_), layer_.channel_step(), row,
                    1, count_);
  }

  const Layer& layer_;
  const RowKernels& kernels_;
  const Call& tensors_;
  std::int64_t first_, count_;
  std::vector<float> ring_, zeros_;
  std::vector<std::byte> history_, of_states_;
};

Space backward_space(const Problem& problem, const DeviceFacts& facts) {
  Space space;
  space.parameter("channels", "channels of a task", {32, 64, 128, 256, 512})
      .parameter("threads", "threads at most", thread_counts(facts))
      .constraint("a task has no more channels than there are",
                  [all = problem.size("channels")](const Config& c) {
                    return c.at("channels") == 32 || c.at("channels") <= all;
                  },
                  {"channels"});
  return space;
}

/// A few tasks for each thread, but not of less than a cache line.
Config backward_defaults(const Problem& problem, const DeviceFacts& facts) {
  const RowWork rows = work(problem);
  const std::int64_t threads = default_threads(rows.rows, rows.row_bytes, facts);
  std::int64_t channels = 32;
  while (channels < 256 && channels * 2 * threads * 2 <= problem.size("channels")) channels *= 2;
  return {{"channels", channels}, {"threads", threads}};
}

Program backward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const RowKernels& kernels = row_kernels(facts.arch, layer.dtype);
  const TensorPlaces at(tensors_of(layer));
  const std::int64_t channels = config.at("channels");
  return host_program(
      at.count(), {{taps_bytes(layer), false}, {taps_bytes(layer), false}},
      [=, &kernels, threads = config.get("threads")](const HostCall& call) {
        const auto tensor = [&](const char* name) { return address_of(call, at.at(name)); };
        const Call tensors(layer, at, call);
        auto* const taps = reinterpret_cast<float*>(call.scratch[0]);
        auto* const d_taps = reinterpret_cast<float*>(call.scratch[1]);
        decode_taps(layer, tensor("w"), tensor("bias"), taps);
        std::fill_n(d_taps, (layer.width + 1) * layer.channels, 0.0f);
        const auto tasks = static_cast<int>((layer.channels + channels - 1) / channels);
        call.parallel.run(tasks, threads, [&](int task) {
          const std::int64_t first = task * channels;
          Channels own(layer, kernels, tensors, first, std::min(channels, layer.channels - first));
          own.dy = tensor("dy");
          own.x = tensor("x");
          own.dx = tensor("dx");
          own.initial = tensor("initial");
          own.d_final = tensor("d_final");
          own.d_initial = tensor("d_initial");
          own.taps = taps;
          own.d_taps = d_taps;
          std::int64_t behind = 0;
          for (std::int64_t i = 0; i < layer.b; ++i) {
            const Sequence sequence = tensors.sequence(i);
            own.differentiate(sequence);
            behind = sequence.end;
          }
          for (; behind < layer.tokens(); ++behind) own.clear(behind);
        });
        if (layer.frozen) return;
        std::array<float, most_taps> of_channel{};
        const auto width = static_cast<std::size_t>(layer.width);
        auto* const dw = static_cast<std::byte*>(tensor("dw"));
        for (std::int64_t c = 0; c < layer.channels; ++c) {
          for (std::int64_t j = 0; j < layer.width; ++j)
            of_channel[static_cast<std::size_t>(j)] = d_taps[j * layer.channels + c];
          encode(layer.weight_dtype, std::span<const float>(of_channel.data(), width),
                 dw + static_cast<std::size_t>(c) * width * dtype_bytes(layer.weight_dtype));
        }
        if (layer.bias)
          encode(layer.weight_dtype,
                 std::span<const float>(d_taps + layer.width * layer.channels,
                                        static_cast<std::size_t>(layer.channels)),
                 tensor("dbias"));
      });
}

std::vector<std::string> sources() {
  return {"causal_conv1d/cpu_conv.cpp", activation_source, row_kernel_sources[0],
          row_kernel_sources[1]};
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRowFamily forward({.name = "cpu_forward",
                                     .summary = "blocks of tokens in vectors, on all threads",
                                     .pass = "fwd",
                                     .sources = sources(),
                                     .program = forward_program},
                                    work);
  static const StageFamily backward =
      cpu_fallback({.name = "cpu_backward",
                    .summary = "some channels of all tokens for each task",
                    .pass = "bwd",
                    .sources = sources(),
                    .search = {backward_space, backward_defaults},
                    .program = backward_program});
  return {&forward, &backward};
}

}  // namespace fftune::causal_conv1d
