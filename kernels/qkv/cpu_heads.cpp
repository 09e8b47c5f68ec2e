// The CPU family of the stage heads: norms, RoPE and caches of heads that the product has
// written to memory.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/qkv/qkv.hpp"

namespace fftune::qkv {
namespace {

/// A token on the CPU.
class HostHeads {
 public:
  HostHeads(const Layer& layer, Turns turns, const TensorPlaces& places)
      : layer_(layer),
        turns_(std::move(turns)),
        from_{places.at(layer.joined() ? "qkv_raw" : "q_raw"),
              places.at(layer.joined() ? "qkv_raw" : "k_raw"),
              places.at(layer.joined() ? "qkv_raw" : "v_raw")},
        to_{places.at("q"), places.at(layer.cache ? "k_cache" : "k"),
            places.at(layer.cache ? "v_cache" : "v")},
        weights_{places.at("q_norm"), places.at("k_norm")},
        biases_{places.at("q_norm_bias"), places.at("k_norm_bias")},
        scales_{places.at("k_scale"), places.at("v_scale")},
        gates_(places.at("gates")),
        slots_(places.at("slots")),
        positions_(places.at("positions")),
        angles_(places.at("angles")) {}

  void finish(const HostCall& call, std::int64_t token) const {
    const std::vector<double> angles = angles_of(call, token);
    if (layer_.gates) copy_gates(call, token);
    for (std::size_t part = 0; part < layer_.parts(); ++part) {
      const std::int64_t heads = part == 0 ? layer_.heads : layer_.kv_heads;
      const std::int64_t row = part > 0 && layer_.cache ? slot_of(call, token) : token;
      if (row < 0 || (part > 0 && layer_.cache && row >= layer_.cache_rows)) continue;
      std::vector<float> features(static_cast<std::size_t>(heads * layer_.dim));
      for (std::int64_t head = 0; head < heads; ++head)
        load(call, from_[part], layer_.raw_place(part, token, head), head_of(features, head));
      if (part < 2) {
        if (!layer_.norm_last) normalise(call, part, features);
        for (std::int64_t head = 0; head < heads; ++head) rotate(head_of(features, head), angles);
        if (layer_.norm_last) normalise(call, part, features);
      } else if (layer_.v_norm) {
        for (std::int64_t head = 0; head < heads; ++head) scale_to_one(head_of(features, head));
      }
      const bool to_cache = part > 0 && layer_.cache;
      const std::int64_t stride = to_cache ? layer_.cache_head : layer_.dim;
      const DType dtype = to_cache ? layer_.cache_format.dtype(layer_.dtype) : layer_.dtype;
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::span<float> own = head_of(features, head);
        if (to_cache && layer_.cache_format.e4m3) {
          const float scale = static_cast<const float*>(
              call.tensors[scales_[part - 1]])[layer_.cache_format.scale_at(head)];
          for (float& value : own) value /= scale;
        }
        encode(dtype, std::span<const float>(own),
               static_cast<std::byte*>(call.tensors[to_[part]]) +
                   static_cast<std::size_t>((row * heads + head) * stride) * dtype_bytes(dtype));
      }
    }
  }

 private:
  void copy_gates(const HostCall& call, std::int64_t token) const {
    const std::size_t bytes = static_cast<std::size_t>(layer_.dim) * dtype_bytes(layer_.dtype);
    for (std::int64_t head = 0; head < layer_.heads; ++head)
      std::memcpy(static_cast<std::byte*>(call.tensors[gates_]) +
                      static_cast<std::size_t>(token * layer_.heads + head) * bytes,
                  static_cast<const std::byte*>(call.tensors[from_[0]]) +
                      static_cast<std::size_t>(layer_.raw_place(0, token, head) + layer_.dim) *
                          dtype_bytes(layer_.dtype),
                  bytes);
  }
  std::span<float> head_of(std::vector<float>& features, std::int64_t head) const {
    return std::span(features).subspan(static_cast<std::size_t>(head * layer_.dim),
                                       static_cast<std::size_t>(layer_.dim));
  }
  void load(const HostCall& call, std::size_t tensor, std::int64_t at, std::span<float> to) const {
    decode(layer_.dtype,
           static_cast<const std::byte*>(call.tensors[tensor]) +
               static_cast<std::size_t>(at) * dtype_bytes(layer_.dtype),
           to);
  }
  std::int64_t slot_of(const HostCall& call, std::int64_t token) const {
    return layer_.wide_slots ? static_cast<const std::int64_t*>(call.tensors[slots_])[token]
                             : static_cast<const std::int32_t*>(call.tensors[slots_])[token];
  }
  std::vector<double> angles_of(const HostCall& call, std::int64_t token) const {
    std::vector<double> angles;
    if (!layer_.rotates()) return angles;
    const std::int64_t position = static_cast<const std::int32_t*>(call.tensors[positions_])[token];
    for (std::int64_t pair = 0; pair < layer_.rotary / 2; ++pair) {
      if (!layer_.table) {
        angles.push_back(static_cast<float>(position) *
                         turns_.frequencies[static_cast<std::size_t>(pair)]);
        continue;
      }
      const std::int64_t line = std::clamp<std::int64_t>(position, 0, layer_.positions - 1);
      const std::int64_t column = layer_.rotation == head_rotation::interleaved ? 2 * pair : pair;
      angles.push_back(
          static_cast<const float*>(call.tensors[angles_])[line * layer_.rotary + column]);
    }
    return angles;
  }

  void normalise(const HostCall& call, std::size_t part, std::vector<float>& features) const {
    if (layer_.norm == HeadNorm::none) return;
    const std::size_t dim = static_cast<std::size_t>(layer_.dim);
    const std::size_t width = layer_.norm == HeadNorm::rows ? features.size() : dim;
    std::vector<float> weights(width), biases(width);
    load(call, weights_[part], 0, weights);
    const bool centred = layer_.norm == HeadNorm::centred;
    if (centred) load(call, biases_[part], 0, biases);
    for (std::size_t first = 0; first < features.size(); first += width) {
      const std::span<float> own = std::span(features).subspan(first, width);
      double mean = 0, squares = 0;
      for (const float value : own) mean += value;
      mean = centred ? mean / static_cast<double>(width) : 0;
      for (const float value : own) squares += (value - mean) * (value - mean);
      const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + layer_.epsilon);
      for (std::size_t i = 0; i < width; ++i)
        own[i] = static_cast<float>((own[i] - mean) * factor * (layer_.norm_offset + weights[i]) +
                                    biases[i]);
    }
  }

  /// RMSNorm without weights.
  void scale_to_one(std::span<float> head) const {
    double squares = 0;
    for (const float value : head) squares += double{value} * value;
    const double factor =
        1 / std::sqrt(squares / static_cast<double>(head.size()) + layer_.epsilon);
    for (float& value : head) value = static_cast<float>(value * factor);
  }

  void rotate(std::span<float> head, const std::vector<double>& angles) const {
    const bool halves = layer_.rotation == head_rotation::halves;
    for (std::size_t pair = 0; pair < angles.size(); ++pair) {
      float& first = head[halves ? pair : 2 * pair];
      float& second = head[halves ? pair + angles.size() : 2 * pair + 1];
      const double cosine = std::cos(angles[pair]) * double{turns_.scale};
      const double sine = std::sin(angles[pair]) * double{turns_.scale};
      const double before = first, other = second;
      first = static_cast<float>(before * cosine - other * sine);
      second = static_cast<float>(other * cosine + before * sine);
    }
  }

  Layer layer_;
  Turns turns_;
  std::size_t from_[3], to_[3], weights_[2], biases_[2], scales_[2];
  std::size_t gates_, slots_, positions_, angles_;
};

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  const Layer layer = layer_of(problem);
  const TensorPlaces places(qkv_op().tensors(problem));
  return host_program(places.count(), [layer, heads = HostHeads(layer, turns_of(problem), places)](
                                          const HostCall& call) {
    for_each_block(layer.m, layer.columns(), call.parallel, [&](const Block& block) {
      for (std::int64_t token = block.first_row; token < block.last_row; ++token)
        heads.finish(call, token);
    });
  });
}

}  // namespace

const Family& cpu_heads_family() {
  static const StageFamily family = cpu_fallback({.name = "cpu_heads",
                                                  .summary = "tokens one by one, in fp32",
                                                  .stage = stage_heads,
                                                  .sources = {"qkv/cpu_heads.cpp"},
                                                  .refusal = refuse_finished_heads,
                                                  .program = program});
  return family;
}

}  // namespace fftune::qkv
