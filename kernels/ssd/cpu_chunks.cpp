// ssd by chunks of 64 tokens, whose sums over tokens and features are products of matrices. With G
// the sums of dt A within a chunk, e = exp(G), r = exp(G_last - G), x the inputs times dt, and S
// the state before the chunk (arXiv 2405.21060, section 6):
//
//   M    = C Bᵀ exp(G_i - G_j), i >= j           the same C Bᵀ for all heads of a group
//   out  = M x + e C Sᵀ,   S = e_last S + (r x)ᵀ B
//
// Backward, from the last chunk to the first, with dS the gradient of the state behind the chunk,
// W = d_out xᵀ, W' = W exp(G_i - G_j):
//
//   dx   = Mᵀ d_out + r B dSᵀ           dB = W'ᵀ C + r x dS           dC = W' B + e d_out S
//   dS   = e_last dS + (e d_out)ᵀ C
//
// The gradient of a token's dt A is the sum of W M over pairs that the token is between, of C · (e
// d_out S) from the token on, of B · (r x dS) before it, and e_last dS · S.
//
// Tasks have some heads of a group of a sequence.
#include <array>

#include "kernels/common/cpu_vector.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/ssd/cpu_host.hpp"

namespace fftune::ssd {
namespace {

constexpr std::size_t chunk = 64;
/// exp of it is 0 in float, and of sums with it; differences of such sums stay exact enough.
constexpr double least_decay = -110;

std::size_t quotient_up(std::size_t a, std::size_t b) {
  return (a + b - 1) / b;
}

/// Matrices as the register tiles of VectorKernels take them: a left operand by rows, whole tiles
/// of them, the right one and the result in panels [rows, tile_columns].
class Left {
 public:
  Left(const VectorKernels& vector, std::size_t most_rows, std::size_t width)
      : columns(width),
        values_(quotient_up(most_rows, vector.tile_rows) * vector.tile_rows * width) {}
  const std::size_t columns;
  float* row(std::size_t i) { return &values_[i * columns]; }
  const float* row(std::size_t i) const { return &values_[i * columns]; }
  float& at(std::size_t i, std::size_t j) { return values_[i * columns + j]; }
  void clear() { std::fill(values_.begin(), values_.end(), 0.0f); }

 private:
  std::vector<float> values_;
};

class Panels {
 public:
  Panels(const VectorKernels& vector, std::size_t most_rows, std::size_t columns)
      : rows(quotient_up(most_rows, vector.tile_rows) * vector.tile_rows),
        width(vector.tile_columns),
        count(quotient_up(columns, width)),
        values_(rows * width * count) {}
  std::size_t rows, width, count;  // of panels
  float* panel(std::size_t i) { return &values_[i * rows * width]; }
  const float* panel(std::size_t i) const { return &values_[i * rows * width]; }
  float& at(std::size_t i, std::size_t j) {
    return values_[(j / width * rows + i) * width + j % width];
  }
  float at(std::size_t i, std::size_t j) const {
    return values_[(j / width * rows + i) * width + j % width];
  }
  void clear() { std::fill(values_.begin(), values_.end(), 0.0f); }

  void set_row(std::size_t i, const float* from, std::size_t columns, float factor = 1) {
    for (std::size_t j = 0; j < columns; ++j) at(i, j) = factor * from[j];
  }
  void get_row(std::size_t i, float* to, std::size_t columns) const {
    for (std::size_t j = 0; j < columns; ++j) to[j] = at(i, j);
  }
  void add(const Panels& other) {
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] += other.values_[i];
  }
  void scale(float factor) {
    for (float& value : values_) value *= factor;
  }

 private:
  std::vector<float> values_;
};

enum class Sum { fresh, added };

/// out (+)= left · right over `depth`, for `rows` of out. `causal`: row i of left is zero behind
/// column i.
void multiply(const VectorKernels& vector, const Left& left, const Panels& right, std::size_t rows,
              std::size_t depth, Panels& out, Sum sum, bool causal = false) {
  for (std::size_t panel = 0; panel < out.count; ++panel)
    for (std::size_t row = 0; row < rows; row += vector.tile_rows)
      vector.tile(left.row(row), left.row(row + vector.tile_rows / 2), left.columns,
                  right.panel(panel), causal ? std::min(depth, row + vector.tile_rows) : depth,
                  sum == Sum::added, out.panel(panel) + row * out.width);
}

float dot(const float* a, const float* b, std::size_t count) {
  float sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// The steps of a chunk of a head.
struct Steps {
  std::array<float, chunk> dt{}, slope{}, e{}, r{};
  std::array<double, chunk> sums{};  // G
  float last = 1;                    // e_last

  Steps(const Host& host, std::int64_t first, std::size_t count, std::int64_t j,
        const Host::Head& head) {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Host::Step step = host.step(first + static_cast<std::int64_t>(i), j, head);
      dt[i] = step.dt, slope[i] = step.slope;
      const double decay = static_cast<double>(step.dt) * static_cast<double>(head.A);
      sums[i] = sum += decay < least_decay ? least_decay : decay;
      e[i] = static_cast<float>(std::exp(sum));
    }
    for (std::size_t i = 0; i < count; ++i) r[i] = static_cast<float>(std::exp(sum - sums[i]));
    last = static_cast<float>(std::exp(sum));
  }
  /// exp(G_i - G_j) for j <= i.
  void decays(const VectorKernels& vector, std::size_t i, float* to) const {
    for (std::size_t j = 0; j <= i; ++j) to[j] = static_cast<float>(sums[i] - sums[j]);
    vector.exponentials(to, 0, i + 1);
  }
};

/// The heads of a task, and its tensors' rows.
class Task {
 public:
  Task(const Host& host, const VectorKernels& vector, std::int64_t sequence,
       std::int64_t first_head, std::int64_t heads)
      : h_(host),
        l_(host.layer),
        v_(vector),
        sequence_(sequence),
        first_head_(first_head),
        heads_(heads),
        group_(first_head / l_.group()),
        tokens_(host.tokens(sequence)),
        dim_(static_cast<std::size_t>(l_.v_dim)),
        state_dim_(static_cast<std::size_t>(l_.dim)),
        x_(dim_) {}

 protected:
  std::size_t count_from(std::int64_t first) const {
    return static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(chunk), tokens_.end - first));
  }
  void read_b(std::int64_t t, float* to) const {
    h_.read("B", l_.dtype, t * l_.k_row + group_ * l_.dim, {to, state_dim_});
  }
  void read_c(std::int64_t t, float* to) const {
    h_.read("C", l_.dtype, t * l_.q_row + group_ * l_.dim, {to, state_dim_});
  }
  const float* read_x(std::int64_t t, std::int64_t j) {
    h_.read("x", l_.dtype, t * l_.v_row + j * l_.v_dim, x_);
    return x_.data();
  }
  std::int64_t out_place(std::int64_t t, std::int64_t j) const {
    return (t * l_.v_heads + j) * l_.v_dim;
  }

  const Host& h_;
  const Layer& l_;
  const VectorKernels& v_;
  std::int64_t sequence_, first_head_, heads_, group_;
  Tokens tokens_;
  std::size_t dim_, state_dim_;
  std::vector<float> x_;
};

class Forward : Task {
 public:
  Forward(const Host& host, const VectorKernels& vector, std::int64_t sequence,
          std::int64_t first_head, std::int64_t heads)
      : Task(host, vector, sequence, first_head, heads),
        b_columns_(vector, state_dim_, chunk),
        products_(vector, chunk, chunk),
        inputs_(vector, chunk, dim_),
        decayed_(vector, chunk, dim_),
        out_(vector, chunk, dim_),
        b_transposed_(vector, state_dim_, chunk),
        c_(vector, chunk, state_dim_),
        c_decayed_(vector, chunk, state_dim_),
        matrix_(vector, chunk, chunk),
        b_row_(state_dim_) {}

  void run() {
    const std::int64_t place = h_.state_place(sequence_);
    if (place < 0) {
      const std::vector<float> zeros(dim_);
      for (std::int64_t t = tokens_.first; t < tokens_.end; ++t)
        for (std::int64_t j = first_head_; j < first_head_ + heads_; ++j)
          h_.write("out", l_.dtype, out_place(t, j), zeros);
      return;
    }
    for (std::int64_t i = 0; i < heads_; ++i) {
      states_.emplace_back(v_, state_dim_, dim_);
      if (const char* name = h_.first_state(sequence_))
        for (std::size_t p = 0; p < dim_; ++p) {
          h_.read(name, l_.state_dtype, state_row(place, i, p), b_row_);
          for (std::size_t n = 0; n < state_dim_; ++n) states_.back().at(n, p) = b_row_[n];
        }
    }
    for (std::int64_t first = tokens_.first; first < tokens_.end; first += std::int64_t{chunk}) {
      const std::size_t count = count_from(first);
      read_group(first, count);
      for (std::int64_t i = 0; i < heads_; ++i)
        one_head(first, count, first_head_ + i, states_[static_cast<std::size_t>(i)]);
    }
    if (const char* name = h_.last_state())
      for (std::int64_t i = 0; i < heads_; ++i)
        for (std::size_t p = 0; p < dim_; ++p) {
          for (std::size_t n = 0; n < state_dim_; ++n)
            b_row_[n] = number(states_[static_cast<std::size_t>(i)].at(n, p));
          h_.write(name, l_.state_dtype, state_row(place, i, p), b_row_);
        }
  }

 private:
  std::int64_t state_row(std::int64_t place, std::int64_t i, std::size_t p) const {
    return place + ((first_head_ + i) * l_.v_dim + static_cast<std::int64_t>(p)) * l_.dim;
  }
  void read_group(std::int64_t first, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      read_b(first + static_cast<std::int64_t>(i), b_row_.data());
      read_c(first + static_cast<std::int64_t>(i), c_.row(i));
      for (std::size_t n = 0; n < state_dim_; ++n)
        b_transposed_.at(n, i) = b_columns_.at(n, i) = b_row_[n];
    }
    multiply(v_, c_, b_columns_, count, state_dim_, products_, Sum::fresh);
  }
  void one_head(std::int64_t first, std::size_t count, std::int64_t j, Panels& state) {
    const Host::Head head = h_.head(j);
    const Steps steps(h_, first, count, j, head);
    std::vector<float> row(std::max(chunk, dim_));
    for (std::size_t i = 0; i < count; ++i) {
      const float* x = read_x(first + static_cast<std::int64_t>(i), j);
      inputs_.set_row(i, x, dim_, steps.dt[i]);
      decayed_.set_row(i, x, dim_, steps.dt[i] * steps.r[i]);
      steps.decays(v_, i, row.data());
      for (std::size_t k = 0; k <= i; ++k) matrix_.at(i, k) = products_.at(i, k) * row[k];
      std::fill(matrix_.row(i) + i + 1, matrix_.row(i) + chunk, 0.0f);
      for (std::size_t n = 0; n < state_dim_; ++n) c_decayed_.at(i, n) = steps.e[i] * c_.at(i, n);
    }
    multiply(v_, matrix_, inputs_, count, count, out_, Sum::fresh, true);
    multiply(v_, c_decayed_, state, count, state_dim_, out_, Sum::added);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t t = first + static_cast<std::int64_t>(i);
      const float* x = read_x(t, j);
      for (std::size_t p = 0; p < dim_; ++p) row[p] = number(out_.at(i, p)) + head.D * x[p];
      h_.write("out", l_.dtype, out_place(t, j), {row.data(), dim_});
    }
    state.scale(steps.last);
    multiply(v_, b_transposed_, decayed_, state_dim_, count, state, Sum::added);
  }

  std::vector<Panels> states_;  // [state-dim, dim] of each head
  Panels b_columns_, products_, inputs_, decayed_, out_;
  Left b_transposed_, c_, c_decayed_, matrix_;
  std::vector<float> b_row_;
};

/// Gradients that are sums over tasks: of B and C of a group's parts [parts, tokens, groups, 2,
/// state-dim], and of a sequence's A, D and dt_bias [b, 3, heads].
struct Sums {
  std::vector<float> rows, parameters;
};

class Backward : Task {
 public:
  Backward(const Host& host, const VectorKernels& vector, std::int64_t sequence,
           std::int64_t first_head, std::int64_t heads, Sums& sums)
      : Task(host, vector, sequence, first_head, heads),
        sums_(sums),
        b_columns_(vector, state_dim_, chunk),
        products_(vector, chunk, chunk),
        w_(vector, chunk, chunk),
        b_(vector, chunk, state_dim_),
        c_(vector, chunk, state_dim_),
        db_(vector, chunk, state_dim_),
        dc_(vector, chunk, state_dim_),
        through_state_(vector, chunk, state_dim_),
        x_columns_(vector, dim_, chunk),
        d_out_(vector, chunk, dim_),
        dx_(vector, chunk, dim_),
        gradient_columns_(vector, state_dim_, dim_),
        b_rows_(vector, chunk, state_dim_),
        c_rows_(vector, chunk, state_dim_),
        b_decayed_(vector, chunk, state_dim_),
        d_out_rows_(vector, chunk, dim_),
        d_out_decayed_(vector, chunk, dim_),
        d_out_transposed_(vector, dim_, chunk),
        x_decayed_(vector, chunk, dim_),
        x_transposed_(vector, dim_, chunk),
        of_products_(vector, chunk, chunk),
        of_products_transposed_(vector, chunk, chunk),
        matrix_transposed_(vector, chunk, chunk) {}

  void run() {
    walk_forward();
    const std::int64_t place = sequence_ * l_.state_elements();
    std::vector<float> row(state_dim_);
    for (std::int64_t i = 0; i < heads_; ++i) {
      Panels& gradient = gradients_.emplace_back(v_, dim_, state_dim_);
      for (std::size_t p = 0; l_.final && p < dim_; ++p) {
        h_.read("d_final_state", DType::f32, state_row(place, i, p), row);
        gradient.set_row(p, row.data(), state_dim_);
      }
    }
    const std::int64_t chunks =
        (tokens_.end - tokens_.first + std::int64_t{chunk} - 1) / std::int64_t{chunk};
    for (std::int64_t c = chunks - 1; c >= 0; --c) {
      const std::int64_t first = tokens_.first + c * std::int64_t{chunk};
      const std::size_t count = count_from(first);
      read_group(first, count);
      for (std::int64_t i = 0; i < heads_; ++i)
        one_head(first, count, i, before_[static_cast<std::size_t>(c * heads_ + i)]);
      write_group(first, count);
    }
    if (l_.initial)
      for (std::int64_t i = 0; i < heads_; ++i)
        for (std::size_t p = 0; p < dim_; ++p) {
          gradients_[static_cast<std::size_t>(i)].get_row(p, row.data(), state_dim_);
          for (float& value : row) value = number(value);
          h_.write("d_initial_state", DType::f32, state_row(place, i, p), row);
        }
  }

 private:
  std::int64_t state_row(std::int64_t place, std::int64_t i, std::size_t p) const {
    return place + ((first_head_ + i) * l_.v_dim + static_cast<std::int64_t>(p)) * l_.dim;
  }
  /// The states before each chunk.
  void walk_forward() {
    std::vector<Panels> states;
    std::vector<float> row(state_dim_);
    for (std::int64_t i = 0; i < heads_; ++i) {
      Panels& state = states.emplace_back(v_, dim_, state_dim_);
      for (std::size_t p = 0; l_.initial && p < dim_; ++p) {
        h_.read("initial_state", l_.state_dtype, state_row(sequence_ * l_.state_elements(), i, p),
                row);
        state.set_row(p, row.data(), state_dim_);
      }
    }
    for (std::int64_t first = tokens_.first; first < tokens_.end; first += std::int64_t{chunk}) {
      const std::size_t count = count_from(first);
      for (std::size_t i = 0; i < count; ++i) {
        read_b(first + static_cast<std::int64_t>(i), row.data());
        b_.set_row(i, row.data(), state_dim_);
      }
      for (std::int64_t i = 0; i < heads_; ++i) {
        Panels& state = states[static_cast<std::size_t>(i)];
        before_.push_back(state);
        const std::int64_t j = first_head_ + i;
        const Steps steps(h_, first, count, j, h_.head(j));
        for (std::size_t k = 0; k < count; ++k) {
          const float* x = read_x(first + static_cast<std::int64_t>(k), j);
          for (std::size_t p = 0; p < dim_; ++p)
            x_transposed_.at(p, k) = steps.dt[k] * steps.r[k] * x[p];
        }
        state.scale(steps.last);
        multiply(v_, x_transposed_, b_, dim_, count, state, Sum::added);
      }
    }
  }
  void read_group(std::int64_t first, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t t = first + static_cast<std::int64_t>(i);
      read_b(t, b_rows_.row(i));
      read_c(t, c_rows_.row(i));
      b_.set_row(i, b_rows_.row(i), state_dim_);
      c_.set_row(i, c_rows_.row(i), state_dim_);
      for (std::size_t n = 0; n < state_dim_; ++n) b_columns_.at(n, i) = b_rows_.at(i, n);
    }
    multiply(v_, c_rows_, b_columns_, count, state_dim_, products_, Sum::fresh);
    db_.clear();
    dc_.clear();
  }
  void write_group(std::int64_t first, std::size_t count) {
    const std::int64_t part = first_head_ % l_.group() / heads_;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t place =
          ((part * l_.tokens() + first + static_cast<std::int64_t>(i)) * l_.heads + group_) * 2 *
          l_.dim;
      db_.get_row(i, &sums_.rows[static_cast<std::size_t>(place)], state_dim_);
      dc_.get_row(i, &sums_.rows[static_cast<std::size_t>(place + l_.dim)], state_dim_);
    }
  }

  void one_head(std::int64_t first, std::size_t count, std::int64_t own, const Panels& state) {
    const std::int64_t j = first_head_ + own;
    const Host::Head head = h_.head(j);
    const Steps steps(h_, first, count, j, head);
    Panels& gradient = gradients_[static_cast<std::size_t>(own)];
    const auto token = [first](std::size_t i) { return first + static_cast<std::int64_t>(i); };

    for (std::size_t i = 0; i < count; ++i) {
      const float* x = read_x(token(i), j);
      h_.read("d_out", l_.dtype, out_place(token(i), j), {d_out_rows_.row(i), dim_});
      d_out_.set_row(i, d_out_rows_.row(i), dim_);
      for (std::size_t p = 0; p < dim_; ++p) {
        x_columns_.at(p, i) = steps.dt[i] * x[p];
        x_decayed_.at(i, p) = steps.dt[i] * steps.r[i] * x[p];
        d_out_decayed_.at(i, p) = d_out_transposed_.at(p, i) = steps.e[i] * d_out_rows_.at(i, p);
      }
      for (std::size_t n = 0; n < state_dim_; ++n)
        b_decayed_.at(i, n) = steps.r[i] * b_rows_.at(i, n);
    }
    multiply(v_, d_out_rows_, x_columns_, count, dim_, w_, Sum::fresh);

    // crossed[t]: the sum of W M over the pairs of a token before t and one from t on, in which the
    // decay of t is a factor.
    std::array<float, chunk + 1> crossed{}, written{};
    std::array<float, chunk> read{}, decays{};
    matrix_transposed_.clear();
    of_products_.clear();
    of_products_transposed_.clear();
    for (std::size_t i = 0; i < count; ++i) {
      steps.decays(v_, i, decays.data());
      float before = 0;
      for (std::size_t k = 0; k <= i; ++k) {
        const float m = products_.at(i, k) * decays[k], w = w_.at(i, k);
        matrix_transposed_.at(k, i) = m;
        of_products_.at(i, k) = of_products_transposed_.at(k, i) = w * decays[k];
        if (k < i) crossed[k + 1] += before += w * m;
      }
    }
    std::vector<float> row(std::max(state_dim_, dim_));
    multiply(v_, d_out_decayed_, state, count, dim_, through_state_, Sum::fresh);
    for (std::size_t i = 0; i < count; ++i) {
      through_state_.get_row(i, row.data(), state_dim_);
      read[i] = dot(row.data(), c_rows_.row(i), state_dim_);
    }
    dc_.add(through_state_);
    multiply(v_, of_products_, b_, count, count, dc_, Sum::added, true);
    multiply(v_, x_decayed_, gradient, count, dim_, through_state_, Sum::fresh);
    for (std::size_t i = 0; i < count; ++i) {
      through_state_.get_row(i, row.data(), state_dim_);
      written[i + 1] = written[i] + dot(row.data(), b_rows_.row(i), state_dim_);
    }
    db_.add(through_state_);
    multiply(v_, of_products_transposed_, c_, count, count, db_, Sum::added);

    float of_state = 0;
    for (std::size_t p = 0; p < dim_; ++p)
      for (std::size_t n = 0; n < state_dim_; ++n) {
        gradient_columns_.at(n, p) = gradient.at(p, n);
        of_state += gradient.at(p, n) * state.at(p, n);
      }
    multiply(v_, matrix_transposed_, d_out_, count, count, dx_, Sum::fresh);
    multiply(v_, b_decayed_, gradient_columns_, count, state_dim_, dx_, Sum::added);
    gradient.scale(steps.last);
    multiply(v_, d_out_transposed_, c_, dim_, count, gradient, Sum::added);

    // The gradient of dt A: terms that its decay is no factor of are not added and taken away
    // again, as one decay may be 0.
    float* parameters =
        &sums_.parameters[static_cast<std::size_t>((sequence_ * 3) * l_.v_heads + j)];
    float behind = steps.last * of_state;
    for (std::size_t i = count; i-- > 0;) {
      behind += read[i];
      const float of_decay = behind + written[i] + crossed[i];
      const float* x = read_x(token(i), j);
      float of_step = head.A * of_decay, of_skip = 0;
      dx_.get_row(i, row.data(), dim_);
      for (std::size_t p = 0; p < dim_; ++p) {
        of_step += x[p] * row[p];
        of_skip += x[p] * d_out_rows_.at(i, p);
        row[p] = number(steps.dt[i] * row[p]) + head.D * d_out_rows_.at(i, p);
      }
      h_.write("dx", l_.dtype, out_place(token(i), j), {row.data(), dim_});
      of_step = number(of_step) * steps.slope[i];
      h_.write("ddt", l_.dtype, token(i) * l_.v_heads + j, {&of_step, 1});
      parameters[0] += number(of_decay) * steps.dt[i];
      parameters[l_.v_heads] += number(of_skip);
      parameters[2 * l_.v_heads] += of_step;
    }
  }

  Sums& sums_;
  std::vector<Panels> before_, gradients_;  // [dim, state-dim]: states, gradients of them
  Panels b_columns_, products_, w_, b_, c_, db_, dc_, through_state_, x_columns_, d_out_, dx_,
      gradient_columns_;
  Left b_rows_, c_rows_, b_decayed_, d_out_rows_, d_out_decayed_, d_out_transposed_, x_decayed_,
      x_transposed_, of_products_, of_products_transposed_, matrix_transposed_;
};

/// Adds up the parts of B's and C's gradients of a sequence's group.
void write_rows(const Host& host, const Sums& sums, std::int64_t parts, std::int64_t sequence,
                std::int64_t group) {
  const Layer& l = host.layer;
  std::vector<float> row(static_cast<std::size_t>(2 * l.dim));
  const Tokens tokens = host.tokens(sequence);
  for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
    std::fill(row.begin(), row.end(), 0.0f);
    for (std::int64_t part = 0; part < parts; ++part) {
      const float* from = &sums.rows[static_cast<std::size_t>(
          ((part * l.tokens() + t) * l.heads + group) * 2 * l.dim)];
      for (std::size_t i = 0; i < row.size(); ++i) row[i] += from[i];
    }
    for (float& value : row) value = number(value);
    const std::int64_t place = (t * l.heads + group) * l.dim;
    const auto features = static_cast<std::size_t>(l.dim);
    host.write("dB", l.dtype, place, {row.data(), features});
    host.write("dC", l.dtype, place, {row.data() + features, features});
  }
}

void write_parameters(const Host& host, const Sums& sums) {
  const Layer& l = host.layer;
  const char* names[] = {l.given ? "dA" : "dA_log", l.skip ? "dD" : nullptr,
                         l.bias ? "ddt_bias" : nullptr};
  for (std::int64_t kind = 0; kind < 3; ++kind)
    for (std::int64_t j = 0; names[kind] != nullptr && j < l.v_heads; ++j) {
      double sum = 0;
      for (std::int64_t sequence = 0; sequence < l.b; ++sequence)
        sum += static_cast<double>(
            sums.parameters[static_cast<std::size_t>((sequence * 3 + kind) * l.v_heads + j)]);
      if (kind == 0 && !l.given) sum *= static_cast<double>(host.head(j).A);
      host.data<float>(names[kind])[j] = static_cast<float>(sum);
    }
}

}  // namespace

Program chunk_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  return host_program(ssd_op().tensors(problem).size(), [problem, heads = config.at("heads"),
                                                         vector = &vector_kernels(facts.arch)](
                                                            const HostCall& call) {
    const Host host(problem, call);
    const std::int64_t each = host.layer.v_heads / heads;
    call.parallel.run(
        static_cast<int>(host.layer.b * each), call.parallel.max_threads(),
        [&](int task) { Forward(host, *vector, task / each, task % each * heads, heads).run(); });
  });
}

Program chunk_backward_program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config) {
  return host_program(ssd_op().tensors(problem).size(), [problem, heads = config.at("heads"),
                                                         vector = &vector_kernels(facts.arch)](
                                                            const HostCall& call) {
    const Host host(problem, call);
    const Layer& l = host.layer;
    const std::int64_t each = l.v_heads / heads, parts = l.group() / heads;
    Sums sums;
    sums.rows.resize(static_cast<std::size_t>(parts * l.tokens() * l.heads * 2 * l.dim));
    sums.parameters.resize(static_cast<std::size_t>(l.b * 3 * l.v_heads));
    const auto run = [&](std::int64_t tasks, const auto& task) {
      call.parallel.run(static_cast<int>(tasks), call.parallel.max_threads(), task);
    };
    run(l.b * each, [&](int task) {
      Backward(host, *vector, task / each, task % each * heads, heads, sums).run();
    });
    run(l.b * l.heads,
        [&](int task) { write_rows(host, sums, parts, task / l.heads, task % l.heads); });
    write_parameters(host, sums);
  });
}

}  // namespace fftune::ssd
