// The stages that are no GEMMs on the CPU.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/distribution.hpp"
#include "device/parallel.hpp"
#include "kernels/common/cpu_rows.hpp"
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

Program cpu_own_ids_program(const Problem& problem, const DeviceFacts&, const Config&) {
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  return host_program(places.count(), [shape = shape_of(problem), ids = places.at("ids"),
                                       first = places.at("first_expert"),
                                       own_ids = places.at("own_ids")](const HostCall& call) {
    const auto* const given = data<const std::int32_t>(call, ids);
    for (std::int64_t i = 0; i < shape.m * shape.top_k; ++i)
      data<std::int32_t>(call, own_ids)[i] =
          own_id(shape, given[i], *data<const std::int32_t>(call, first));
  });
}

Program cpu_route_program(const Problem& problem) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const std::size_t ids = places.at(own_ids_of(problem)), offsets = places.at("offsets"),
                    tokens = places.at("tokens"), of_choices = places.at("places");
  const std::size_t weights = has_row_weights(problem) ? places.at("weights") : absent,
                    row_weights = has_row_weights(problem) ? places.at("row_weights") : absent;
  return host_program(places.count(), [=](const HostCall& call) {
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
  });
}

Program cpu_combine_program(const Problem& problem, const DeviceFacts&, const Config&) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const bool forward = problem.pass == "fwd", before = weighs_before(problem);
  const DType dtype = wide_dtype(problem);
  // With weigh=before the gradient of a weight is that of x against the row.
  const std::size_t x = forward || !before ? absent : places.at("x"),
                    d_weights = x == absent ? absent : places.at("d_weights");
  const std::size_t rows = places.at(forward ? "expert_out" : "dx_rows"),
                    weights = forward != before ? places.at("weights") : absent,
                    of_choices = places.at("places"), sums = places.at(forward ? "y" : "dx"),
                    residual = has_residual(problem) ? places.at("residual") : absent;
  return host_program(places.count(), [=](const HostCall& call) {
    const auto* const place_of = data<const std::int32_t>(call, of_choices);
    const auto width = static_cast<std::size_t>(shape.d);
    for_each_block(shape.m, shape.d * shape.choices(), call.parallel, [&](const Block& block) {
      std::vector<float> row(width), sum(width), own_x(x == absent ? 0 : width);
      for (std::int64_t token = block.first_row; token < block.last_row; ++token) {
        if (residual == absent)
          std::fill(sum.begin(), sum.end(), 0.0f);
        else
          load_row(dtype, call.tensors[residual], static_cast<std::size_t>(token), sum);
        if (x != absent) load_row(dtype, call.tensors[x], static_cast<std::size_t>(token), own_x);
        for (std::int64_t i = 0; i < shape.choices(); ++i) {
          const std::int32_t place = place_of[token * shape.choices() + i];
          const bool chosen = i < shape.top_k;
          float* const d_weight = d_weights != absent && chosen
                                      ? data<float>(call, d_weights) + token * shape.top_k + i
                                      : nullptr;
          if (d_weight) *d_weight = 0;
          if (place < 0) continue;
          const float weight = weights != absent && chosen
                                   ? data<const float>(call, weights)[token * shape.top_k + i]
                                   : 1;
          load_row(dtype, call.tensors[rows], static_cast<std::size_t>(place), row);
          for (std::size_t column = 0; column < width; ++column)
            sum[column] += weight * row[column];
          if (d_weight) *d_weight = std::inner_product(row.begin(), row.end(), own_x.begin(), 0.0f);
        }
        store_row(dtype, call.tensors[sums], static_cast<std::size_t>(token), sum);
      }
    });
  });
}

Program cpu_weigh_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const DType dtype = problem.dtype;
  const Activation activation = parse_activation(problem.option("act"));
  const Packing packed = packing_of(problem);
  const bool before = weighs_before(problem);
  const std::size_t d_hidden = places.at("d_hidden"), gate = places.at("gate"),
                    up = places.at("up"), weights = places.at("weights"),
                    of_choices = places.at("places");
  const std::size_t d_weights = before ? absent : places.at("d_weights");
  const bool has_hidden = !before || !recomputes(problem);
  const std::size_t hidden = has_hidden ? places.at(hidden_of_gradient(problem)) : absent;
  const bool biased = reads_down_bias(problem);
  const std::size_t ids = biased ? places.at(own_ids_of(problem)) : absent,
                    dy = biased ? places.at("dy") : absent,
                    b_down = biased ? places.at("b_down") : absent;
  const auto places_of = [&](bool weighted) {
    std::vector<std::size_t> own;
    for (const std::string_view name : gate_gradients(problem, weighted))
      own.push_back(places.at(name));
    return own;
  };
  const std::vector<std::size_t> weighted = places_of(true),
                                 plain = before ? places_of(false) : std::vector<std::size_t>{};
  // act_mul() and its gradient, in f32: their up is up_factor().
  const RowKernels* const rows = &row_kernels(facts.arch, DType::f32);
  return host_program(places.count(), [=](const HostCall& call) {
    const auto* const place_of = data<const std::int32_t>(call, of_choices);
    const auto h = static_cast<std::size_t>(shape.h), d = static_cast<std::size_t>(shape.d);
    for_each_block(shape.rows(), shape.h, call.parallel, [&](const Block& block) {
      std::vector<bool> limited(h);
      std::vector<float> dc(h), gates(h), ups(h), products(h), d_gate(h), d_up(h), both(2 * h),
          of_token(biased ? d : 0), bias(biased ? d : 0);
      const auto store_gradients = [&](const std::vector<std::size_t>& to, std::size_t row,
                                       float factor) {
        for (std::size_t i = 0; i < h; ++i) {
          const bool halves = packed != Packing::interleaved;
          both[halves ? i : 2 * i] = factor * d_gate[i];
          both[halves ? h + i : 2 * i + 1] = factor * d_up[i];
        }
        if (to.size() == 1) {
          store_row(dtype, call.tensors[to[0]], row, both);
          return;
        }
        for (std::size_t i = 0; i < 2; ++i)
          store_row(dtype, call.tensors[to[i]], row, std::span(both).subspan(i * h, h));
      };
      for (std::int64_t choice = block.first_row; choice < block.last_row; ++choice) {
        const std::int64_t token = choice / shape.choices(), own = choice % shape.choices();
        const bool chosen = own < shape.top_k;
        const std::int64_t of_weight = token * shape.top_k + own;
        float none = 0;
        float& sum = chosen && d_weights != absent ? data<float>(call, d_weights)[of_weight] : none;
        sum = 0;
        if (place_of[choice] < 0) continue;
        const auto row = static_cast<std::size_t>(place_of[choice]);
        load_row(dtype, call.tensors[d_hidden], row, dc);
        load_row(dtype, call.tensors[gate], row, gates);
        load_row(dtype, call.tensors[up], row, ups);
        for (std::size_t i = 0; i < h; ++i) {
          limited[i] = limits_up(activation, ups[i]);
          ups[i] = static_cast<float>(up_factor(activation, ups[i]));
        }
        rows->act_mul(activation, gates.data(), ups.data(), products.data(), h, false);
        rows->act_mul_gradient(activation, gates.data(), ups.data(), dc.data(), d_gate.data(),
                               d_up.data(), h, false);
        for (std::size_t i = 0; i < h; ++i) {
          if (limited[i]) d_up[i] = 0;
          sum += dc[i] * products[i];
        }
        if (biased && chosen) {
          const auto expert =
              static_cast<std::size_t>(data<const std::int32_t>(call, ids)[of_weight]);
          load_row(dtype, call.tensors[dy], static_cast<std::size_t>(token), of_token);
          load_row(dtype, call.tensors[b_down], expert, bias);
          sum = std::inner_product(bias.begin(), bias.end(), of_token.begin(), sum);
        }
        const float weight = chosen ? data<const float>(call, weights)[of_weight] : 1;
        store_gradients(weighted, row, weight);
        if (before) store_gradients(plain, row, 1);
        if (!has_hidden) continue;
        for (float& value : products) value *= before ? 1 : weight;
        store_row(dtype, call.tensors[hidden], row, products);
      }
    });
  });
}

Program cpu_d_biases_program(const Problem& problem, const DeviceFacts&, const Config&) {
  struct Sum {
    std::size_t bias, rows, before;
    bool of_tokens;
    std::int64_t width;
  };
  const Shape shape = shape_of(problem);
  const TensorPlaces places(moe_ffn_op().tensors(problem));
  const DType dtype = problem.dtype;
  std::vector<Sum> all;
  for (const BiasGradient& gradient : bias_gradients(problem))
    all.push_back({.bias = places.at(gradient.bias),
                   .rows = places.at(gradient.rows),
                   .before = places.at(initial_name(gradient.bias)),
                   .of_tokens = gradient.rows == "dy",
                   .width = gradient.width});
  const std::size_t offsets = places.at("offsets"), tokens = places.at("tokens"),
                    row_weights = weighs_before(problem) ? absent : places.at("row_weights");
  return host_program(places.count(), [=](const HostCall& call) {
    const auto* const first = data<const std::int32_t>(call, offsets);
    const auto* const token_of = data<const std::int32_t>(call, tokens);
    const auto* const weight_of = static_cast<const float*>(address_of(call, row_weights));
    call.parallel.run(
        static_cast<int>(shape.all_experts()), call.parallel.max_threads(), [&](int expert) {
          const auto own = static_cast<std::size_t>(expert);
          for (const Sum& each : all) {
            std::vector<float> sum(static_cast<std::size_t>(each.width)), row(sum.size());
            if (each.before != absent) load_row(dtype, call.tensors[each.before], own, sum);
            for (std::int32_t at = first[expert]; at < first[expert + 1]; ++at) {
              const std::int32_t from = each.of_tokens ? token_of[at] : at;
              const float weight = each.of_tokens && weight_of != nullptr ? weight_of[at] : 1;
              load_row(dtype, call.tensors[each.rows], static_cast<std::size_t>(from), row);
              for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += weight * row[i];
            }
            store_row(dtype, call.tensors[each.bias], own, sum);
          }
        });
  });
}

}  // namespace fftune::moe
