// Blocks of tokens on all threads: a token's sines once, in float64, then all of its heads.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kernels/common/cpu_task.hpp"
#include "kernels/rope/rope.hpp"

namespace fftune::rope {
namespace {

/// Sines and cosines of one position, by feature.
struct Turn {
  std::array<double, most_features> sine;
  std::array<double, most_features> cosine;
  std::optional<std::int64_t> position;
};

/// A problem as the loops need it.
class Rotation {
 public:
  explicit Rotation(const Problem& problem)
      : layer_(layer_of(problem)), at_(places_of(problem)), frequencies_(frequencies_of(problem)) {}

  const Layer& layer() const { return layer_; }
  const Places& places() const { return at_; }

  void rotate_token(const HostCall& call, std::int64_t token, Turn& turn,
                    std::span<float> row) const {
    turn_to(call, position_of(call, token), turn);
    rotate_heads(call, at_.q, at_.q_out, token, layer_.heads, layer_.q_row, turn, row);
    if (layer_.kv_heads > 0)
      rotate_heads(call, at_.k, at_.k_out, token, layer_.kv_heads, layer_.k_row, turn, row);
  }

 private:
  std::int64_t position_of(const HostCall& call, std::int64_t token) const {
    std::int64_t sequence = 0, position = 0;
    if (layer_.layout == Layout::sbhd) {
      position = token / layer_.b;
      sequence = token % layer_.b;
    } else if (layer_.layout == Layout::bshd) {
      position = token % layer_.s;
      sequence = token / layer_.s;
    } else {
      const auto* const offsets = static_cast<const std::int32_t*>(call.tensors[at_.offsets]);
      // The last sequence that begins at the token or before.
      sequence = std::upper_bound(offsets + 1, offsets + layer_.b, token) - (offsets + 1);
      position = token - offsets[sequence];
    }
    if (layer_.starts)
      position += static_cast<const std::int32_t*>(call.tensors[at_.starts])[sequence];
    return position;
  }

  void turn_to(const HostCall& call, std::int64_t position, Turn& turn) const {
    if (layer_.table) position = std::clamp<std::int64_t>(position, 0, layer_.positions - 1);
    if (position == turn.position) return;
    turn.position = position;
    const auto rotary = static_cast<std::size_t>(layer_.rotary);
    const auto set = [&](std::size_t i, double angle) {
      turn.sine[i] = std::sin(angle) * double{frequencies_.scale};
      turn.cosine[i] = std::cos(angle) * double{frequencies_.scale};
    };
    if (layer_.table) {
      const auto* const angles = static_cast<const float*>(call.tensors[at_.angles]) +
                                 static_cast<std::size_t>(position) * rotary;
      for (std::size_t i = 0; i < rotary; ++i) set(i, angles[i]);
      return;
    }
    const bool halves = layer_.rotation == rope::Rotation::halves;
    for (std::size_t pair = 0; pair < rotary / 2; ++pair) {
      const std::size_t first = halves ? pair : 2 * pair;
      const std::size_t second = halves ? pair + rotary / 2 : 2 * pair + 1;
      set(first, static_cast<float>(position) * frequencies_.values[pair]);
      turn.sine[second] = turn.sine[first];
      turn.cosine[second] = turn.cosine[first];
    }
  }

  void rotate_heads(const HostCall& call, std::size_t in, std::size_t out, std::int64_t token,
                    std::int64_t heads, std::int64_t in_row, const Turn& turn,
                    std::span<float> row) const {
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(layer_.dtype));
    const auto* from = static_cast<const std::byte*>(call.tensors[in]) + token * in_row * bytes;
    auto* to = static_cast<std::byte*>(call.tensors[out]) + token * heads * layer_.dim * bytes;
    for (std::int64_t head = 0; head < heads; ++head) {
      decode(layer_.dtype, from, row);
      rotate(turn, row.data());
      encode(layer_.dtype, std::span<const float>(row), to);
      from += layer_.dim * bytes;
      to += layer_.dim * bytes;
    }
  }

  void rotate(const Turn& turn, float* row) const {
    const auto rotary = static_cast<std::size_t>(layer_.rotary);
    if (layer_.rotation == rope::Rotation::halves)
      for (std::size_t i = 0; i < rotary / 2; ++i) rotate_pair(turn, row, i, i + rotary / 2);
    else
      for (std::size_t i = 0; i < rotary; i += 2) rotate_pair(turn, row, i, i + 1);
  }

  void rotate_pair(const Turn& turn, float* row, std::size_t i, std::size_t k) const {
    const double a = row[i], b = row[k];
    if (layer_.backward) {
      row[i] = static_cast<float>(a * turn.cosine[i] + b * turn.sine[k]);
      row[k] = static_cast<float>(b * turn.cosine[k] - a * turn.sine[i]);
    } else {
      row[i] = static_cast<float>(a * turn.cosine[i] - b * turn.sine[i]);
      row[k] = static_cast<float>(b * turn.cosine[k] + a * turn.sine[k]);
    }
  }

  Layer layer_;
  Places at_;
  Frequencies frequencies_;
};

class CpuRows final : public Family {
 public:
  explicit CpuRows(bool backward) : backward_(backward) {}
  std::string_view name() const override { return backward_ ? "cpu_backward" : "cpu_forward"; }
  std::string_view summary() const override { return "blocks of tokens, on all threads"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> stages() const override {
    return {backward_ ? stage_backward : stage_forward};
  }
  std::vector<std::string> sources() const override { return {"rope/cpu_families.cpp"}; }
  std::optional<std::string> refusal(const Problem& problem, const DeviceFacts&) const override {
    if ((problem.pass == "bwd") == backward_) return std::nullopt;
    return backward_ ? "it computes the pass bwd, not fwd" : "it computes the pass fwd, not bwd";
  }

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return task_space(layer_of(problem).tokens(), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const Layer layer = layer_of(problem);
    const std::int64_t row_bytes = (layer.heads + layer.kv_heads) * layer.dim *
                                   static_cast<std::int64_t>(dtype_bytes(layer.dtype));
    return default_task(layer.tokens(), row_bytes, facts);
  }

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const Rotation rotation(problem);
    const std::int64_t of_task = config.at("rows");
    const int threads = config.get("threads");
    Program program;
    program.host_tensors = rotation.places().count;
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const std::int64_t tokens = rotation.layer().tokens();
      const auto tasks = static_cast<int>((tokens + of_task - 1) / of_task);
      call.parallel.run(tasks, threads, [&](int task) {
        Turn turn;
        std::array<float, most_features> features;
        const std::span<float> row(features.data(), static_cast<std::size_t>(rotation.layer().dim));
        for (std::int64_t token = task * of_task; token < std::min(tokens, (task + 1) * of_task);
             ++token)
          rotation.rotate_token(call, token, turn, row);
      });
    }));
    return program;
  }

 private:
  bool backward_;
};

}  // namespace

const Family& cpu_forward_family() {
  static const CpuRows family(false);
  return family;
}
const Family& cpu_backward_family() {
  static const CpuRows family(true);
  return family;
}

}  // namespace fftune::rope
