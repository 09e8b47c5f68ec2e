// The stages that are no GEMMs on the CPU.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/routing.hpp"
#include "device/blocks.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

/// A tensor by its place, while a program runs.
template <typename T>
T* data(const HostCall& call, std::size_t place) {
  return static_cast<T*>(call.tensors[place]);
}

/// Row `row` of a matrix of `dtype` with `width` columns as f32, and the inverse.
void load_row(DType dtype, const void* matrix, std::size_t row, std::span<float> values) {
  const std::size_t bytes = values.size() * dtype_bytes(dtype);
  decode(dtype, static_cast<const std::byte*>(matrix) + row * bytes, values);
}
void store_row(DType dtype, void* matrix, std::size_t row, std::span<const float> values) {
  const std::size_t bytes = values.size() * dtype_bytes(dtype);
  encode(dtype, values, static_cast<std::byte*>(matrix) + row * bytes);
}

}  // namespace

Program cpu_route_program(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const std::size_t ids = places.at("ids"), offsets = places.at("offsets"),
                    tokens = places.at("tokens"), of_choices = places.at("places");
  const std::size_t weights = weighs_before(problem) ? places.at("weights") : absent,
                    row_weights = weighs_before(problem) ? places.at("row_weights") : absent;
  Program program;
  program.host_tensors = places.count();
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    const auto* const given = data<const std::int32_t>(call, ids);
    auto* const first = data<std::int32_t>(call, offsets);
    auto* const token_of = data<std::int32_t>(call, tokens);
    auto* const place_of = data<std::int32_t>(call, of_choices);
    const std::vector<std::int32_t> chosen =
        all_choices(shape, {given, given + shape.m * shape.top_k});
    auto* const weight_of_row = row_weights == absent ? nullptr : data<float>(call, row_weights);
    std::vector<std::int32_t> next(static_cast<std::size_t>(shape.all_experts()) + 1);
    for (const std::int32_t expert : chosen)
      if (expert >= 0) ++next[static_cast<std::size_t>(expert) + 1];
    for (std::size_t expert = 0; expert < next.size(); ++expert)
      first[expert] = next[expert] += expert > 0 ? next[expert - 1] : 0;
    for (std::int64_t row = first[shape.all_experts()]; row < shape.rows(); ++row) {
      token_of[row] = 0;
      if (weight_of_row) weight_of_row[row] = 0;
    }
    for (std::int64_t choice = 0; choice < shape.rows(); ++choice) {
      const std::int32_t expert = chosen[static_cast<std::size_t>(choice)];
      place_of[choice] = -1;
      if (expert < 0) continue;
      const std::int32_t place = next[static_cast<std::size_t>(expert)]++;
      const std::int64_t token = choice / shape.choices(), own = choice % shape.choices();
      place_of[choice] = place;
      token_of[place] = static_cast<std::int32_t>(token);
      if (weight_of_row)
        weight_of_row[place] =
            own < shape.top_k ? data<const float>(call, weights)[token * shape.top_k + own] : 1;
    }
  }));
  return program;
}

Program cpu_combine_program(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const bool forward = problem.pass == "fwd";
  const DType dtype = wide_dtype(problem);
  const std::size_t rows = places.at(forward ? "expert_out" : "dx_rows"),
                    weights = forward && !weighs_before(problem) ? places.at("weights") : absent,
                    of_choices = places.at("places"), sums = places.at(forward ? "y" : "dx"),
                    residual = has_residual(problem) ? places.at("residual") : absent;
  Program program;
  program.host_tensors = places.count();
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    const auto* const place_of = data<const std::int32_t>(call, of_choices);
    const auto width = static_cast<std::size_t>(shape.d);
    for_each_block(shape.m, shape.d * shape.choices(), call.parallel, [&](const Block& block) {
      std::vector<float> row(width), sum(width);
      for (std::int64_t token = block.first_row; token < block.last_row; ++token) {
        if (residual == absent)
          std::fill(sum.begin(), sum.end(), 0.0f);
        else
          load_row(dtype, call.tensors[residual], static_cast<std::size_t>(token), sum);
        for (std::int64_t i = 0; i < shape.choices(); ++i) {
          const std::int32_t place = place_of[token * shape.choices() + i];
          if (place < 0) continue;
          const bool weighted = weights != absent && i < shape.top_k;
          const float weight =
              weighted ? data<const float>(call, weights)[token * shape.top_k + i] : 1;
          load_row(dtype, call.tensors[rows], static_cast<std::size_t>(place), row);
          for (std::size_t column = 0; column < width; ++column)
            sum[column] += weight * row[column];
        }
        store_row(dtype, call.tensors[sums], static_cast<std::size_t>(token), sum);
      }
    });
  }));
  return program;
}

Program cpu_weigh_program(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const DType dtype = problem.dtype;
  struct Weighed {
    std::size_t from, to;
  };
  const std::vector<Weighed> weighed{{places.at("d_gate"), places.at("weighted_d_gate")},
                                     {places.at("d_up"), places.at("weighted_d_up")},
                                     {places.at("hidden"), places.at("weighted_hidden")}};
  const std::size_t d_up = places.at("d_up"), up = places.at("up"), weights = places.at("weights"),
                    of_choices = places.at("places"), d_weights = places.at("d_weights");
  Program program;
  program.host_tensors = places.count();
  program.steps.emplace_back(HostFunction([=](const HostCall& call) {
    const auto* const place_of = data<const std::int32_t>(call, of_choices);
    const auto width = static_cast<std::size_t>(shape.h);
    for_each_block(shape.rows(), shape.h, call.parallel, [&](const Block& block) {
      std::vector<float> one(width), other(width);
      for (std::int64_t choice = block.first_row; choice < block.last_row; ++choice) {
        float& sum = data<float>(call, d_weights)[choice];
        sum = 0;
        if (place_of[choice] < 0) continue;
        const auto row = static_cast<std::size_t>(place_of[choice]);
        load_row(dtype, call.tensors[d_up], row, one);
        load_row(dtype, call.tensors[up], row, other);
        for (std::size_t i = 0; i < width; ++i) sum += one[i] * other[i];
        for (const Weighed& each : weighed) {
          load_row(dtype, call.tensors[each.from], row, one);
          for (float& value : one) value *= data<const float>(call, weights)[choice];
          store_row(dtype, call.tensors[each.to], row, one);
        }
      }
    });
  }));
  return program;
}

}  // namespace fftune::moe
