// The definition in float64. A task has a block of queries of one head, or in the backward pass a
// block of keys: two to four small products. They stay on the CPU, because the scores that they
// make are as many as the operations on them.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/blas.hpp"
#include "device/parallel.hpp"
#include "kernels/attention/attention.hpp"

namespace fftune::attention {
namespace {

constexpr std::int64_t block = 128;  // queries, or keys, of a task
constexpr double infinity = std::numeric_limits<double>::infinity();

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

using Values = std::vector<double>;

struct Sequence {
  std::int64_t index = 0;
  std::int64_t first_query = 0, queries = 0;  // tokens of q
  std::int64_t first_key = 0, keys = 0;       // tokens of k and v, unless they are paged
};

struct Keys {
  std::int64_t first = 0, last = 0;
  std::int64_t count() const { return last - first; }
};

/// The inputs, read as the definition reads them.
class Inputs {
 public:
  Inputs(const Layer& layer, const ReferenceTensors& tensors)
      : layer_(layer),
        tensors_(tensors),
        mask_(data_of("mask")),
        mask_bits_(data_of("mask_bits")),
        bias_(data_of("bias")) {}

  Sequence sequence(std::int64_t index) const {
    Sequence sequence{index, index * layer_.s, layer_.s, index * layer_.kv, layer_.kv};
    if (layer_.layout == Layout::thd) {
      std::tie(sequence.first_query, sequence.queries) = range("offsets", index, layer_.s);
      std::tie(sequence.first_key, sequence.keys) =
          range(layer_.kv_offsets ? "kv_offsets" : "offsets", index, layer_.kv);
    }
    if (layer_.lengths) sequence.keys = bounded(tensors_.at("lengths")[at(index)], 0, layer_.kv);
    return sequence;
  }

  /// Rows of one head as a matrix [count, dim].
  Values query_rows(const char* name, const Sequence& sequence, std::int64_t head,
                    std::int64_t first, std::int64_t count) const {
    const bool is_q = std::string_view(name) == "q";
    const std::int64_t features = is_q ? layer_.dim : layer_.v_dim;
    const std::int64_t row = is_q ? layer_.q_row : layer_.heads * features;
    Values rows;
    for (std::int64_t i = first; i < first + count; ++i)
      append(rows, name, (sequence.first_query + i) * row + head * features, features);
    return rows;
  }
  Values key_rows(const char* name, const Sequence& sequence, std::int64_t head, std::int64_t first,
                  std::int64_t count) const {
    const bool is_k = std::string_view(name) == "k";
    const std::int64_t features = is_k ? layer_.dim : layer_.v_dim;
    const std::int64_t row = is_k ? layer_.k_row : layer_.v_row;
    const std::int64_t place = head * (is_k ? layer_.kv_head : layer_.v_head);
    Values rows;
    for (std::int64_t j = first; j < first + count; ++j) {
      const std::int64_t token = key_token(sequence, j);
      if (token < 0)
        rows.insert(rows.end(), at(features), 0.0);
      else
        append(rows, name, token * row + place, features);
    }
    if (layer_.cache_format.e4m3) {
      const double scale =
          tensors_.at(std::string(name) + "_scale")[at(layer_.cache_format.scale_at(head))];
      for (double& value : rows) value *= scale;
    }
    return rows;
  }

  /// Keys from the first to the last that any of these queries is allowed.
  Keys keys_of(const Sequence& sequence, std::int64_t first, std::int64_t count) const {
    Keys keys = keys_of(sequence, first);
    for (std::int64_t i = first + 1; i < first + count; ++i) {
      const Keys others = keys_of(sequence, i);
      if (others.count() <= 0) continue;
      if (keys.count() <= 0) keys = others;
      keys = {std::min(keys.first, others.first), std::max(keys.last, others.last)};
    }
    return keys;
  }

  bool allows(const Sequence& sequence, std::int64_t head, std::int64_t i, std::int64_t j) const {
    const Keys keys = keys_of(sequence, i);
    if (j < keys.first || j >= keys.last) return false;
    const std::int64_t row = layer_.mask_row(sequence.index, head) + i;
    if (layer_.mask == Mask::boolean) return mask_[row * layer_.kv + j] != 0;
    if (layer_.mask != Mask::packed) return true;
    const double word = mask_bits_[row * mask_words(layer_.kv) + j / 32];
    return (static_cast<std::uint32_t>(static_cast<std::int32_t>(word)) >> (j % 32) & 1) != 0;
  }

  double bias(const Sequence& sequence, std::int64_t head, std::int64_t i, std::int64_t j) const {
    if (!layer_.bias) return 0;
    return bias_[layer_.bias_at(sequence.index, head) + i * layer_.kv + j];
  }
  /// The sink's logit; -inf without sinks.
  double sink(std::int64_t head) const {
    return layer_.sinks ? tensors_.at("sinks")[at(head)] : -infinity;
  }
  double lse(const Sequence& sequence, std::int64_t head, std::int64_t i) const {
    return tensors_.at("lse")[at(lse_place(sequence, head, i))];
  }
  std::int64_t lse_place(const Sequence& sequence, std::int64_t head, std::int64_t i) const {
    const std::int64_t first = layer_.layout == Layout::thd ? sequence.first_query : 0;
    return layer_.lse_at(sequence.index, head) + first + i;
  }

 private:
  const double* data_of(const char* name) const {
    const auto tensor = tensors_.find(name);
    return tensor == tensors_.end() ? nullptr : tensor->second.data();
  }

  static std::int64_t bounded(double value, std::int64_t least, std::int64_t most) {
    return std::clamp(static_cast<std::int64_t>(value), least, most);
  }
  std::pair<std::int64_t, std::int64_t> range(const char* name, std::int64_t index,
                                              std::int64_t tokens) const {
    const auto& offsets = tensors_.at(name);
    const std::int64_t first = bounded(offsets[at(index)], 0, tokens);
    return {first, bounded(offsets[at(index + 1)], first, tokens) - first};
  }

  /// A key's row of k and v; -1 where its page is not in the cache.
  std::int64_t key_token(const Sequence& sequence, std::int64_t j) const {
    if (layer_.page == 0) return sequence.first_key + j;
    const double page =
        tensors_.at("pages")[at(sequence.index * layer_.pages_of_sequence() + j / layer_.page)];
    if (page < 0 || page >= static_cast<double>(layer_.pages)) return -1;
    return static_cast<std::int64_t>(page) * layer_.page + j % layer_.page;
  }

  void append(Values& rows, const char* name, std::int64_t place, std::int64_t features) const {
    const auto first = tensors_.at(name).begin() + static_cast<std::ptrdiff_t>(place);
    rows.insert(rows.end(), first, first + static_cast<std::ptrdiff_t>(features));
  }

  Keys keys_of(const Sequence& sequence, std::int64_t i) const {
    const std::int64_t position = i + sequence.keys - sequence.queries;
    Keys keys{0, sequence.keys};
    if (layer_.mask == Mask::causal) keys.last = std::min(keys.last, position + 1);
    if (layer_.window > 0) keys.first = std::max<std::int64_t>(0, position - layer_.window + 1);
    return keys;
  }

  const Layer& layer_;
  const ReferenceTensors& tensors_;
  const double *mask_, *mask_bits_, *bias_;
};

/// c [m,n] = a · bᵀ, where an operand that is transposed lies as [k,m] or [k,n].
Values product(std::int64_t m, std::int64_t n, std::int64_t k, const Values& a, const Values& b,
               bool a_transposed = false, bool b_transposed = false) {
  Values c(at(m * n));
  if (m > 0 && n > 0 && k > 0)
    dgemm(m, n, k, {a.data(), a_transposed ? m : k, a_transposed},
          {b.data(), b_transposed ? n : k, b_transposed}, 0, c.data(), n);
  return c;
}

/// Scores of a block of queries and one of keys, -inf where a key is not allowed, and the slope of
/// the soft cap.
struct Scores {
  Values values, slope;
};

Scores scores_of(const Layer& layer, const Inputs& inputs, const Sequence& sequence,
                 std::int64_t head, std::int64_t first_query, const Values& q, Keys keys,
                 const Values& k) {
  const std::int64_t queries = std::ssize(q) / layer.dim;
  Scores scores;
  scores.values = product(queries, keys.count(), layer.dim, q, k);
  if (layer.softcap > 0) scores.slope.resize(scores.values.size());
  for (std::int64_t i = 0; i < queries; ++i)
    for (std::int64_t j = 0; j < keys.count(); ++j) {
      double& score = scores.values[at(i * keys.count() + j)];
      const std::int64_t query = first_query + i, key = keys.first + j;
      score *= double{layer.scale};
      if (layer.softcap > 0) {
        const double bounded = std::tanh(score / double{layer.softcap});
        score = bounded * double{layer.softcap};
        scores.slope[at(i * keys.count() + j)] = 1 - bounded * bounded;
      }
      score += inputs.bias(sequence, head, query, key);
      if (!inputs.allows(sequence, head, query, key)) score = -infinity;
    }
  return scores;
}

/// A task of each block of a sequence's queries or keys, for each of `heads` heads.
template <typename Body>
void for_each_block(const Layer& layer, const Inputs& inputs, std::int64_t heads, bool of_keys,
                    Parallel& parallel, const Body& body) {
  struct Task {
    Sequence sequence;
    std::int64_t head, first, count;
  };
  std::vector<Task> tasks;
  for (std::int64_t index = 0; index < layer.b; ++index) {
    const Sequence sequence = inputs.sequence(index);
    const std::int64_t all = of_keys ? sequence.keys : sequence.queries;
    for (std::int64_t head = 0; head < heads; ++head)
      for (std::int64_t first = 0; first < all; first += block)
        tasks.push_back({sequence, head, first, std::min(block, all - first)});
  }
  const BlasThreads alone(1);
  parallel.run(static_cast<int>(tasks.size()), parallel.max_threads(), [&](int index) {
    const Task& task = tasks[at(index)];
    body(task.sequence, task.head, task.first, task.count);
  });
}

void copy_rows(const Values& from, Values& to, std::int64_t dim, std::int64_t row,
               std::int64_t first) {
  for (std::int64_t i = 0; i * dim < std::ssize(from); ++i)
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(i * dim), dim,
                to.begin() + static_cast<std::ptrdiff_t>(i * row + first));
}

void forward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  const Inputs inputs(layer, tensors);
  const std::int64_t row = layer.heads * layer.v_dim;
  auto out = large_vector<double>(at(layer.q_tokens() * row), parallel);
  auto lse = large_vector<double>(at(layer.q_tokens() * layer.heads), parallel);
  // Queries of no sequence do not occur: offsets end at the last.
  for_each_block(
      layer, inputs, layer.heads, false, parallel,
      [&](const Sequence& sequence, std::int64_t head, std::int64_t first, std::int64_t count) {
        const Keys keys = inputs.keys_of(sequence, first, count);
        const std::int64_t width = std::max<std::int64_t>(0, keys.count());
        const std::int64_t shared = head / layer.group();
        const auto q = inputs.query_rows("q", sequence, head, first, count);
        const auto k = inputs.key_rows("k", sequence, shared, keys.first, width);
        const auto v = inputs.key_rows("v", sequence, shared, keys.first, width);
        Values weights =
            scores_of(layer, inputs, sequence, head, first, q, {keys.first, keys.first + width}, k)
                .values;
        for (std::int64_t i = 0; i < count; ++i) {
          double* const of_row = weights.data() + i * width;
          const double most = std::max(
              inputs.sink(head), width > 0 ? *std::max_element(of_row, of_row + width) : -infinity);
          double sum = inputs.sink(head) == -infinity ? 0 : std::exp(inputs.sink(head) - most);
          for (std::int64_t j = 0; j < width; ++j) {
            of_row[j] = of_row[j] == -infinity ? 0 : std::exp(of_row[j] - most);
            sum += of_row[j];
          }
          // A row without keys, or whose scores are all -inf, is 0 as in PyTorch; NaN stays.
          if (sum != 0)
            for (std::int64_t j = 0; j < width; ++j) of_row[j] /= sum;
          lse[at(inputs.lse_place(sequence, head, first + i))] =
              sum != 0 ? most + std::log(sum) : -infinity;
        }
        copy_rows(product(count, layer.v_dim, width, weights, v, false, true), out, layer.v_dim,
                  row, (sequence.first_query + first) * row + head * layer.v_dim);
      });
  tensors["out"] = std::move(out);
  if (layer.lse) tensors["lse"] = std::move(lse);
}

/// Weights p and gradients ds of the scores of a block, and the sums D of its queries.
struct Gradients {
  Values weights, of_scores;
};

Gradients gradients_of(const Layer& layer, const Inputs& inputs, const Sequence& sequence,
                       std::int64_t head, std::int64_t first, const Values& q, const Values& d_out,
                       const Values& out, Keys keys, const Values& k, const Values& v) {
  const std::int64_t count = std::ssize(q) / layer.dim, width = keys.count();
  Scores scores = scores_of(layer, inputs, sequence, head, first, q, keys, k);
  Gradients gradients;
  gradients.of_scores = product(count, width, layer.v_dim, d_out, v);
  for (std::int64_t i = 0; i < count; ++i) {
    const double lse = inputs.lse(sequence, head, first + i);
    double sum = 0;
    for (std::int64_t e = i * layer.v_dim; e < (i + 1) * layer.v_dim; ++e)
      sum += d_out[at(e)] * out[at(e)];
    for (std::int64_t place = i * width; place < (i + 1) * width; ++place) {
      double& weight = scores.values[at(place)];
      double& gradient = gradients.of_scores[at(place)];
      if (weight == -infinity) {  // masked
        weight = gradient = 0;
        continue;
      }
      weight = lse == -infinity ? 0 : std::exp(weight - lse);
      gradient = weight * (gradient - sum);
      if (layer.softcap > 0) gradient *= scores.slope[at(place)];
    }
  }
  gradients.weights = std::move(scores.values);
  return gradients;
}

void add(const Values& from, double factor, Values& to) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i] += factor * from[i];
}

void backward_queries(const Layer& layer, const Inputs& inputs, Parallel& parallel, Values& dq) {
  const std::int64_t row = layer.heads * layer.dim;
  for_each_block(
      layer, inputs, layer.heads, false, parallel,
      [&](const Sequence& sequence, std::int64_t head, std::int64_t first, std::int64_t count) {
        const Keys keys = inputs.keys_of(sequence, first, count);
        if (keys.count() <= 0) return;
        const std::int64_t shared = head / layer.group();
        const auto k = inputs.key_rows("k", sequence, shared, keys.first, keys.count());
        const auto gradients =
            gradients_of(layer, inputs, sequence, head, first,
                         inputs.query_rows("q", sequence, head, first, count),
                         inputs.query_rows("d_out", sequence, head, first, count),
                         inputs.query_rows("out", sequence, head, first, count), keys, k,
                         inputs.key_rows("v", sequence, shared, keys.first, keys.count()));
        Values own(at(count * layer.dim));
        add(product(count, layer.dim, keys.count(), gradients.of_scores, k, false, true),
            double{layer.scale}, own);
        copy_rows(own, dq, layer.dim, row, (sequence.first_query + first) * row + head * layer.dim);
      });
}

void backward_keys(const Layer& layer, const Inputs& inputs, Parallel& parallel, Values& dk,
                   Values& dv) {
  for_each_block(
      layer, inputs, layer.kv_heads, true, parallel,
      [&](const Sequence& sequence, std::int64_t shared, std::int64_t first, std::int64_t count) {
        const auto k = inputs.key_rows("k", sequence, shared, first, count);
        const auto v = inputs.key_rows("v", sequence, shared, first, count);
        Values own_k(k.size()), own_v(v.size());
        for (std::int64_t head = shared * layer.group(); head < (shared + 1) * layer.group();
             ++head)
          for (std::int64_t query = 0; query < sequence.queries; query += block) {
            const std::int64_t queries = std::min(block, sequence.queries - query);
            const Keys seen = inputs.keys_of(sequence, query, queries);
            if (seen.first >= first + count || seen.last <= first) continue;
            const auto q = inputs.query_rows("q", sequence, head, query, queries);
            const auto d_out = inputs.query_rows("d_out", sequence, head, query, queries);
            const auto gradients =
                gradients_of(layer, inputs, sequence, head, query, q, d_out,
                             inputs.query_rows("out", sequence, head, query, queries),
                             {first, first + count}, k, v);
            add(product(count, layer.dim, queries, gradients.of_scores, q, true, true),
                double{layer.scale}, own_k);
            add(product(count, layer.v_dim, queries, gradients.weights, d_out, true, true), 1,
                own_v);
          }
        const std::int64_t place = (sequence.first_key + first) * layer.kv_heads + shared;
        copy_rows(own_k, dk, layer.dim, layer.kv_heads * layer.dim, place * layer.dim);
        copy_rows(own_v, dv, layer.v_dim, layer.kv_heads * layer.v_dim, place * layer.v_dim);
      });
}

Values backward_sinks(const Layer& layer, const Inputs& inputs) {
  Values d_sinks(at(layer.heads));
  for (std::int64_t index = 0; index < layer.b; ++index) {
    const Sequence sequence = inputs.sequence(index);
    for (std::int64_t head = 0; head < layer.heads; ++head)
      for (std::int64_t i = 0; i < sequence.queries; ++i) {
        const double lse = inputs.lse(sequence, head, i);
        if (lse == -infinity) continue;
        const auto d_out = inputs.query_rows("d_out", sequence, head, i, 1);
        const auto out = inputs.query_rows("out", sequence, head, i, 1);
        double sum = 0;
        for (std::size_t e = 0; e < out.size(); ++e) sum += d_out[e] * out[e];
        d_sinks[at(head)] -= std::exp(inputs.sink(head) - lse) * sum;
      }
  }
  return d_sinks;
}

void backward(const Layer& layer, ReferenceTensors& tensors, Parallel& parallel) {
  const Inputs inputs(layer, tensors);
  const std::int64_t kv_rows = layer.kv_tokens() * layer.kv_heads;
  auto dq = large_vector<double>(at(layer.q_tokens() * layer.heads * layer.dim), parallel);
  auto dk = large_vector<double>(at(kv_rows * layer.dim), parallel);
  auto dv = large_vector<double>(at(kv_rows * layer.v_dim), parallel);
  backward_queries(layer, inputs, parallel, dq);
  backward_keys(layer, inputs, parallel, dk, dv);
  Values d_sinks;
  if (layer.sinks) d_sinks = backward_sinks(layer, inputs);
  tensors["dq"] = std::move(dq);
  tensors["dk"] = std::move(dk);
  tensors["dv"] = std::move(dv);
  if (layer.sinks) tensors["d_sinks"] = std::move(d_sinks);
}

}  // namespace

void reference(const Problem& problem, ReferenceTensors& tensors, Parallel& parallel) {
  const Layer layer = layer_of(problem);
  if (layer.backward)
    backward(layer, tensors, parallel);
  else
    forward(layer, tensors, parallel);
}

}  // namespace fftune::attention
