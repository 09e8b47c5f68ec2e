// Blocks of tokens on all threads: a token's sines are computed once, for all of its heads.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/rope/rope.hpp"

namespace fftune::rope {
namespace {

/// The factors of a RowRotation for one position.
template <typename Real>
struct Factors {
  std::array<Real, most_features + row_rotation_margin> own{}, other{};
};
struct TokenFactors {
  Factors<double> of_singles;
  Factors<float> of_halves;
  std::optional<std::int64_t> position;
};

/// Rotates the tokens of a problem.
class Rotation {
 public:
  Rotation(const Problem& problem, const DeviceFacts& facts)
      : layer_(layer_of(problem)),
        frequencies_(frequencies_of(problem)),
        kernels_(&row_kernels(facts.arch, layer_.dtype)) {
    const TensorPlaces at(rope_op().tensors(problem));
    angles_ = at.at("angles");
    offsets_ = at.at("offsets");
    starts_ = at.at("starts");
    for (const Side& side : sides_of(layer_))
      sides_.push_back({at.at(side.in), at.at(side.out), side.heads, side.strides});
  }

  auto fence() const { return kernels_->fence; }

  void rotate_token(const HostCall& call, std::int64_t token, TokenFactors& factors,
                    bool nontemporal) const {
    set_position(call, position_of(call, token), factors);
    for (const PlacedSide& side : sides_) rotate_heads(call, side, token, factors, nontemporal);
  }

 private:
  /// A Side with its tensors' places.
  struct PlacedSide {
    std::size_t in, out;
    std::int64_t heads;
    Strides strides;
  };

  std::int64_t position_of(const HostCall& call, std::int64_t token) const {
    std::int64_t sequence = 0, position = 0;
    if (layer_.layout == Layout::sbhd) {
      position = token / layer_.b;
      sequence = token % layer_.b;
    } else if (layer_.layout == Layout::bshd) {
      position = token % layer_.s;
      sequence = token / layer_.s;
    } else {
      const auto* const offsets = static_cast<const std::int32_t*>(call.tensors[offsets_]);
      // The last sequence that begins at the token or before.
      sequence = std::upper_bound(offsets + 1, offsets + layer_.b, token) - (offsets + 1);
      position = token - offsets[sequence];
    }
    if (layer_.starts)
      position += static_cast<const std::int32_t*>(call.tensors[starts_])[sequence];
    return position;
  }

  void set_position(const HostCall& call, std::int64_t position, TokenFactors& factors) const {
    if (layer_.table) position = std::clamp<std::int64_t>(position, 0, layer_.positions - 1);
    if (position == factors.position) return;
    factors.position = position;
    const auto rotary = static_cast<std::size_t>(layer_.rotary), half = rotary / 2;
    std::array<float, most_features> computed;
    const float* angles = computed.data();
    if (layer_.table)
      angles = static_cast<const float*>(call.tensors[angles_]) +
               static_cast<std::size_t>(position) * rotary;
    else
      for (std::size_t pair = 0; pair < half; ++pair)
        computed[pair] = static_cast<float>(position) * frequencies_.values[pair];
    if (layer_.dtype == DType::f32)
      set(factors.of_singles, angles);
    else
      set(factors.of_halves, angles);
  }

  /// From the angles of the features, or of their pairs.
  template <typename Real>
  void set(Factors<Real>& to, const float* angles) const {
    const auto rotary = static_cast<std::size_t>(layer_.rotary), half = rotary / 2;
    std::array<Real, most_features> sine, cosine;
    kernels_->sines(angles, layer_.table ? rotary : half, double{frequencies_.scale}, sine.data(),
                    cosine.data());
    const bool halves = layer_.rotation == rope::Rotation::halves;
    for (std::size_t pair = 0; pair < half; ++pair) {
      const std::size_t first = halves ? pair : 2 * pair;
      const std::size_t second = halves ? pair + half : 2 * pair + 1;
      // A table has an angle for each feature.
      const std::size_t of_first = layer_.table ? first : pair;
      const std::size_t of_second = layer_.table ? second : pair;
      to.own[first] = cosine[of_first];
      to.own[second] = cosine[of_second];
      // The backward pass is the transpose.
      to.other[first] = layer_.backward ? sine[of_second] : -sine[of_first];
      to.other[second] = layer_.backward ? -sine[of_first] : sine[of_second];
    }
  }

  void rotate_heads(const HostCall& call, const PlacedSide& side, std::int64_t token,
                    const TokenFactors& factors, bool nontemporal) const {
    const auto& [in, out, heads, strides] = side;
    const auto bytes = static_cast<std::int64_t>(dtype_bytes(layer_.dtype));
    const auto* from =
        static_cast<const std::byte*>(call.tensors[in]) + layer_.place(strides, token, 0) * bytes;
    auto* to = static_cast<std::byte*>(call.tensors[out]) + token * heads * layer_.dim * bytes;
    const bool singles = layer_.dtype == DType::f32;
    const void* const own = factors.of_singles.own.data();
    const void* const other = factors.of_singles.other.data();
    const RowRotation by{.own = singles ? own : factors.of_halves.own.data(),
                         .other = singles ? other : factors.of_halves.other.data(),
                         .rotary = static_cast<std::size_t>(layer_.rotary),
                         .dim = static_cast<std::size_t>(layer_.dim),
                         .interleaved = layer_.rotation == rope::Rotation::interleaved};
    if (strides.head == layer_.dim) {
      kernels_->rotate(from, by, to, static_cast<std::size_t>(heads), nontemporal);
      return;
    }
    for (std::int64_t head = 0; head < heads; ++head)
      kernels_->rotate(from + head * strides.head * bytes, by, to + head * layer_.dim * bytes, 1,
                       nontemporal);
  }

  Layer layer_;
  std::size_t angles_, offsets_, starts_;
  std::vector<PlacedSide> sides_;
  Frequencies frequencies_;
  const RowKernels* kernels_;
};

RowWork work(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return {.rows = layer.tokens(),
          .row_bytes = (layer.heads + layer.kv_heads) * layer.dim *
                       static_cast<std::int64_t>(dtype_bytes(layer.dtype))};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Rotation rotation(problem, facts);
  const RowTasks tasks(work(problem), config);
  return host_program(rope_op().tensors(problem).size(), [=](const HostCall& call) {
    tasks.run(call.parallel, rotation.fence(),
              [&, factors = TokenFactors()](std::int64_t token) mutable {
                rotation.rotate_token(call, token, factors, tasks.nontemporal);
              });
  });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const auto families = cpu_row_families(
      {"cpu_forward", "cpu_backward"}, "blocks of tokens, on all threads",
      {"rope/cpu_families.cpp", rotation_source, row_kernel_sources[0], row_kernel_sources[1]},
      {work, program});
  return addresses_of(families);
}

}  // namespace fftune::rope
