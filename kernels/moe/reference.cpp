// The definition in float64: the products of each expert over its own rows.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/parallel.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gemm/reference_product.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

using Matrix = std::vector<double>;

std::size_t count(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

class Definition {
 public:
  Definition(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel)
      : problem_(problem), shape_(shape_of(problem)), tensors_(tensors), parallel_(parallel) {}

  void own_ids();
  void route();
  void gate_up();
  void down();
  void weigh();
  void d_biases();
  /// dx = Σ weight · u and d_weights = x·u, where the weights were applied before.
  void combine_before();
  /// out [rows, n] = the sum of in · w of each pair; w is [experts, n, k], or [experts, k, n] where
  /// it is transposed.
  struct Term {
    const char *in, *w;
    bool of_tokens = false;  // `in` has the tokens' rows, not those of the choices
  };
  Matrix product(std::int64_t n, std::int64_t k, bool transposed, const std::vector<Term>& terms);
  void d_gate_up();
  /// The terms of the stage d_x; packed weights make one of 2 h columns.
  Matrix d_x();
  /// Computes dw [n, k] = aᵀ·b of each expert over its own rows, plus dw_before if gradients
  /// accumulate.
  void reduction(const std::string& dw, const Term& a, const Term& b, std::int64_t n,
                 std::int64_t k);
  /// y [m, d] = the sum over a token's choices of its row, times its weight or not.
  void combine(const char* rows, bool weighted, const char* y);

  const Shape& shape() const { return shape_; }
  Matrix& at(const char* name) { return tensors_.at(name); }
  void set(const std::string& name, Matrix value) { tensors_[name] = std::move(value); }

 private:
  /// Weight of a choice; choices of the shared experts count.
  double weight_of(std::size_t choice) {
    const std::size_t token = choice / count(shape_.choices());
    const std::size_t own = choice % count(shape_.choices());
    return own < count(shape_.top_k) ? at("weights")[token * count(shape_.top_k) + own] : 1;
  }
  Matrix matrix(std::int64_t rows, std::int64_t columns) const {
    return large_vector<double>(count(rows * columns), parallel_);
  }
  /// Where an expert's weight [n, k] is, or [k, n], in its tensor, and how far apart its rows are.
  struct StoredWeight {
    std::string tensor;
    std::size_t first = 0;
    std::int64_t pitch = 0;
  };
  StoredWeight stored_weight(const std::string& w, std::int64_t expert, std::int64_t n,
                             std::int64_t k, bool transposed) const;
  /// In fp8: rows of a term in numbers, and hidden as elements, with its scales where the op finds
  /// these.
  void scale_rows(const Term& term, std::int64_t first, std::int64_t last, std::int64_t k,
                  double* rows);
  /// The scales of row `row` of an expert's weight: one for each `columns` elements.
  struct RowScales {
    const double* first = nullptr;
    std::int64_t columns = 1;
  };
  RowScales scales_of_row(const std::string& w, std::int64_t expert, std::int64_t row,
                          std::int64_t n, std::int64_t k);
  /// An expert's weight in float64, with fp8 scales applied: in place, or made in `room`, which
  /// serves one expert after the other.
  DoubleMatrixView weight_of_expert(const std::string& w, std::int64_t expert, std::int64_t n,
                                    std::int64_t k, bool transposed, Matrix& room);
  void quantise_hidden(Matrix& hidden);
  /// Adds to each row of the sorted order the bias [n] of its expert.
  void add_bias(Matrix& rows, std::int64_t n, const char* name);
  /// The rows [first, last) of the sorted order.
  std::int64_t first_row(std::int64_t expert) {
    return static_cast<std::int64_t>(at("offsets")[count(expert)]);
  }
  /// Those rows of a term, in numbers: where they are, or copied to `room`, which serves one expert
  /// after the other.
  const double* rows_of(const Term& term, std::int64_t first, std::int64_t last,
                        std::int64_t columns, Matrix& room) {
    const auto width = count(columns);
    const Matrix& all = at(term.in);
    const bool scaled = scales_of(problem_) != Scales::none;
    if (!term.of_tokens && !scaled) return all.data() + count(first) * width;
    make_room(room, count(last - first) * width);
    const Matrix& tokens = at("tokens");
    for_each_row(count(last - first), width, parallel_, [&](std::size_t i) {
      const std::size_t row = count(first) + i;
      const std::size_t from = term.of_tokens ? static_cast<std::size_t>(tokens[row]) : row;
      std::copy_n(all.data() + from * width, width, room.data() + i * width);
    });
    if (scaled) scale_rows(term, first, last, columns, room.data());
    return room.data();
  }
  /// Its pages are made once, for the largest expert so far and a quarter more.
  void make_room(Matrix& room, std::size_t size) {
    if (room.size() >= size) return;
    const std::size_t more = room.empty() ? size : size + size / 4;
    room = {};
    room = large_vector<double>(more, parallel_);
  }

  const Problem& problem_;
  Shape shape_;
  ReferenceTensors& tensors_;
  Parallel& parallel_;
};

void Definition::own_ids() {
  const auto first = static_cast<std::int32_t>(at("first_expert")[0]);
  Matrix ids = at("ids");
  for (double& id : ids) id = own_id(shape_, static_cast<std::int32_t>(id), first);
  set("own_ids", std::move(ids));
}

void Definition::route() {
  const Matrix& given = at(own_ids_of(problem_));
  const std::vector<std::int32_t> ids(given.begin(), given.end());
  const auto choices = all_choices(shape_, ids);
  const SortedRouting sorted = sorted_routing(choices, shape_.all_experts(), shape_.choices());
  const auto numbers = [](const std::vector<std::int32_t>& values) {
    return Matrix(values.begin(), values.end());
  };
  set("offsets", numbers(sorted.offsets));
  set("tokens", numbers(sorted.tokens));
  set("places", numbers(sorted.places));
  if (!has_row_weights(problem_)) return;
  Matrix row_weights(count(shape_.rows()));
  for (std::size_t choice = 0; choice < choices.size(); ++choice)
    if (sorted.places[choice] >= 0)
      row_weights[static_cast<std::size_t>(sorted.places[choice])] = weight_of(choice);
  set("row_weights", std::move(row_weights));
}

Matrix Definition::product(std::int64_t n, std::int64_t k, bool transposed,
                           const std::vector<Term>& terms) {
  Matrix result = matrix(shape_.rows(), n), rows, weight;
  for (std::int64_t expert = 0; expert < shape_.all_experts(); ++expert) {
    const std::int64_t first = first_row(expert), last = first_row(expert + 1);
    if (first == last) continue;
    for (const Term& term : terms) {
      const double* const in = rows_of(term, first, last, k, rows);
      reference_product(parallel_, last - first, n, k, {in, k},
                        weight_of_expert(term.w, expert, n, k, transposed, weight),
                        &term != &terms.front(), result.data() + count(first * n));
    }
  }
  return result;
}

void Definition::reduction(const std::string& dw, const Term& a, const Term& b, std::int64_t n,
                           std::int64_t k) {
  Matrix sums = accumulates(problem_) ? large_copy(tensors_.at(initial_name(dw)), parallel_)
                                      : matrix(shape_.all_experts() * n, k);
  Matrix a_rows, b_rows;
  for (std::int64_t expert = 0; expert < shape_.all_experts(); ++expert) {
    const std::int64_t first = first_row(expert), last = first_row(expert + 1);
    if (first == last) continue;
    const double* const left = rows_of(a, first, last, n, a_rows);
    const double* const right = rows_of(b, first, last, k, b_rows);
    reference_product(parallel_, n, k, last - first, {left, n, true}, {right, k, true},
                      accumulates(problem_), sums.data() + count(expert * n * k));
  }
  set(dw, std::move(sums));
}

Definition::StoredWeight Definition::stored_weight(const std::string& w, std::int64_t expert,
                                                   std::int64_t n, std::int64_t k,
                                                   bool transposed) const {
  const std::int64_t width = transposed ? n : k;
  const Packing packed = packing_of(problem_);
  if (packed == Packing::separate || w == "w_down" || w == "w_gate_up")
    return {packed_gate_up(problem_).empty() ? w : w + "_dense", count(expert * n * k), width};
  const std::size_t both = count(expert * 2 * n * k);
  const bool is_up = w == "w_up";
  if (packed == Packing::halves) return {"w_gate_up", both + (is_up ? count(n * k) : 0), width};
  return {"w_gate_up", both + (is_up ? count(width) : 0), 2 * width};
}

void Definition::scale_rows(const Term& term, std::int64_t first, std::int64_t last, std::int64_t k,
                            double* rows) {
  const Matrix &scales = at(term.of_tokens ? "x_scale" : "hidden_scale"), &tokens = at("tokens");
  const bool in_one = scales_of(problem_) == Scales::tensor;
  const std::int64_t blocks =
      term.of_tokens && scales_of(problem_) == Scales::token ? 1 : ceil_div(k, scale_block);
  const std::int64_t width = blocks == 1 ? k : scale_block;
  for_each_row(count(last - first), count(k), parallel_, [&](std::size_t index) {
    const auto row = static_cast<std::int64_t>(index);
    const std::int64_t own =
        term.of_tokens ? static_cast<std::int64_t>(tokens[count(first + row)]) : first + row;
    for (std::int64_t i = 0; i < k; ++i)
      rows[count(row * k + i)] *= scales[in_one ? 0 : count(own * blocks + i / width)];
  });
}

Definition::RowScales Definition::scales_of_row(const std::string& w, std::int64_t expert,
                                                std::int64_t row, std::int64_t n, std::int64_t k) {
  const bool packed = packing_of(problem_) != Packing::separate && w != "w_down";
  const double* const all = at(packed ? "w_gate_up_scale" : (w + "_scale").c_str()).data();
  const std::int64_t matrix = packed ? 2 * expert + (w == "w_up" ? 1 : 0) : expert;
  switch (scales_of(problem_)) {
    case Scales::tensor:
      return {all + matrix, k};
    case Scales::token:
      return {all + matrix * n + row, k};
    default:
      return {
          all + (matrix * ceil_div(n, scale_block) + row / scale_block) * ceil_div(k, scale_block),
          scale_block};
  }
}

DoubleMatrixView Definition::weight_of_expert(const std::string& w, std::int64_t expert,
                                              std::int64_t n, std::int64_t k, bool transposed,
                                              Matrix& room) {
  const StoredWeight stored = stored_weight(w, expert, n, k, transposed);
  const auto encoded = tensors_.encoded.find(stored.tensor);
  const bool is_encoded = encoded != tensors_.encoded.end();
  const bool scaled = scales_of(problem_) != Scales::none;
  const double* const values = is_encoded ? nullptr : tensors_.at(stored.tensor).data();
  if (!is_encoded && !scaled) return {values + stored.first, stored.pitch, transposed};
  const auto width = count(transposed ? n : k), rows = count(transposed ? k : n);
  make_room(room, rows * width);
  for_each_row(rows, width, parallel_, [&](std::size_t row) {
    const std::size_t from = stored.first + row * count(stored.pitch);
    double* const to = room.data() + row * width;
    if (is_encoded) {
      const EncodedTensor& tensor = encoded->second;
      decode(tensor.dtype, tensor.bytes.data() + from * dtype_bytes(tensor.dtype),
             std::span<double>(to, width));
    } else {
      std::copy_n(values + from, width, to);
    }
    if (!scaled) return;
    const RowScales scales = scales_of_row(w, expert, static_cast<std::int64_t>(row), n, k);
    for (std::size_t i = 0; i < width; ++i) to[i] *= scales.first[i / count(scales.columns)];
  });
  return {room.data(), static_cast<std::int64_t>(width), transposed};
}

void Definition::quantise_hidden(Matrix& hidden) {
  constexpr double largest_number = 448;
  const Scales kind = scales_of(problem_);
  if (kind == Scales::tensor) {
    const double scale = at("hidden_scale").front();
    for_each_row(count(shape_.rows()), count(shape_.h), parallel_, [&](std::size_t row) {
      for (std::size_t i = row * count(shape_.h); i < (row + 1) * count(shape_.h); ++i)
        hidden[i] = round_to(DType::fp8, hidden[i] / scale);
    });
    return;
  }
  const std::int64_t blocks = ceil_div(shape_.h, scale_block);
  Matrix scales(count(shape_.rows() * blocks), 1);
  for_each_row(count(shape_.rows()), count(shape_.h), parallel_, [&](std::size_t index) {
    const auto row = static_cast<std::int64_t>(index);
    for (std::int64_t block = 0; block < blocks; ++block) {
      const auto begin = hidden.begin() + row * shape_.h + block * scale_block;
      const auto end =
          hidden.begin() + row * shape_.h + std::min((block + 1) * scale_block, shape_.h);
      const double largest = largest_magnitude(std::span<const double>(begin, end));
      if (largest == 0) continue;
      const double scale = scales[count(row * blocks + block)] = largest / largest_number;
      for (auto value = begin; value != end; ++value) *value = round_to(DType::fp8, *value / scale);
    }
  });
  set("hidden_scale", std::move(scales));
}

void Definition::add_bias(Matrix& rows, std::int64_t n, const char* name) {
  if (!has_bias(problem_)) return;
  const bool is_up = std::string(name) == "b_up", of_gates = std::string(name) != "b_down";
  const Packing packed = of_gates ? packing_of(problem_) : Packing::separate;
  const Matrix& bias = at(packed == Packing::separate ? name : "b_gate_up");
  for (std::int64_t expert = 0; expert < shape_.all_experts(); ++expert) {
    const std::int64_t first = first_row(expert), last = first_row(expert + 1);
    for_each_row(count(last - first), count(n), parallel_, [&](std::size_t row) {
      for (std::int64_t i = 0; i < n; ++i) {
        std::int64_t place = expert * n + i;
        if (packed == Packing::halves) place = (2 * expert + (is_up ? 1 : 0)) * n + i;
        if (packed == Packing::interleaved) place = 2 * place + (is_up ? 1 : 0);
        rows[(count(first) + row) * count(n) + count(i)] += bias[count(place)];
      }
    });
  }
}

void Definition::down() {
  Matrix rows = product(shape_.d, shape_.h, false, {{"hidden", "w_down"}});
  add_bias(rows, shape_.d, "b_down");
  set("expert_out", std::move(rows));
}

void Definition::gate_up() {
  const auto activation = parse_activation(problem_.option("act"));
  const char* const x = quantises(problem_) ? "x_quantised" : "x";
  Matrix gate = product(shape_.h, shape_.d, false, {{x, "w_gate", true}});
  Matrix up = product(shape_.h, shape_.d, false, {{x, "w_up", true}});
  if (weighs_before(problem_)) {
    const Matrix& weights = at("row_weights");
    for (Matrix* rows : {&gate, &up})
      for_each_row(count(shape_.rows()), count(shape_.h), parallel_, [&](std::size_t row) {
        for (std::size_t i = row * count(shape_.h); i < (row + 1) * count(shape_.h); ++i)
          (*rows)[i] *= weights[row];
      });
  }
  add_bias(gate, shape_.h, "b_gate");
  add_bias(up, shape_.h, "b_up");
  Matrix hidden = matrix(shape_.rows(), shape_.h);
  for_each_row(count(shape_.rows()), count(shape_.h), parallel_, [&](std::size_t row) {
    for (std::size_t i = row * count(shape_.h); i < (row + 1) * count(shape_.h); ++i)
      hidden[i] = activate(activation, gate[i]) * up_factor(activation, up[i]);
  });
  if (stores_gates(problem_)) {
    set("gate", std::move(gate));
    set("up", std::move(up));
  }
  if (scales_of(problem_) != Scales::none) quantise_hidden(hidden);
  set("hidden", std::move(hidden));
}

void Definition::weigh() {
  const auto activation = parse_activation(problem_.option("act"));
  const Packing packed = packing_of(problem_);
  const bool before = weighs_before(problem_);
  const Matrix &d_hidden = at("d_hidden"), &gate = at("gate"), &up = at("up"),
               &places = at("places");
  const auto h = count(shape_.h), d = count(shape_.d);
  Matrix d_weights = matrix(shape_.m, shape_.top_k), hidden = matrix(shape_.rows(), shape_.h);
  Matrix gradients[2][2];  // [weighted or not][of gate and of up, or of both]
  for (auto& each : gradients) {
    each[0] = matrix(shape_.rows(), packed == Packing::separate ? shape_.h : 2 * shape_.h);
    if (packed == Packing::separate) each[1] = each[0];
  }
  const auto set_gradient = [&](Matrix(&to)[2], std::size_t row, std::size_t i, double of_gate,
                                double of_up) {
    if (packed == Packing::separate) {
      to[0][row * h + i] = of_gate;
      to[1][row * h + i] = of_up;
    } else {
      const bool halves = packed == Packing::halves;
      to[0][row * 2 * h + (halves ? i : 2 * i)] = of_gate;
      to[0][row * 2 * h + (halves ? h + i : 2 * i + 1)] = of_up;
    }
  };
  for_each_row(places.size(), h, parallel_, [&](std::size_t choice) {
    if (places[choice] < 0) return;
    const auto row = static_cast<std::size_t>(places[choice]);
    const double weight = weight_of(choice);
    double of_weight = 0;
    for (std::size_t i = 0; i < h; ++i) {
      const std::size_t from = row * h + i;
      const double dc = d_hidden[from], value = activate(activation, gate[from]),
                   factor = up_factor(activation, up[from]);
      const double d_gate = activation_gradient(activation, gate[from], dc * factor),
                   d_up = limits_up(activation, up[from]) ? 0 : dc * value;
      set_gradient(gradients[0], row, i, d_gate, d_up);
      set_gradient(gradients[1], row, i, weight * d_gate, weight * d_up);
      of_weight += dc * value * factor;
      hidden[from] = value * factor * (before ? 1 : weight);
    }
    const std::size_t token = choice / count(shape_.choices()),
                      own = choice % count(shape_.choices());
    if (own >= count(shape_.top_k)) return;
    if (reads_down_bias(problem_)) {
      const auto expert =
          static_cast<std::size_t>(at(own_ids_of(problem_))[token * count(shape_.top_k) + own]);
      for (std::size_t i = 0; i < d; ++i)
        of_weight += at("dy")[token * d + i] * at("b_down")[expert * d + i];
    }
    d_weights[token * count(shape_.top_k) + own] = of_weight;
  });
  for (const bool weighted : {false, true}) {
    const auto names = gate_gradients(problem_, weighted);
    for (std::size_t i = 0; i < names.size(); ++i)
      set(std::string(names[i]), std::move(gradients[weighted ? 1 : 0][i]));
  }
  if (!before) set("d_weights", std::move(d_weights));
  set(std::string(hidden_of_gradient(problem_)), std::move(hidden));
}

void Definition::d_gate_up() {
  const auto gradients = gate_gradients(problem_, true);
  const bool packed = packing_of(problem_) != Packing::separate;
  for (std::size_t i = 0; i < gradients.size(); ++i)
    reduction(packed   ? "dw_gate_up"
              : i == 0 ? "dw_gate"
                       : "dw_up",
              {gradients[i].data(), nullptr}, {"x", nullptr, true},
              packed ? 2 * shape_.h : shape_.h, shape_.d);
}

Matrix Definition::d_x() {
  const auto gradients = gate_gradients(problem_);
  if (packing_of(problem_) != Packing::separate)
    return product(shape_.d, 2 * shape_.h, true, {{gradients[0].data(), "w_gate_up"}});
  return product(shape_.d, shape_.h, true,
                 {{gradients[0].data(), "w_gate"}, {gradients[1].data(), "w_up"}});
}

void Definition::d_biases() {
  const Matrix& tokens = at("tokens");
  for (const BiasGradient& gradient : bias_gradients(problem_)) {
    const bool of_tokens = gradient.rows == "dy";
    const Matrix& rows = at(gradient.rows.data());
    const auto width = count(gradient.width);
    Matrix sums = accumulates(problem_) ? tensors_.at(initial_name(gradient.bias))
                                        : matrix(shape_.all_experts(), gradient.width);
    for (std::int64_t expert = 0; expert < shape_.all_experts(); ++expert)
      for (auto row = count(first_row(expert)); row < count(first_row(expert + 1)); ++row) {
        const std::size_t from = of_tokens ? static_cast<std::size_t>(tokens[row]) : row;
        const double weight = of_tokens && !weighs_before(problem_) ? at("row_weights")[row] : 1;
        for (std::size_t i = 0; i < width; ++i)
          sums[count(expert) * width + i] += weight * rows[from * width + i];
      }
    set(std::string(gradient.bias), std::move(sums));
  }
}

void Definition::combine_before() {
  const Matrix &rows = at("dx_rows"), &places = at("places"), &x = at("x");
  Matrix dx = matrix(shape_.m, shape_.d), d_weights = matrix(shape_.m, shape_.top_k);
  const auto width = count(shape_.d), choices = count(shape_.choices());
  for_each_row(count(shape_.m), width * choices, parallel_, [&](std::size_t token) {
    for (std::size_t own = 0; own < choices; ++own) {
      const std::size_t choice = token * choices + own;
      if (places[choice] < 0) continue;
      const double* const row = rows.data() + static_cast<std::size_t>(places[choice]) * width;
      const double weight = weight_of(choice);
      double sum = 0;
      for (std::size_t i = 0; i < width; ++i) {
        dx[token * width + i] += weight * row[i];
        sum += x[token * width + i] * row[i];
      }
      if (own < count(shape_.top_k)) d_weights[token * count(shape_.top_k) + own] = sum;
    }
  });
  set("dx", std::move(dx));
  set("d_weights", std::move(d_weights));
}

void Definition::combine(const char* rows, bool weighted, const char* y) {
  const Matrix &from = at(rows), &places = at("places");
  Matrix sums =
      has_residual(problem_) ? large_copy(at("residual"), parallel_) : matrix(shape_.m, shape_.d);
  const auto width = count(shape_.d), choices = count(shape_.choices());
  for_each_row(count(shape_.m), width * choices, parallel_, [&](std::size_t token) {
    for (std::size_t choice = token * choices; choice < (token + 1) * choices; ++choice) {
      if (places[choice] < 0) continue;
      const double weight = weighted ? weight_of(choice) : 1;
      const double* const row = from.data() + static_cast<std::size_t>(places[choice]) * width;
      for (std::size_t i = 0; i < width; ++i) sums[token * width + i] += weight * row[i];
    }
  });
  set(y, std::move(sums));
}

}  // namespace

void reference(const Problem& problem, const std::string& stage, ReferenceTensors& tensors,
               Parallel& parallel) {
  Definition of(problem, tensors, parallel);
  const std::int64_t d = of.shape().d, h = of.shape().h;
  if (stage == stage_own_ids)
    of.own_ids();
  else if (stage == stage_route)
    of.route();
  else if (stage == ffn::stage_quantise)
    reference_quantise(ffn::quantised_x(problem), tensors, parallel);
  else if (stage == ffn::stage_expand_gate_up)
    reference_expand(packed_gate_up(problem), tensors, parallel);
  else if (stage == ffn::stage_expand_down)
    reference_expand(packed_down(problem), tensors, parallel);
  else if (stage == ffn::stage_gate_up)
    of.gate_up();
  else if (stage == ffn::stage_down)
    of.down();
  else if (stage == stage_combine)
    of.combine("expert_out", !weighs_before(problem), "y");
  else if (stage == ffn::stage_d_hidden)
    of.set("d_hidden", of.product(h, d, true, {{"dy", "w_down", true}}));
  else if (stage == stage_weigh)
    of.weigh();
  else if (stage == ffn::stage_d_x)
    of.set("dx_rows", of.d_x());
  else if (stage == ffn::stage_d_gate_up)
    of.d_gate_up();
  else if (stage == ffn::stage_d_down)
    of.reduction("dw_down", {"dy", nullptr, true}, {hidden_of_gradient(problem).data(), nullptr}, d,
                 h);
  else if (stage == stage_d_biases)
    of.d_biases();
  else if (weighs_before(problem))
    of.combine_before();
  else
    of.combine("dx_rows", false, "dx");
}

}  // namespace fftune::moe
