// Blocks of rows on all threads. A row is computed in f32.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/common/cpu_task.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"

namespace fftune::cross_entropy {
namespace {

constexpr float lowest = -std::numeric_limits<float>::infinity();

/// The rows of one call.
class Work {
 public:
  Work(const Form& form, const Rows& rows, const VectorKernels& vector, const HostCall& call)
      : form_(form),
        rows_(rows),
        vector_(vector),
        converter_{&vector},
        count_(static_cast<std::size_t>(rows.vocab)),
        call_(call),
        weights_(values(rows.class_weights)) {
    if (form.smoothing > 0)
      for (std::size_t id = 0; id < count_; ++id) all_weights_ += weight(id);
    if (form.whole > 0) all_weights_ = static_cast<double>(form.whole);
    if (rows.dlogits && form.reduction == Reduction::mean) divisor_ = *values(rows.items);
  }

  /// `z` and `powers`: a row of floats each. A label in another slice is the id behind the last.
  void compute(std::int64_t row, float* z, float* powers) const {
    const std::int64_t label =
        reinterpret_cast<const std::int64_t*>(address_of(call_, rows_.labels))[row];
    if (label == form_.ignored) return fill(row, 0, powers);
    const bool is_here = label >= 0 && label < rows_.vocab;
    if (!is_here && form_.whole == 0)
      return fill(row, std::numeric_limits<float>::quiet_NaN(), powers);
    const std::size_t at = is_here ? static_cast<std::size_t>(label) : count_;
    converter_.load(rows_.dtype, row_of(rows_.logits, row), z, rows_.vocab);
    if (form_.softcap > 0)
      for (std::size_t id = 0; id < count_; ++id)
        z[id] = form_.softcap * std::tanh(z[id] / form_.softcap);
    if (rows_.loss) loss(row, at, z, powers);
    if (rows_.dlogits) gradient(row, at, z, powers);
  }

 private:
  float* values(const std::optional<Pointer>& pointer) const {
    return pointer ? reinterpret_cast<float*>(address_of(call_, *pointer)) : nullptr;
  }
  std::byte* row_of(const Pointer& pointer, std::int64_t row) const {
    return address_of(call_, pointer) +
           row * rows_.vocab * static_cast<std::int64_t>(dtype_bytes(rows_.dtype));
  }
  double all_ids() const { return static_cast<double>(form_.all_ids(rows_.vocab)); }
  float weight(std::size_t id) const { return weights_ == nullptr ? 1 : weights_[id]; }

  void fill(std::int64_t row, float value, float* room) const {
    if (rows_.loss)
      for (float* const to :
           {values(rows_.loss), values(rows_.lse), values(rows_.logprob), values(rows_.entropy)})
        if (to != nullptr) to[row] = value;
    if (!rows_.dlogits) return;
    std::fill_n(room, count_, value);
    converter_.store(rows_.dtype, room, row_of(*rows_.dlogits, row), rows_.vocab);
  }

  void loss(std::int64_t row, std::size_t label, const float* z, float* powers) const {
    const float most = vector_.largest(z, count_);
    std::copy_n(z, count_, powers);
    const float shift = most == lowest ? 0 : most;
    const float sum = vector_.exponentials(powers, shift, count_);
    const float lse = shift + std::log(sum);
    float logprob = 0, loss = 0;
    if (label < count_) {
      logprob = (z[label] - shift) - std::log(sum);
      loss = -(1 - form_.smoothing) * weight(label) * logprob;
    }
    if (form_.z_loss > 0) loss += form_.z_loss * lse * lse;
    if (form_.smoothing > 0) {
      double smooth = 0;
      for (std::size_t id = 0; id < count_; ++id)
        smooth += double{weight(id)} * (double{lse} - double{z[id]});
      loss += form_.smoothing * static_cast<float>(smooth / all_ids());
    }
    values(rows_.loss)[row] = loss;
    values(rows_.lse)[row] = lse;
    if (rows_.logprob) values(rows_.logprob)[row] = logprob;
    if (!rows_.entropy) return;
    double excess = 0;
    for (std::size_t id = 0; id < count_; ++id)
      if (powers[id] != 0) excess += double{powers[id]} * double{z[id] - shift};
    values(rows_.entropy)[row] = std::log(sum) - static_cast<float>(excess) / sum;
  }

  void gradient(std::int64_t row, std::size_t label, const float* z, float* powers) const {
    const float lse = values(rows_.lse)[row];
    const float* const dloss = values(rows_.dloss);
    float upstream = dloss == nullptr ? 1 : dloss[form_.reduction == Reduction::none ? row : 0];
    upstream /= divisor_;
    const float share = form_.smoothing / static_cast<float>(all_ids());
    const float of_label = (1 - form_.smoothing) * (label < count_ ? weight(label) : 1);
    float of_power = of_label + share * static_cast<float>(all_weights_);
    if (form_.z_loss > 0) of_power += 2 * form_.z_loss * lse;
    std::copy_n(z, count_, powers);
    vector_.exponentials(powers, lse, count_);
    for (std::size_t id = 0; id < count_; ++id) powers[id] *= of_power;
    if (share > 0)
      for (std::size_t id = 0; id < count_; ++id) powers[id] -= share * weight(id);
    if (label < count_) powers[label] -= of_label;
    if (form_.softcap > 0)
      for (std::size_t id = 0; id < count_; ++id) {
        const float part = z[id] / form_.softcap;
        powers[id] *= 1 - part * part;
      }
    for (std::size_t id = 0; id < count_; ++id) powers[id] *= upstream;
    converter_.store(rows_.dtype, powers, row_of(*rows_.dlogits, row), rows_.vocab);
  }

  const Form& form_;
  const Rows& rows_;
  const VectorKernels& vector_;
  gemm_cpu::Converter converter_;
  std::size_t count_;
  const HostCall& call_;
  const float* weights_;
  double all_weights_ = 0;
  float divisor_ = 1;
};

RowWork work(const Problem& problem) {
  return {
      .rows = problem.size("m"),
      .row_bytes = problem.size("vocab") * static_cast<std::int64_t>(dtype_bytes(problem.dtype)),
      .nontemporal = false};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  return program_of(problem, facts, [&](Program& program, const Form& form, const Rows& rows) {
    append_cpu_rows(program, form, rows, facts, config.at("rows"), config.get("threads"));
  });
}

}  // namespace

void append_cpu_rows(Program& program, const Form& form, const Rows& rows, const DeviceFacts& facts,
                     std::int64_t rows_of_task, int threads) {
  const std::size_t scratch = program.scratch.size();
  const std::int64_t room = 2 * rows.vocab;
  program.scratch.push_back({gemm_cpu::bytes_of_floats(threads * room), false});
  program.steps.emplace_back(
      HostFunction([=, vector = &vector_kernels(facts.arch)](const HostCall& call) {
        const Work work(form, rows, *vector, call);
        auto* const rooms = reinterpret_cast<float*>(call.scratch[scratch]);
        gemm_cpu::deal(call.parallel, threads, quotient_up(rows.rows, rows_of_task),
                       [&](std::size_t worker, std::int64_t task) {
                         float* const own = rooms + static_cast<std::int64_t>(worker) * room;
                         const std::int64_t last = std::min(rows.rows, (task + 1) * rows_of_task);
                         for (std::int64_t row = task * rows_of_task; row < last; ++row)
                           work.compute(row, own, own + rows.vocab);
                       });
      }));
}

std::vector<const Family*> cpu_families() {
  static const auto families = cpu_row_families(
      {"cpu_loss", "cpu_gradient"}, "blocks of rows, on all threads",
      {cpu_file, vector_kernel_source}, {work, program}, {stage_loss, stage_gradient});
  return addresses_of(families);
}

}  // namespace fftune::cross_entropy
