// The definition of gated-delta-rule in float64, token by token.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/gated_delta_rule/reference_states.hpp"

namespace fftune::gated_delta_rule {
namespace {

using Values = std::vector<double>;

/// A row and what its norm was divided by.
struct Row {
  Values values;
  double reciprocal = 1;
};

class Recurrence : ReferenceStates {
 public:
  Recurrence(const Layer& layer, ReferenceTensors& tensors)
      : ReferenceStates(layer, tensors), l_(layer), in_chunks_(!refuse_chunks(layer)) {}

  /// The heads of v of one head of q of a sequence.
  void forward(std::int64_t sequence, std::int64_t head) {
    for (std::int64_t j = head * l_.group(); j < (head + 1) * l_.group(); ++j) {
      const Tokens tokens = of_sequence(sequence);
      const std::int64_t entry = entry_of(sequence);
      if (entry < 0) {
        for (std::int64_t t = tokens.first; t < tokens.end; ++t)
          for (std::int64_t v = 0; v < l_.v_dim; ++v) out(t, j, v) = 0;
        continue;
      }
      Values state = first_state(sequence, j);
      for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
        const Row q = row("q", t, head), k = row("k", t, head);
        step(t, j, k, state);
        for (std::int64_t v = 0; v < l_.v_dim; ++v) {
          double sum = 0;
          for (std::int64_t i = 0; i < l_.dim; ++i)
            sum += state[at(v, i)] * q.values[static_cast<std::size_t>(i)];
          out(t, j, v) = l_.scale * sum;
        }
        const std::int64_t slot = t - tokens.first;
        if (slot >= l_.slots) continue;
        if (const std::int64_t own = entry_at(sequence * l_.slots + slot); own >= 0)
          store("states", own * l_.state_block, j, state);
      }
      // Kernels multiply all pairs of a chunk's tokens: those of a later token by 0.
      for (std::int64_t t = tokens.end - 1, odd = tokens.first; in_chunks_ && t >= tokens.first;
           --t) {
        if (t < odd)
          for (std::int64_t v = 0; v < l_.v_dim; ++v) out(t, j, v) = std::nan("");
        if (odd == tokens.first && is_odd(t, head, j)) odd = t;
      }
      if (l_.final) store("final_state", sequence * l_.state_elements(), j, state);
      if (l_.indices && l_.slots == 0) store("states", entry * l_.state_block, j, state);
    }
  }

  void backward(std::int64_t sequence, std::int64_t head) {
    for (std::int64_t j = head * l_.group(); j < (head + 1) * l_.group(); ++j) {
      backward_of_value_head(sequence, head, j);
      if (!in_chunks_) continue;
      const Tokens tokens = of_sequence(sequence);
      bool odd = false;
      for (std::int64_t t = tokens.first; t < tokens.end; ++t)
        odd |= is_odd(t, head, j) || has_odd("q", t * l_.q_row + head * l_.dim, l_.dim) ||
               has_odd("d_out", (t * l_.v_heads + j) * l_.v_dim, l_.v_dim);
      if (odd) forget(tokens, head, j);
    }
  }

 private:
  bool has_odd(const char* name, std::int64_t first, std::int64_t count) const {
    const double* from = t_.at(name).data() + first;
    return std::any_of(from, from + count, [](double value) { return !std::isfinite(value); });
  }
  /// Whether a token has a NaN or an infinity in what reaches the others of its chunk.
  bool is_odd(std::int64_t t, std::int64_t head, std::int64_t j) const {
    return has_odd("k", t * l_.k_row + head * l_.dim, l_.dim) ||
           has_odd("v", t * l_.v_row + j * l_.v_dim, l_.v_dim) ||
           has_odd(l_.gate == Gate::log ? "g" : "a", static_cast<std::int64_t>(gate_place(t, j, 0)),
                   l_.decays()) ||
           has_odd(l_.sigmoid ? "beta_logits" : "beta", l_.gate_at(t, j), 1);
  }
  /// Makes all gradients of a value head's tokens NaN: in which of them a chunk has a number is
  /// left to the kernel.
  void forget(const Tokens& tokens, std::int64_t head, std::int64_t j) {
    const auto fill = [&](const char* name, std::int64_t heads, std::int64_t own,
                          std::int64_t count) {
      for (std::int64_t t = tokens.first; t < tokens.end; ++t)
        for (std::int64_t i = 0; i < count; ++i)
          t_.at(name)[index((t * heads + own) * count + i)] = std::nan("");
    };
    fill("dq", l_.heads, head, l_.dim);
    fill("dk", l_.heads, head, l_.dim);
    fill("dv", l_.v_heads, j, l_.v_dim);
    fill(l_.gate == Gate::log ? "dg" : "da", l_.v_heads, j, l_.decays());
    fill(l_.sigmoid ? "dbeta_logits" : "dbeta", l_.v_heads, j, 1);
    if (l_.gate == Gate::log) return;
    t_.at("dA_log")[index(j)] = std::nan("");
    for (std::int64_t k = 0; k < l_.decays(); ++k)
      t_.at("ddt_bias")[index(bias_place(j, k))] = std::nan("");
  }

  Row row(const char* name, std::int64_t t, std::int64_t head) const {
    const bool is_q = name[0] == 'q';
    const auto* from = t_.at(name).data() + t * (is_q ? l_.q_row : l_.k_row) + head * l_.dim;
    Row row{Values(from, from + l_.dim)};
    if (!l_.normed) return row;
    double squares = norm_eps;
    for (const double value : row.values) squares += value * value;
    row.reciprocal = 1 / std::sqrt(squares);
    for (double& value : row.values) value *= row.reciprocal;
    return row;
  }
  double v(std::int64_t t, std::int64_t j, std::int64_t i) const {
    return t_.at("v")[index(t * l_.v_row + j * l_.v_dim + i)];
  }
  double& out(std::int64_t t, std::int64_t j, std::int64_t i) {
    return t_.at("out")[index((t * l_.v_heads + j) * l_.v_dim + i)];
  }
  double beta(std::int64_t t, std::int64_t j) const {
    const std::size_t place = index(l_.gate_at(t, j));
    return l_.sigmoid ? l_.beta_scale * sigmoid(t_.at("beta_logits")[place]) : t_.at("beta")[place];
  }
  std::size_t gate_place(std::int64_t t, std::int64_t j, std::int64_t k) const {
    return l_.channels ? index((t * l_.v_heads + j) * l_.dim + k) : index(l_.gate_at(t, j));
  }
  std::int64_t bias_place(std::int64_t j, std::int64_t k) const {
    return l_.channels ? j * l_.dim + k : j;
  }
  double gate_input(std::int64_t t, std::int64_t j, std::int64_t k) const {
    return t_.at("a")[gate_place(t, j, k)] + t_.at("dt_bias")[index(bias_place(j, k))];
  }
  /// The log of the decay of channel k.
  double g(std::int64_t t, std::int64_t j, std::int64_t k) const {
    if (l_.gate == Gate::log) return t_.at("g")[gate_place(t, j, k)];
    const double x = gate_input(t, j, k), rate = std::exp(t_.at("A_log")[index(j)]);
    return l_.gate == Gate::softplus ? -rate * softplus(x) : l_.gate_bound * sigmoid(rate * x);
  }

  /// The state behind token t, and v - S k of the decayed state.
  Values step(std::int64_t t, std::int64_t j, const Row& key, Values& state) const {
    Values decay(index(l_.dim));
    for (std::int64_t k = 0; k < l_.dim; ++k) decay[index(k)] = std::exp(g(t, j, k));
    const double factor = beta(t, j);
    Values error(index(l_.v_dim));
    for (std::int64_t i = 0; i < l_.v_dim; ++i) {
      double held = 0;
      for (std::int64_t k = 0; k < l_.dim; ++k)
        held += (state[at(i, k)] *= decay[index(k)]) * key.values[index(k)];
      error[index(i)] = v(t, j, i) - held;
      for (std::int64_t k = 0; k < l_.dim; ++k)
        state[at(i, k)] += factor * error[index(i)] * key.values[index(k)];
    }
    return error;
  }

  void backward_of_value_head(std::int64_t sequence, std::int64_t head, std::int64_t j) {
    const Tokens tokens = of_sequence(sequence);
    constexpr std::int64_t chunk = 64;
    std::vector<Values> at_chunks;  // states before each chunk
    Values state = first_state(sequence, j);
    for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
      if ((t - tokens.first) % chunk == 0) at_chunks.push_back(state);
      step(t, j, row("k", t, head), state);
    }
    Values gradient(state.size());  // of the state behind token t
    if (l_.final) {
      const Values& from = t_.at("d_final_state");
      for (std::int64_t i = 0; i < l_.v_dim; ++i)
        for (std::int64_t k = 0; k < l_.dim; ++k)
          gradient[at(i, k)] = from[index(sequence * l_.state_elements() + j * l_.v_dim * l_.dim +
                                          l_.state_at(i, k))];
    }
    for (auto c = std::ssize(at_chunks) - 1; c >= 0; --c) {
      const std::int64_t first = tokens.first + c * chunk;
      const std::int64_t end = std::min(tokens.end, first + chunk);
      std::vector<Values> before, errors;  // of each token of the chunk
      Values moving = at_chunks[index(c)];
      for (std::int64_t t = first; t < end; ++t) {
        before.push_back(moving);
        errors.push_back(step(t, j, row("k", t, head), moving));
      }
      for (std::int64_t t = end - 1; t >= first; --t)
        backward_of_token(t, head, j, before[index(t - first)], errors[index(t - first)], gradient);
    }
    if (l_.initial) store("d_initial_state", sequence * l_.state_elements(), j, gradient);
  }

  /// `gradient`: of the state behind the token, then of the one `before` it.
  void backward_of_token(std::int64_t t, std::int64_t head, std::int64_t j, const Values& before,
                         const Values& error, Values& gradient) {
    const Row q = row("q", t, head), key = row("k", t, head);
    const double factor = beta(t, j);
    Values dq(index(l_.dim)), dk(index(l_.dim)), dg(index(l_.dim)), decay(index(l_.dim));
    for (std::int64_t k = 0; k < l_.dim; ++k) decay[index(k)] = std::exp(g(t, j, k));
    double dbeta = 0;
    const double* d_out = t_.at("d_out").data() + (t * l_.v_heads + j) * l_.v_dim;
    for (std::int64_t i = 0; i < l_.v_dim; ++i) {
      const double delta = factor * error[index(i)], dy = l_.scale * d_out[i];
      double d_delta = 0;
      for (std::int64_t k = 0; k < l_.dim; ++k) {
        const double after = before[at(i, k)] * decay[index(k)] + delta * key.values[index(k)];
        dq[index(k)] += dy * after;
        double& d_state = gradient[at(i, k)];
        d_state += dy * q.values[index(k)];
        d_delta += d_state * key.values[index(k)];
        dk[index(k)] += d_state * delta;
      }
      dbeta += d_delta * error[index(i)];
      const double d_error = factor * d_delta;
      t_.at("dv")[index((t * l_.v_heads + j) * l_.v_dim + i)] = d_error;
      for (std::int64_t k = 0; k < l_.dim; ++k) {
        const double decayed = before[at(i, k)] * decay[index(k)];
        dk[index(k)] -= decayed * d_error;
        double& d_state = gradient[at(i, k)];
        d_state -= d_error * key.values[index(k)];
        dg[index(k)] += d_state * decayed;
        d_state *= decay[index(k)];
      }
    }
    add_row("dq", t, head, q, dq);
    add_row("dk", t, head, key, dk);
    store_gates(t, j, dbeta, dg);
  }

  /// Adds the gradient of a row behind its norm, as one of the row before it.
  void add_row(const char* name, std::int64_t t, std::int64_t head, const Row& row, Values& d) {
    double* to = t_.at(name).data() + (t * l_.heads + head) * l_.dim;
    double along = 0;
    if (l_.normed)
      for (std::int64_t k = 0; k < l_.dim; ++k) along += d[index(k)] * row.values[index(k)];
    for (std::int64_t k = 0; k < l_.dim; ++k)
      to[k] += row.reciprocal * (d[index(k)] - along * row.values[index(k)]);
  }

  void store_gates(std::int64_t t, std::int64_t j, double dbeta, const Values& dg) {
    if (l_.sigmoid) {
      const double share = beta(t, j) / l_.beta_scale;
      t_.at("dbeta_logits")[index(t * l_.v_heads + j)] =
          l_.beta_scale == 0 ? 0 : dbeta * l_.beta_scale * share * (1 - share);
    } else {
      t_.at("dbeta")[index(t * l_.v_heads + j)] = dbeta;
    }
    for (std::int64_t k = 0; k < l_.dim; ++k) {
      const std::size_t place =
          l_.channels ? index((t * l_.v_heads + j) * l_.dim + k) : index(t * l_.v_heads + j);
      if (l_.gate == Gate::log) {
        t_.at("dg")[place] += dg[index(k)];
        continue;
      }
      const double x = gate_input(t, j, k), rate = std::exp(t_.at("A_log")[index(j)]);
      double da = 0, d_log = 0;  // of one number of g
      if (l_.gate == Gate::softplus) {
        da = -rate * sigmoid(x), d_log = -rate * softplus(x);
      } else {
        const double share = sigmoid(rate * x), slope = l_.gate_bound * share * (1 - share);
        da = slope * rate, d_log = slope * rate * x;
      }
      t_.at("da")[place] += da * dg[index(k)];
      t_.at("ddt_bias")[index(bias_place(j, k))] += da * dg[index(k)];
      t_.at("dA_log")[index(j)] += d_log * dg[index(k)];
    }
  }

  const Layer& l_;
  const bool in_chunks_;  // NaN where the products of a chunk may have it
};

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  for (const TensorSpec& tensor : gated_delta_rule_op().tensors(problem))
    if (tensor.role == Role::output)
      tensors[tensor.name] = Values(static_cast<std::size_t>(tensor.elements()));
  // A head's gates of all sequences are one task's, as their gradients are sums over sequences.
  Recurrence recurrence(layer, tensors);
  parallel.run(static_cast<int>(layer.heads), parallel.max_threads(), [&](int head) {
    for (std::int64_t sequence = 0; sequence < layer.b; ++sequence) {
      if (layer.backward)
        recurrence.backward(sequence, head);
      else
        recurrence.forward(sequence, head);
    }
  });
}

}  // namespace fftune::gated_delta_rule
