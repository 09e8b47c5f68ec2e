#include "kernels/ffn/cpu_tile_task.hpp"

#include <cstring>

namespace fftune::ffn {

Ahead::Ahead(const Tiles& plan, const Stage& stage, Range tiles, std::int64_t k, std::int64_t depth,
             std::int64_t steps)
    : plan_(plan), stage_(stage), tiles_(tiles), k_(k), depth_(depth), tile_(tiles.first) {
  element_ = static_cast<std::int64_t>(dtype_bytes(plan.dtype));
  const std::int64_t lines = tiles.size() * plan.rows * ceil_of(depth * element_, line);
  lines_a_step_ = ceil_of(lines, steps);
  begin_row();
}

void Ahead::advance() {
  for (std::int64_t i = 0; i < lines_a_step_ && at_ != nullptr; ++i) {
    __builtin_prefetch(at_);
    at_ += line;
    if (at_ < end_) continue;
    if (++row_ == plan_.rows) {
      row_ = 0;
      ++tile_;
    }
    begin_row();
  }
}

void Ahead::begin_row() {
  at_ = nullptr;
  if (tile_ >= tiles_.last) return;
  const auto [weights, row] = stage_.row(tile_, row_, plan_.rows);
  if (row >= stage_.extent) return;
  at_ = static_cast<const char*>(weights) + (row * stage_.depth + k_) * element_;
  end_ = at_ + depth_ * element_;
}

Ahead Task::after(std::int64_t k) const {
  const bool same = k < stage_.depth;
  const std::int64_t from = same ? k : 0;
  return {plan_,
          stage_,
          same ? tiles_ : next_,
          from,
          std::min(plan_.depth_block, stage_.depth - from),
          tiles_.size() * panels_.size()};
}

void Task::pack(std::int64_t tile, std::int64_t k, std::int64_t depth, float* to) const {
  for (std::int64_t i = 0; i < plan_.rows; ++i, to += plan_.packed_stride()) {
    const auto [weights, row] = stage_.row(tile, i, plan_.rows);
    if (row >= stage_.extent)
      std::memset(to, 0, count_of(depth) * sizeof(float));
    else if (plan_.dtype == DType::f32)
      std::memcpy(to, static_cast<const float*>(weights) + row * stage_.depth + k,
                  count_of(depth) * sizeof(float));
    else
      plan_.vector->widen(static_cast<const std::uint16_t*>(weights) + row * stage_.depth + k, to,
                          count_of(depth));
  }
}

void Task::multiply(std::int64_t panel, std::int64_t k, std::int64_t depth, Ahead& ahead) const {
  const float* tokens = stage_.panels + (panel * stage_.depth + k) * plan_.width;
  float* out = sums(panel);
  for (std::int64_t tile = tiles_.first; tile < tiles_.last; ++tile) {
    const float* first = nullptr;
    const float* second = nullptr;
    std::int64_t stride = plan_.packed_stride();
    if (plan_.pack || ragged(tile)) {
      first = plan_.pack ? packed_tile(tile) : packed_;
      second = first + plan_.rows / 2 * stride;
    } else {
      stride = stage_.depth;
      const std::int64_t row = tile * stage_.step;
      first = static_cast<const float*>(stage_.first) + row * stride + k;
      second = static_cast<const float*>(stage_.second) + (row + stage_.second_row) * stride + k;
    }
    plan_.vector->tile(first, second, count_of(stride), tokens, count_of(depth), k > 0, out);
    ahead.advance();
    out += plan_.rows * plan_.width;
  }
}

}  // namespace fftune::ffn
