// The definition of ssd in float64, token by token.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/gated_delta_rule/reference_states.hpp"
#include "kernels/ssd/ssd.hpp"

namespace fftune::ssd {
namespace {

using gated_delta_rule::sigmoid;
using gated_delta_rule::softplus;
using Values = std::vector<double>;

/// Infinities of steps and of results are NaN: the recurrence and chunks differ in which they have.
double number(double x) {
  return std::isfinite(x) ? x : std::nan("");
}

Values numbers(Values values) {
  std::transform(values.begin(), values.end(), values.begin(), number);
  return values;
}

class Recurrence : gated_delta_rule::ReferenceStates {
 public:
  Recurrence(const Layer& layer, ReferenceTensors& tensors)
      : ReferenceStates(layer, tensors), l_(layer) {}

  void forward(std::int64_t sequence, std::int64_t j) {
    const Tokens tokens = of_sequence(sequence);
    const std::int64_t entry = entry_of(sequence);
    if (entry < 0) {
      for (std::int64_t t = tokens.first; t < tokens.end; ++t)
        for (std::int64_t p = 0; p < l_.v_dim; ++p) t_.at("out")[x_place(t, j, p)] = 0;
      return;
    }
    Values state = first_state(sequence, j);
    std::int64_t odd = tokens.first;  // the last token with a NaN or an infinity
    for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
      step(t, j, state);
      const double *C = row("C", t, j), *x = this->x(t, j);
      double* out = &t_.at("out")[x_place(t, j, 0)];
      for (std::int64_t p = 0; p < l_.v_dim; ++p) {
        double sum = 0;
        for (std::int64_t n = 0; n < l_.dim; ++n) sum += state[at(p, n)] * C[n];
        out[p] = number(sum) + skip(j) * x[p];
      }
      if (is_odd(t, j)) odd = t;
      const std::int64_t slot = t - tokens.first;
      if (slot >= l_.slots) continue;
      if (const std::int64_t own = entry_at(sequence * l_.slots + slot); own >= 0)
        store("states", own * l_.state_block, j, numbers(state));
    }
    if (l_.slots > 0) return;  // no chunks have states behind single tokens
    // Kernels multiply all pairs of a chunk's tokens: those of a later token by 0.
    for (std::int64_t t = tokens.first; t < odd; ++t)
      for (std::int64_t p = 0; p < l_.v_dim; ++p) t_.at("out")[x_place(t, j, p)] = std::nan("");
    if (l_.final) store("final_state", sequence * l_.state_elements(), j, numbers(state));
    if (l_.indices) store("states", entry * l_.state_block, j, numbers(state));
  }

  void backward(std::int64_t sequence, std::int64_t j) {
    const Tokens tokens = of_sequence(sequence);
    std::vector<Values> before;  // the state before each chunk of tokens
    constexpr std::int64_t chunk = 64;
    Values state = first_state(sequence, j);
    bool odd = std::any_of(state.begin(), state.end(), [](double s) { return !std::isfinite(s); });
    for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
      if ((t - tokens.first) % chunk == 0) before.push_back(state);
      step(t, j, state);
      odd |= is_odd(t, j) || has_odd("B", t * l_.k_row + j / l_.group() * l_.dim, l_.dim) ||
             has_odd("C", t * l_.q_row + j / l_.group() * l_.dim, l_.dim) ||
             has_odd("d_out", static_cast<std::int64_t>(x_place(t, j, 0)), l_.v_dim);
    }
    Values gradient(state.size());  // of the state behind token t
    if (l_.final)
      for (std::size_t i = 0; i < gradient.size(); ++i)
        gradient[i] = t_.at("d_final_state")[index(sequence * l_.state_elements()) +
                                             index(j) * gradient.size() + i];
    odd |= std::any_of(gradient.begin(), gradient.end(),
                       [](double one) { return !std::isfinite(one); });
    for (auto c = std::ssize(before) - 1; c >= 0; --c) {
      const std::int64_t first = tokens.first + c * chunk;
      std::vector<Values> states{before[index(c)]};
      for (std::int64_t t = first; t < std::min(tokens.end, first + chunk); ++t) {
        states.push_back(states.back());
        step(t, j, states.back());
      }
      for (auto i = std::ssize(states) - 2; i >= 0; --i)
        backward_of_token(first + i, j, states[index(i)], states[index(i + 1)], gradient);
    }
    if (l_.initial) store("d_initial_state", sequence * l_.state_elements(), j, numbers(gradient));
    if (odd) forget(tokens, j);
  }

 private:
  std::size_t x_place(std::int64_t t, std::int64_t j, std::int64_t p) const {
    return index((t * l_.v_heads + j) * l_.v_dim + p);
  }
  std::size_t row_place(std::int64_t t, std::int64_t j, std::int64_t n) const {
    return index((t * l_.heads + j / l_.group()) * l_.dim + n);
  }

  bool has_odd(const char* name, std::int64_t first, std::int64_t count) const {
    const double* from = t_.at(name).data() + first;
    return std::any_of(from, from + count, [](double value) { return !std::isfinite(value); });
  }
  bool is_odd(std::int64_t t, std::int64_t j) const {
    return has_odd("x", t * l_.v_row + j * l_.v_dim, l_.v_dim) ||
           !std::isfinite(dt(t, j) + std::exp(dt(t, j) * A(j)));
  }
  /// Makes all gradients of a head's tokens NaN: in which of them a chunk has a number is left to
  /// the kernel.
  void forget(const Tokens& tokens, std::int64_t j) {
    const auto fill = [this](const char* name, std::size_t first, std::int64_t count) {
      std::fill_n(t_.at(name).begin() + static_cast<std::ptrdiff_t>(first), count, std::nan(""));
    };
    for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
      fill("dx", x_place(t, j, 0), l_.v_dim);
      fill("ddt", index(t * l_.v_heads + j), 1);
      fill("dB", row_place(t, j, 0), l_.dim);
      fill("dC", row_place(t, j, 0), l_.dim);
    }
  }

  const double* x(std::int64_t t, std::int64_t j) const {
    return t_.at("x").data() + t * l_.v_row + j * l_.v_dim;
  }
  /// B or C.
  const double* row(const char* name, std::int64_t t, std::int64_t j) const {
    const std::int64_t row = name[0] == 'B' ? l_.k_row : l_.q_row;
    return t_.at(name).data() + t * row + j / l_.group() * l_.dim;
  }
  double A(std::int64_t j) const {
    return l_.given ? t_.at("A")[index(j)] : -std::exp(t_.at("A_log")[index(j)]);
  }
  double skip(std::int64_t j) const { return l_.skip ? t_.at("D")[index(j)] : 0; }
  double dt_input(std::int64_t t, std::int64_t j) const {
    return t_.at("dt")[index(t * l_.gate_row + j)] + (l_.bias ? t_.at("dt_bias")[index(j)] : 0);
  }
  double dt_without_limits(std::int64_t t, std::int64_t j) const {
    return l_.softplus ? softplus(dt_input(t, j)) : dt_input(t, j);
  }
  double dt(std::int64_t t, std::int64_t j) const {
    const double step = dt_without_limits(t, j);
    return number(step < l_.dt_min ? l_.dt_min : step > l_.dt_max ? l_.dt_max : step);
  }

  /// The state behind token t.
  void step(std::int64_t t, std::int64_t j, Values& state) const {
    const double step = dt(t, j), decay = std::exp(step * A(j));
    const double *B = row("B", t, j), *x = this->x(t, j);
    for (std::int64_t p = 0; p < l_.v_dim; ++p)
      for (std::int64_t n = 0; n < l_.dim; ++n)
        state[at(p, n)] = decay * state[at(p, n)] + step * x[p] * B[n];
  }

  /// `gradient`: of the state `after` the token, then of the one `before` it.
  void backward_of_token(std::int64_t t, std::int64_t j, const Values& before, const Values& after,
                         Values& gradient) {
    const double step = dt(t, j), decay = std::exp(step * A(j));
    double of_step = 0, of_decay = 0, of_skip = 0;  // of_decay: the gradient of dt A
    const double *B = row("B", t, j), *C = row("C", t, j), *x = this->x(t, j);
    const double* d_out = t_.at("d_out").data() + x_place(t, j, 0);
    double *dB = &t_.at("dB")[row_place(t, j, 0)], *dC = &t_.at("dC")[row_place(t, j, 0)];
    double* dx = &t_.at("dx")[x_place(t, j, 0)];
    for (std::int64_t p = 0; p < l_.v_dim; ++p) {
      double written = 0;
      for (std::int64_t n = 0; n < l_.dim; ++n) {
        double& d_state = gradient[at(p, n)];
        dC[n] += d_out[p] * after[at(p, n)];
        d_state += d_out[p] * C[n];
        dB[n] += d_state * step * x[p];
        written += d_state * B[n];
        d_state *= decay;
        of_decay += d_state * before[at(p, n)];
      }
      dx[p] = step * written + skip(j) * d_out[p];
      of_step += written * x[p];
      of_skip += x[p] * d_out[p];
    }
    of_step = number(of_step + of_decay * A(j));
    t_.at(l_.given ? "dA" : "dA_log")[index(j)] += number(of_decay) * step * (l_.given ? 1 : A(j));
    if (l_.skip) t_.at("dD")[index(j)] += number(of_skip);
    const double unlimited = dt_without_limits(t, j);
    if (unlimited < l_.dt_min || unlimited > l_.dt_max) of_step = 0;
    if (l_.softplus) of_step *= sigmoid(dt_input(t, j));
    t_.at("ddt")[index(t * l_.v_heads + j)] = of_step;
    if (l_.bias) t_.at("ddt_bias")[index(j)] += of_step;
  }

  const Layer& l_;
};

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  for (const TensorSpec& tensor : ssd_op().tensors(problem))
    if (tensor.role == Role::output)
      tensors[tensor.name] = Values(static_cast<std::size_t>(tensor.elements()));
  Recurrence recurrence(layer, tensors);
  // Gradients of B, C and parameters are sums: all heads of a group are one task's.
  const std::int64_t heads = layer.backward ? layer.group() : 1;
  parallel.run(static_cast<int>(layer.v_heads / heads), parallel.max_threads(), [&](int task) {
    for (std::int64_t j = task * heads; j < (task + 1) * heads; ++j)
      for (std::int64_t sequence = 0; sequence < layer.b; ++sequence) {
        if (layer.backward)
          recurrence.backward(sequence, j);
        else
          recurrence.forward(sequence, j);
      }
  });
}

}  // namespace fftune::ssd
