// mla-rope on the CPU: tokens one by one, in f32.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/mla_rope/mla_rope.hpp"

namespace fftune::mla_rope {
namespace {

/// The tensors of a call.
class Host {
 public:
  explicit Host(const Problem& problem) : layer_(layer_of(problem)), turns_(turns_of(problem)) {
    const TensorPlaces places(mla_rope_op().tensors(problem));
    q_ = places.at("q"), kv_ = places.at("kv"), norm_ = places.at("norm");
    positions_ = places.at("positions"), angles_ = places.at("angles");
    cache_ = places.at("cache"), slots_ = places.at("slots"), q_rope_ = places.at("q_rope");
  }

  const Layer& layer() const { return layer_; }
  std::int64_t width() const { return layer_.heads * layer_.rope + layer_.width(); }

  void token(const HostCall& call, std::int64_t at, const std::vector<float>& norm) const {
    const auto turns = turns_at(call, at);
    std::vector<float> row(static_cast<std::size_t>(layer_.width()));
    std::vector<float> turned(static_cast<std::size_t>(layer_.rope));
    const std::span<float> rotated = std::span(row).last(turned.size());
    for (std::int64_t head = at * layer_.heads; head < (at + 1) * layer_.heads; ++head) {
      load(call, q_, head * (layer_.nope + layer_.rope) + layer_.nope, rotated);
      turn(rotated, turned, turns);
      store(call, q_rope_, head * layer_.rope, turned);
    }
    const std::int64_t slot = static_cast<const std::int32_t*>(call.tensors[slots_])[at];
    if (slot < 0 || slot >= layer_.cache_rows) return;
    load(call, kv_, at * layer_.width(), row);
    turn(rotated, turned, turns);
    std::copy(turned.begin(), turned.end(), rotated.begin());
    const std::span<float> latent = std::span(row).first(norm.size());
    double squares = 0;
    for (const float value : latent) squares += double{value} * value;
    const double factor =
        1 / std::sqrt(squares / static_cast<double>(layer_.rank) + layer_.epsilon);
    for (std::size_t i = 0; i < latent.size(); ++i)
      latent[i] = static_cast<float>(latent[i] * factor * norm[i]);
    store(call, cache_, slot * layer_.width(), row);
  }

  std::vector<float> norm(const HostCall& call) const {
    std::vector<float> weights(static_cast<std::size_t>(layer_.rank));
    load(call, norm_, 0, weights);
    return weights;
  }

 private:
  struct Turn {
    double cosine, sine;
  };

  std::byte* address(const HostCall& call, std::size_t tensor, std::int64_t at) const {
    return static_cast<std::byte*>(call.tensors[tensor]) +
           static_cast<std::size_t>(at) * dtype_bytes(layer_.dtype);
  }
  void load(const HostCall& call, std::size_t tensor, std::int64_t at, std::span<float> to) const {
    decode(layer_.dtype, address(call, tensor, at), to);
  }
  void store(const HostCall& call, std::size_t tensor, std::int64_t at,
             const std::vector<float>& from) const {
    encode(layer_.dtype, std::span<const float>(from), address(call, tensor, at));
  }
  std::vector<Turn> turns_at(const HostCall& call, std::int64_t token) const {
    std::vector<Turn> turns;
    if (!layer_.rotates()) return turns;
    const std::int64_t position = static_cast<const std::int32_t*>(call.tensors[positions_])[token];
    const std::int64_t line = std::clamp<std::int64_t>(position, 0, layer_.positions - 1);
    for (std::int64_t pair = 0; pair < layer_.pairs(); ++pair) {
      const double angle =
          layer_.table
              ? static_cast<const float*>(
                    call.tensors[angles_])[line * layer_.rope + layer_.from(pair)]
              : static_cast<float>(position) * turns_.frequencies[static_cast<std::size_t>(pair)];
      turns.push_back({std::cos(angle) * turns_.scale, std::sin(angle) * turns_.scale});
    }
    return turns;
  }
  void turn(std::span<const float> from, std::span<float> to,
            const std::vector<Turn>& turns) const {
    if (!layer_.rotates()) std::copy(from.begin(), from.end(), to.begin());
    for (std::size_t pair = 0; pair < turns.size(); ++pair) {
      const auto first = static_cast<std::size_t>(layer_.from(static_cast<std::int64_t>(pair)));
      const auto there = static_cast<std::size_t>(layer_.to(static_cast<std::int64_t>(pair)));
      const double x = from[first], y = from[first + static_cast<std::size_t>(layer_.apart())];
      to[there] = static_cast<float>(x * turns[pair].cosine - y * turns[pair].sine);
      to[there + static_cast<std::size_t>(layer_.apart_in_results())] =
          static_cast<float>(y * turns[pair].cosine + x * turns[pair].sine);
    }
  }

  Layer layer_;
  Turns turns_;
  std::size_t q_ = absent, kv_ = absent, norm_ = absent, positions_ = absent, angles_ = absent;
  std::size_t cache_ = absent, slots_ = absent, q_rope_ = absent;
};

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  return host_program(
      TensorPlaces(mla_rope_op().tensors(problem)).count(),
      [host = Host(problem)](const HostCall& call) {
        const std::vector<float> norm = host.norm(call);
        for_each_block(host.layer().m, host.width(), call.parallel, [&](const Block& block) {
          for (std::int64_t token = block.first_row; token < block.last_row; ++token)
            host.token(call, token, norm);
        });
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const StageFamily family = cpu_fallback({.name = "cpu_mla_rope",
                                                  .summary = "tokens one by one, in fp32",
                                                  .sources = {"mla_rope/cpu_families.cpp"},
                                                  .program = program});
  return {&family};
}

}  // namespace fftune::mla_rope
