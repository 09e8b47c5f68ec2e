// gated-delta-rule on the CPU: the recurrence, token by token. The forward pass shares out blocks
// of rows of the states, which do not depend on each other; the backward pass heads of sequences.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/gated_delta_rule/cpu_states.hpp"

namespace fftune::gated_delta_rule {
namespace {

constexpr std::int64_t lanes = 16;  // partial sums of a dot product: what vector registers add up

/// Features of a row, zeros behind the last one up to whole lanes.
using Row = std::vector<float>;

float dot(const float* a, const float* b, std::size_t width) {
  float sums[lanes] = {};
  for (std::size_t i = 0; i < width; i += lanes)
    for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  float sum = 0;
  for (const float one : sums) sum += one;
  return sum;
}
void add_scaled(float* to, const float* from, float factor, std::size_t width) {
  for (std::size_t i = 0; i < width; ++i) to[i] += factor * from[i];
}
float sigmoid(float x) {
  return 1 / (1 + std::exp(-x));
}
float softplus(float x) {
  return std::fmax(x, 0.0f) + std::log1p(std::exp(-std::abs(x)));
}

/// The tensors of a call, as floats.
class Host : public HostStates<Layer> {
 public:
  Host(const Problem& problem, const HostCall& call)
      : HostStates(layer_of(problem), call, TensorPlaces(gated_delta_rule_op().tensors(problem))),
        width(static_cast<std::size_t>((layer.dim + lanes - 1) / lanes * lanes)) {}

  const std::size_t width;  // of rows of q and k, and of a state

  float at(const char* name, DType dtype, std::int64_t place) const {
    float value = 0;
    read(name, dtype, place, {&value, 1});
    return value;
  }

  struct Key {
    Row row;
    float reciprocal = 1;  // of its norm
  };
  Key key(const char* name, std::int64_t t, std::int64_t row, std::int64_t head) const {
    Key key{Row(width)};
    read(name, layer.dtype, t * row + head * layer.dim,
         {key.row.data(), static_cast<std::size_t>(layer.dim)});
    if (!layer.normed) return key;
    key.reciprocal =
        1 / std::sqrt(dot(key.row.data(), key.row.data(), width) + static_cast<float>(norm_eps));
    for (float& value : key.row) value *= key.reciprocal;
    return key;
  }
  Key q(std::int64_t t, std::int64_t j) const {
    return key("q", t, layer.q_row, j / layer.group());
  }
  Key k(std::int64_t t, std::int64_t j) const {
    return key("k", t, layer.k_row, j / layer.group());
  }
  float beta(std::int64_t t, std::int64_t j) const {
    const std::int64_t place = layer.gate_at(t, j);
    return layer.sigmoid ? layer.beta_scale * sigmoid(at("beta_logits", layer.dtype, place))
                         : at("beta", DType::f32, place);
  }
  std::int64_t gate_place(std::int64_t t, std::int64_t j, std::int64_t k) const {
    return layer.channels ? (t * layer.v_heads + j) * layer.dim + k : layer.gate_at(t, j);
  }
  std::int64_t bias_place(std::int64_t j, std::int64_t k) const {
    return layer.channels ? j * layer.dim + k : j;
  }
  /// a + dt_bias, and exp(A_log).
  struct GateInput {
    float x = 0, rate = 0;
  };
  GateInput gate_input(std::int64_t t, std::int64_t j, std::int64_t k) const {
    return {at("a", layer.dtype, gate_place(t, j, k)) + at("dt_bias", DType::f32, bias_place(j, k)),
            std::exp(at("A_log", DType::f32, j))};
  }
  float g(std::int64_t t, std::int64_t j, std::int64_t k) const {
    if (layer.gate == Gate::log) return at("g", DType::f32, gate_place(t, j, k));
    const auto [x, rate] = gate_input(t, j, k);
    return layer.gate == Gate::softplus ? -rate * softplus(x)
                                        : layer.gate_bound * sigmoid(rate * x);
  }
  /// The decay of each channel.
  Row decay(std::int64_t t, std::int64_t j) const {
    Row decay(width);
    if (!layer.channels) {
      std::fill(decay.begin(), decay.end(), std::exp(g(t, j, 0)));
      return decay;
    }
    for (std::int64_t k = 0; k < layer.dim; ++k)
      decay[static_cast<std::size_t>(k)] = std::exp(g(t, j, k));
    return decay;
  }

  /// Rows [first, end) of a state of value head j at an element of a tensor of states.
  void load_state(const char* name, DType dtype, std::int64_t at, std::int64_t j,
                  std::int64_t first, std::int64_t end, Row& state) const {
    move_state(j, at, first, end, [&](std::int64_t place, std::size_t own) {
      state[own] = this->at(name, dtype, place);
    });
  }
  void store_state(const char* name, DType dtype, std::int64_t at, std::int64_t j,
                   std::int64_t first, std::int64_t end, const Row& state) const {
    move_state(j, at, first, end, [&](std::int64_t place, std::size_t own) {
      write(name, dtype, place, {&state[own], 1});
    });
  }

 private:
  template <typename Move>
  void move_state(std::int64_t j, std::int64_t at, std::int64_t first, std::int64_t end,
                  const Move& move) const {
    for (std::int64_t v = first; v < end; ++v)
      for (std::int64_t k = 0; k < layer.dim; ++k)
        move(at + j * layer.v_dim * layer.dim + layer.state_at(v, k),
             static_cast<std::size_t>(v - first) * width + static_cast<std::size_t>(k));
  }
};

/// The tokens of a value head of a sequence, for rows [first, end) of its state.
class Forward {
 public:
  Forward(const Host& host, std::int64_t sequence, std::int64_t j, std::int64_t first,
          std::int64_t end)
      : h_(host), l_(host.layer), sequence_(sequence), j_(j), first_(first), end_(end) {}

  void run() {
    const Tokens tokens = h_.tokens(sequence_);
    const std::int64_t place = h_.state_place(sequence_);
    Row out(static_cast<std::size_t>(end_ - first_));
    if (place < 0) {
      for (std::int64_t t = tokens.first; t < tokens.end; ++t) write_out(t, out);
      return;
    }
    Row state(out.size() * h_.width);
    if (const char* name = h_.first_state(sequence_))
      h_.load_state(name, l_.state_dtype, place, j_, first_, end_, state);
    Row v(out.size());
    for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
      const Row q = h_.q(t, j_).row, k = h_.k(t, j_).row, decay = h_.decay(t, j_);
      const float beta = h_.beta(t, j_);
      h_.read("v", l_.dtype, t * l_.v_row + j_ * l_.v_dim + first_, v);
      for (std::size_t i = 0; i < out.size(); ++i) {
        float* row = &state[i * h_.width];
        for (std::size_t c = 0; c < h_.width; ++c) row[c] *= decay[c];
        add_scaled(row, k.data(), beta * (v[i] - dot(row, k.data(), h_.width)), h_.width);
        out[i] = l_.scale * dot(row, q.data(), h_.width);
      }
      write_out(t, out);
      if (const std::int64_t own = h_.slot_place(sequence_, t - tokens.first); own >= 0)
        h_.store_state("states", l_.state_dtype, own, j_, first_, end_, state);
    }
    if (const char* name = h_.last_state())
      h_.store_state(name, l_.state_dtype, place, j_, first_, end_, state);
  }

 private:
  void write_out(std::int64_t t, const Row& out) const {
    h_.write("out", l_.dtype, (t * l_.v_heads + j_) * l_.v_dim + first_, out);
  }

  const Host& h_;
  const Layer& l_;
  std::int64_t sequence_, j_, first_, end_;
};

Program forward_program(const Problem& problem, const DeviceFacts&, const Config& config) {
  return host_program(gated_delta_rule_op().tensors(problem).size(),
                      [problem, rows = config.at("rows")](const HostCall& call) {
                        const Host host(problem, call);
                        for_each_state_rows(host.layer, rows, call.parallel,
                                            [&](std::int64_t sequence, std::int64_t head,
                                                std::int64_t first, std::int64_t end) {
                                              Forward(host, sequence, head, first, end).run();
                                            });
                      });
}

/// The backward pass of the value heads of a head of q in a sequence. It walks forward once and
/// keeps the states before each chunk; within a chunk, from the last on, it keeps the state before
/// each token.
class Backward {
 public:
  /// `parameters`: of this sequence, gradients of A_log [v-heads], then of dt_bias.
  Backward(const Host& host, std::int64_t sequence, std::int64_t head, float* parameters)
      : h_(host),
        l_(host.layer),
        sequence_(sequence),
        head_(head),
        parameters_(parameters),
        tokens_(host.tokens(sequence)) {}

  void run() {
    const auto count = static_cast<std::size_t>(tokens_.end - tokens_.first);
    dq_.assign(count * h_.width, 0);
    dk_.assign(count * h_.width, 0);
    for (std::int64_t j = head_ * l_.group(); j < (head_ + 1) * l_.group(); ++j) value_head(j);
    for (std::int64_t t = tokens_.first; t < tokens_.end; ++t) {
      const auto own = static_cast<std::size_t>(t - tokens_.first) * h_.width;
      write_row("dq", t, h_.q(t, head_ * l_.group()), &dq_[own]);
      write_row("dk", t, h_.k(t, head_ * l_.group()), &dk_[own]);
    }
  }

 private:
  static constexpr std::int64_t chunk = 32;

  /// A token of a value head, read once.
  struct Token {
    Row q, k, decay, v;
    float beta = 0;
  };
  Token token(std::int64_t t, std::int64_t j) const {
    Token token{h_.q(t, j).row, h_.k(t, j).row, h_.decay(t, j),
                Row(static_cast<std::size_t>(l_.v_dim)), h_.beta(t, j)};
    h_.read("v", l_.dtype, t * l_.v_row + j * l_.v_dim, token.v);
    return token;
  }
  /// The state behind the token, and what it got wrong of v.
  Row step(const Token& token, Row& state) const {
    Row error(token.v.size());
    for (std::size_t i = 0; i < error.size(); ++i) {
      float* row = &state[i * h_.width];
      for (std::size_t c = 0; c < h_.width; ++c) row[c] *= token.decay[c];
      error[i] = token.v[i] - dot(row, token.k.data(), h_.width);
      add_scaled(row, token.k.data(), token.beta * error[i], h_.width);
    }
    return error;
  }

  void value_head(std::int64_t j) {
    const std::int64_t at = sequence_ * l_.state_elements();
    Row state(static_cast<std::size_t>(l_.v_dim) * h_.width), gradient(state.size());
    if (l_.initial) h_.load_state("initial_state", l_.state_dtype, at, j, 0, l_.v_dim, state);
    if (l_.final) h_.load_state("d_final_state", DType::f32, at, j, 0, l_.v_dim, gradient);
    std::vector<Row> before_chunks;
    for (std::int64_t t = tokens_.first; t < tokens_.end; ++t) {
      if ((t - tokens_.first) % chunk == 0) before_chunks.push_back(state);
      step(token(t, j), state);
    }
    while (!before_chunks.empty()) {
      const std::int64_t first = tokens_.first + (std::ssize(before_chunks) - 1) * chunk;
      std::vector<Token> tokens;
      std::vector<Row> before, errors;
      Row moving = std::move(before_chunks.back());
      before_chunks.pop_back();
      for (std::int64_t t = first; t < std::min(tokens_.end, first + chunk); ++t) {
        tokens.push_back(token(t, j));
        before.push_back(moving);
        errors.push_back(step(tokens.back(), moving));
      }
      for (auto i = tokens.size(); i-- > 0;)
        one_token(first + static_cast<std::int64_t>(i), j, tokens[i], before[i], errors[i],
                  gradient);
    }
    if (l_.initial) h_.store_state("d_initial_state", DType::f32, at, j, 0, l_.v_dim, gradient);
  }

  /// `gradient`: of the state behind the token, then of the one `before` it.
  void one_token(std::int64_t t, std::int64_t j, const Token& token, const Row& before,
                 const Row& error, Row& gradient) {
    const auto own = static_cast<std::size_t>(t - tokens_.first) * h_.width;
    float *dq = &dq_[own], *dk = &dk_[own];
    Row dv(error.size()), d_out(error.size()), decayed(h_.width), dg(h_.width);
    h_.read("d_out", l_.dtype, (t * l_.v_heads + j) * l_.v_dim, d_out);
    float dbeta = 0;
    for (std::size_t i = 0; i < error.size(); ++i) {
      float* row = &gradient[i * h_.width];
      const float dy = l_.scale * d_out[i], delta = token.beta * error[i];
      for (std::size_t c = 0; c < h_.width; ++c) {
        decayed[c] = before[i * h_.width + c] * token.decay[c];
        dq[c] += dy * (decayed[c] + delta * token.k[c]);
        row[c] += dy * token.q[c];
        dk[c] += row[c] * delta;
      }
      const float d_delta = dot(row, token.k.data(), h_.width);
      dbeta += d_delta * error[i];
      dv[i] = token.beta * d_delta;
      for (std::size_t c = 0; c < h_.width; ++c) {
        dk[c] -= decayed[c] * dv[i];
        row[c] -= dv[i] * token.k[c];
        dg[c] += row[c] * decayed[c];
        row[c] *= token.decay[c];
      }
    }
    h_.write("dv", l_.dtype, (t * l_.v_heads + j) * l_.v_dim, dv);
    const std::int64_t place = t * l_.v_heads + j;
    if (l_.sigmoid) {
      const float logit = h_.at("beta_logits", l_.dtype, l_.gate_at(t, j));
      dbeta *= l_.beta_scale * sigmoid(logit) * sigmoid(-logit);
      h_.write("dbeta_logits", l_.dtype, place, {&dbeta, 1});
    } else {
      h_.write("dbeta", DType::f32, place, {&dbeta, 1});
    }
    write_decays(t, j, dg);
  }

  void write_decays(std::int64_t t, std::int64_t j, Row& dg) const {
    const std::int64_t place = (t * l_.v_heads + j) * l_.decays();
    if (!l_.channels)
      for (std::size_t c = 1; c < dg.size(); ++c) dg[0] += dg[c];
    dg.resize(static_cast<std::size_t>(l_.decays()));
    if (l_.gate == Gate::log) return h_.write("dg", DType::f32, place, dg);
    for (std::int64_t k = 0; k < l_.decays(); ++k) {
      float& one = dg[static_cast<std::size_t>(k)];
      const auto [x, rate] = h_.gate_input(t, j, k);
      float of_input = 0, of_log = 0;  // gradients of g
      if (l_.gate == Gate::softplus) {
        of_input = -rate * sigmoid(x), of_log = -rate * softplus(x);
      } else {
        const float slope = l_.gate_bound * sigmoid(rate * x) * sigmoid(-rate * x);
        of_input = slope * rate, of_log = slope * rate * x;
      }
      parameters_[j] += of_log * one;
      one *= of_input;
      parameters_[l_.v_heads + h_.bias_place(j, k)] += one;
    }
    h_.write("da", l_.dtype, place, dg);
  }

  void write_row(const char* name, std::int64_t t, const Host::Key& key, float* gradient) const {
    const float along = l_.normed ? dot(gradient, key.row.data(), h_.width) : 0;
    for (std::size_t c = 0; c < h_.width; ++c)
      gradient[c] = key.reciprocal * (gradient[c] - along * key.row[c]);
    h_.write(name, l_.dtype, (t * l_.heads + head_) * l_.dim,
             {gradient, static_cast<std::size_t>(l_.dim)});
  }

  const Host& h_;
  const Layer& l_;
  std::int64_t sequence_, head_;
  float* parameters_;
  Tokens tokens_;
  Row dq_, dk_;
};

Program backward_program(const Problem& problem, const DeviceFacts&, const Config&) {
  return host_program(
      gated_delta_rule_op().tensors(problem).size(), [problem](const HostCall& call) {
        const Host host(problem, call);
        const Layer& layer = host.layer;
        // Gradients of the gate's parameters of each sequence, added up in their order.
        const std::int64_t parameters = layer.v_heads * (1 + layer.decays());
        std::vector<float> sums(static_cast<std::size_t>(layer.b * parameters));
        call.parallel.run(static_cast<int>(layer.b * layer.heads), call.parallel.max_threads(),
                          [&](int task) {
                            const std::int64_t sequence = task / layer.heads;
                            Backward(host, sequence, task % layer.heads,
                                     &sums[static_cast<std::size_t>(sequence * parameters)])
                                .run();
                          });
        if (layer.gate == Gate::log) return;
        for (std::int64_t i = 0; i < parameters; ++i) {
          double sum = 0;
          for (std::int64_t sequence = 0; sequence < layer.b; ++sequence)
            sum += static_cast<double>(sums[static_cast<std::size_t>(sequence * parameters + i)]);
          const bool is_log = i < layer.v_heads;
          host.data<float>(is_log ? "dA_log" : "ddt_bias")[is_log ? i : i - layer.v_heads] =
              static_cast<float>(sum);
        }
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const std::vector<StageFamily> families{
      cpu_fallback(
          {.name = "cpu_recurrent",
           .summary = "rows of states on several threads, token by token",
           .pass = "fwd",
           .sources = {"gated_delta_rule/cpu_families.cpp", "gated_delta_rule/cpu_states.hpp"},
           .search = {[](const Problem& problem, const DeviceFacts&) {
                        return state_rows_space(layer_of(problem));
                      },
                      [](const Problem& problem, const DeviceFacts&) {
                        return state_rows_default(layer_of(problem));
                      }},
           .program = forward_program}),
      cpu_fallback(
          {.name = "cpu_recurrent_backward",
           .summary = "heads of sequences on several threads, token by token",
           .pass = "bwd",
           .sources = {"gated_delta_rule/cpu_families.cpp", "gated_delta_rule/cpu_states.hpp"},
           .program = backward_program})};
  return addresses_of(families);
}

}  // namespace fftune::gated_delta_rule
