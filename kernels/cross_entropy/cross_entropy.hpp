// The loss of logits [m, vocab] and labels [m], and its gradient:
//
//   z_j      the logits of a row; with softcap=c, c·tanh(logit_j / c)
//   lse      log Σ exp(z_j)
//   loss     (1 - s)·w_y·(lse - z_y) + s/vocab·Σ w_j·(lse - z_j) + zl·lse²      y: the row's label
//            s: label-smoothing, zl: z-loss, w: class weights, or 1
//   dlogit_j g·((1 - s)·w_y·(p_j - [j = y]) + s/vocab·(W·p_j - w_j) + 2·zl·lse·p_j)
//            p_j = exp(z_j - lse), W = Σ w_j, g the gradient of the row's loss; with a soft cap
//            times 1 - (z_j / c)²
//   logprob  z_y - lse
//   entropy  lse - Σ p_j·z_j
//
// A row with the label `ignore-index` has zeros everywhere. A label that is no id makes its row
// NaN. With reduction=sum the loss is the sum of the rows'. With mean that sum is divided by
// items[0]: the number of labels that count, or the sum of their class weights. The rows may be a
// part of a batch; items[0] is then that of the whole batch.
//
// With slice-of=V the logits are those of a slice of V ids, and labels count from its first id. A
// label that is none of the slice's ids belongs to another slice: [j = y] is 0 here, the loss has
// no term of it, and logprob is 0. The loss is then smoothed by s/V; lse and entropy are those of
// the slice. The backward pass takes the lse of all slices, from which dlogits follow.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& cross_entropy_op();

namespace cross_entropy {

constexpr const char* stage_loss = "loss";
constexpr const char* stage_gradient = "gradient";
constexpr std::int64_t most_ids = std::int64_t{1} << 19;
constexpr const char* kernel_file = "cross_entropy/rows.cu";
constexpr const char* cpu_file = "cross_entropy/cpu_families.cpp";

enum class Reduction { none, sum, mean };

struct Form {
  Reduction reduction = Reduction::none;
  bool class_weights = false;
  bool logprobs = false;
  bool entropy = false;
  float smoothing = 0, z_loss = 0, softcap = 0;
  std::int64_t ignored = -100;
  std::int64_t whole = 0;  // ids of the vocabulary that these are a slice of; 0: they are all

  std::int64_t all_ids(std::int64_t vocab) const { return whole == 0 ? vocab : whole; }
};
Form form_of(const Problem& problem);

/// The definition of a loss, as linear-cross-entropy has it too; `pass` fwd alone has logprobs and
/// entropy.
std::vector<OptionField> options();

/// Why the options contradict each other, or nothing.
std::string contradiction_of(const Problem& problem);

/// Tensors beside the logits by which the loss and its gradient are defined, and the results of the
/// forward pass, for `m` tokens.
std::vector<TensorSpec> label_tensors(const Form& form, std::int64_t m, std::int64_t vocab);
std::vector<TensorSpec> loss_tensors(const Form& form, std::int64_t m);
TensorSpec loss_gradient(const Form& form, std::int64_t m);
TensorSpec log_sum_exp(std::int64_t m);

/// The definition in float64. Computes loss, lse, logprob and entropy from logits; and from logits,
/// lse and dloss dlogits, with `dloss` null those of a loss whose gradient is 1.
void reference_loss(const Form& form, std::int64_t vocab, ReferenceTensors& tensors,
                    Parallel& parallel);
void reference_gradient(const Form& form, std::int64_t vocab, const std::vector<double>* dloss,
                        ReferenceTensors& tensors, Parallel& parallel);

/// Rows of logits with all that belongs to them; null for what is not there. dlogits may be the
/// logits. With `loss` the log-sum-exp is computed, else it is read.
struct Rows {
  std::int64_t rows = 0, vocab = 0;
  DType dtype = DType::f32;
  Pointer logits, labels, lse;
  std::optional<Pointer> class_weights = {}, items = {}, dloss = {};
  std::optional<Pointer> loss = {}, logprob = {}, entropy = {}, dlogits = {};
};
constexpr int default_block = 512;

/// The blocks of a row.
struct RowBlocks {
  std::int64_t threads = default_block;  // of a block
  std::int64_t cluster = 1;              // blocks that share the row
};
/// Vectors of a row that each thread holds in registers between its sums and its gradient, or 0
/// where they are too many and the row is read twice.
std::int64_t held_vectors(std::int64_t vocab, DType dtype, const RowBlocks& blocks);
/// Appends the kernel that computes losses of rows, or gradients, or both.
void append_rows(Program& program, const Form& form, const Rows& rows, const DeviceFacts& facts,
                 const RowBlocks& blocks);
/// The same as a host function; the caller sets Program::host_tensors.
void append_cpu_rows(Program& program, const Form& form, const Rows& rows, const DeviceFacts& facts,
                     std::int64_t rows_of_task, int threads);
/// Appends what reduces the losses of all rows to `total`.
void append_total(Program& program, const Form& form, const Pointer& losses, const Pointer& total,
                  const std::optional<Pointer>& items, std::int64_t rows, const DeviceFacts& facts);

/// The program of a problem of cross-entropy, to which `append` appends the work on its rows.
Program program_of(const Problem& problem, const DeviceFacts& facts,
                   const std::function<void(Program&, const Form&, const Rows&)>& append);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace cross_entropy
}  // namespace fftune
