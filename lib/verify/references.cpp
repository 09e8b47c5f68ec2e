#include "verify/references.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "core/distribution.hpp"
#include "device/parallel.hpp"

namespace fftune {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Gives tensors that are too large to be copied to a stage which only reads them, and takes them
/// back in the end, also where the stage throws.
class Loan {
 public:
  explicit Loan(ReferenceTensors& values) : values_(&values) {}
  ~Loan() {
    for (const auto& [name, owner] : owners_) *owner = std::move(values_->at(name));
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  void take(const std::string& name, std::vector<double>& owner) {
    (*values_)[name] = std::move(owner);
    owners_.emplace_back(name, &owner);
  }

 private:
  ReferenceTensors* values_;
  std::vector<std::pair<std::string, std::vector<double>*>> owners_;
};

}  // namespace

References::References(const DistinctRows& rows, Parallel& parallel, ReferenceFile* kept)
    : rows_(&rows), parallel_(&parallel), kept_(kept) {
  follow();
}

bool References::can_extend() const {
  // Repeated rows need no extension: more tokens have the same distinct rows.
  if (rows_->repeat() || !rows_->op().rows_are_alike(rows_->problem())) return false;
  const auto before =
      rows_->op().tensors(rows_->problem().with_size(rows_->op().token_size(), count_));
  for (std::size_t i = 0; i < before.size(); ++i) {
    const TensorSpec& tensor = rows_->tensors()[i];
    // Values that depend on the number of tokens have changed.
    if (tensor.draw || tensor.scale != before[i].scale || tensor.mean != before[i].mean)
      return false;
    if (rows_->counts_tokens(i)) continue;
    if (tensor.shape != before[i].shape) return false;
    if (rows_->producer(i) == rows_->stages().size()) continue;
    if (!tensor.sums_tokens) return false;
    for (const StageSpec& stage : rows_->stages())
      if (contains(stage.inputs, tensor.name)) return false;
  }
  return true;
}

References::Run References::simplest(Run run) const {
  for (const auto& name : rows_->stages().at(run.stage).inputs) {
    const std::size_t tensor = tensor_index(rows_->tensors(), name);
    const std::size_t source = rows_->producer(tensor);
    if (source >= run.first_stage && source < run.stage &&
        !is_integer(rows_->tensors()[tensor].dtype))
      return run;
  }
  return {run.stage, run.stage};
}

std::vector<std::int64_t> References::changed_tokens() const {
  std::vector<std::int64_t> changed;
  for (std::size_t token = 0; token < marks_.size(); ++token)
    if ((marks_[token] != 0) != (rows_->marks()[token] != 0))
      changed.push_back(static_cast<std::int64_t>(token));
  return changed;
}

void References::follow() {
  if (rows_->count() == count_ && rows_->marks() == marks_) return;
  const bool extends = count_ > 0 && rows_->count() >= count_ && can_extend();
  auto tokens = extends ? changed_tokens() : std::vector<std::int64_t>();
  // A changed token costs two computations: to subtract its old rows and to add the new ones.
  if (!extends || 2 * std::ssize(tokens) >= count_) {
    parts_.clear();
    added_up_.clear();
    tokens.clear();
    count_ = 0;
  } else if (!tokens.empty()) {
    add_part(tokens, marks_, true);
  }
  for (std::int64_t token = count_; token < rows_->count(); ++token) tokens.push_back(token);
  count_ = rows_->count();
  marks_ = rows_->marks();
  not_kept_.clear();
  add_part(std::move(tokens), marks_, false);
}

void References::add_part(std::vector<std::int64_t> tokens, const std::vector<std::uint8_t>& marks,
                          bool taken_away) {
  Part part;
  part.taken_away = taken_away;
  std::vector<std::int64_t> order(tokens.size());
  std::iota(order.begin(), order.end(), 0);
  if (!marks.empty()) {
    for (const std::int64_t token : tokens)
      part.marks.push_back(marks[static_cast<std::size_t>(token)]);
    order = sorted_by_mark(part.marks);
  }
  for (const std::int64_t row : order)
    part.by_marks.push_back(tokens[static_cast<std::size_t>(row)]);
  if (!taken_away) {
    token_rows_.resize(static_cast<std::size_t>(count_));
    for (std::size_t sorted_row = 0; sorted_row < order.size(); ++sorted_row) {
      const auto row = static_cast<std::size_t>(order[sorted_row]);
      token_rows_[static_cast<std::size_t>(tokens[row])] = {parts_.size(), row, sorted_row};
    }
  }
  part.tokens = std::move(tokens);
  parts_.push_back(std::move(part));
}

std::vector<const double*> References::rows(std::size_t first_stage, std::size_t tensor) {
  const auto& spec = rows_->tensors()[tensor];
  const Run run = simplest({first_stage, rows_->producer(tensor)});
  const auto width = static_cast<std::size_t>(rows_->columns(tensor));
  std::vector<const double*> rows;
  if (!rows_->counts_tokens(tensor)) {
    add_up(run);
    const double* const first = outputs(run, 0).at(spec.name).data();
    for (std::int64_t row = 0; row < rows_->rows(tensor); ++row)
      rows.push_back(first + static_cast<std::size_t>(row) * width);
    return rows;
  }
  std::vector<const double*> firsts(parts_.size());
  for (std::size_t part = 0; part < parts_.size(); ++part)
    if (!parts_[part].taken_away) firsts[part] = outputs(run, part).at(spec.name).data();
  for (const TokenRow& token : token_rows_)
    rows.push_back(firsts[token.part] + (spec.sorted ? token.sorted_row : token.row) * width);
  return rows;
}

const ReferenceTensors& References::outputs(Run run, std::size_t part) {
  auto& known = parts_[part].outputs;
  if (const auto found = known.find(run); found != known.end()) return found->second;
  if (parts_.size() == 1)
    if (auto kept = kept_outputs(run); !kept.empty()) return known[run] = std::move(kept);

  const StageSpec& stage = rows_->stages().at(run.stage);
  ReferenceTensors values;
  std::map<std::string, Run> within;
  for (const auto& name : stage.inputs) {
    const std::size_t tensor = tensor_index(rows_->tensors(), name);
    const std::size_t source = rows_->producer(tensor);
    const TensorSpec& spec = rows_->tensors()[tensor];
    // Before and while it is updated, what is updated is what was given.
    if (spec.read_in_parts && source == rows_->stages().size()) {
      values.encoded[name] = {spec.dtype, rows_->drawn(tensor)};
    } else if (source == rows_->stages().size() || source >= run.stage) {
      values[name] = given(tensor, part);
    } else if (source < run.first_stage) {
      values[name] = rounded(spec.dtype, outputs({source, source}, part).at(name));
    } else {
      within[name] = simplest({run.first_stage, source});
      outputs(within[name], part);
    }
  }
  ReferenceTensors results;
  {
    Loan loan(values);
    for (const auto& [name, source] : within) loan.take(name, known.at(source).at(name));
    const Op& op = rows_->op();
    const auto tokens = std::ssize(parts_[part].tokens);
    op.reference(rows_->problem().with_size(op.token_size(), tokens), run.stage, values,
                 *parallel_);
    for (const auto& name : stage.outputs) results[name] = std::move(values.at(name));
  }
  not_kept_.insert(run);
  return known[run] = std::move(results);
}

std::vector<double> References::given(std::size_t tensor, std::size_t part) const {
  const TensorSpec& spec = rows_->tensors()[tensor];
  const Part& own = parts_[part];
  const auto& drawn = rows_->drawn(tensor);
  const std::size_t bytes = dtype_bytes(spec.dtype);
  const bool counts = rows_->counts_tokens(tensor);
  if (tensor == rows_->marking()) return {own.marks.begin(), own.marks.end()};
  const auto width = static_cast<std::size_t>(rows_->columns(tensor));
  const auto rows = counts ? own.tokens.size() : static_cast<std::size_t>(rows_->rows(tensor));
  auto values = large_vector<double>(rows * width, *parallel_);
  // The initial value of a sum is added once, in the first part.
  if (!counts && !spec.may_alias.empty() && part > 0) return values;
  const auto& tokens = spec.sorted ? own.by_marks : own.tokens;
  for_each_row(rows, width, *parallel_, [&](std::size_t i) {
    const std::size_t row = counts ? static_cast<std::size_t>(tokens[i]) : i;
    decode(spec.dtype, drawn.data() + row * width * bytes,
           std::span<double>(values.data() + i * width, width));
  });
  return values;
}

std::vector<double> References::rounded(DType dtype, const std::vector<double>& values) const {
  auto result = large_vector<double>(values.size(), *parallel_);
  for_each_block(std::ssize(values), 1, *parallel_, [&](const Block& block) {
    const auto first = static_cast<std::size_t>(block.first_row);
    const auto count = static_cast<std::size_t>(block.last_row) - first;
    std::vector<std::byte> bytes(count * dtype_bytes(dtype));
    encode(dtype, std::span<const double>(values.data() + first, count), bytes.data());
    decode(dtype, bytes.data(), std::span<double>(result.data() + first, count));
  });
  return result;
}

void References::add_up(Run run) {
  auto& done = added_up_.try_emplace(run, 1).first->second;
  outputs(run, 0);
  for (; done < parts_.size(); ++done) {
    outputs(run, done);
    auto& more = parts_[done].outputs.at(run);
    const double sign = parts_[done].taken_away ? -1 : 1;
    for (auto& [name, sum] : parts_[0].outputs.at(run)) {
      if (rows_->counts_tokens(tensor_index(rows_->tensors(), name))) continue;
      const auto own = more.extract(name);
      for_each_block(std::ssize(sum), 1, *parallel_, [&, &total = sum](const Block& block) {
        for (auto i = static_cast<std::size_t>(block.first_row);
             i < static_cast<std::size_t>(block.last_row); ++i)
          total[i] += sign * own.mapped()[i];
      });
    }
  }
}

std::string References::key_of(Run run, const std::string& tensor) const {
  const Problem distinct = rows_->problem().with_size(rows_->op().token_size(), rows_->count());
  return fmt::format("{} {} {} {} {}", distinct.text(), rows_->seed(), run.first_stage, run.stage,
                     tensor);
}

ReferenceTensors References::kept_outputs(Run run) const {
  if (!kept_) return {};
  const Op& op = rows_->op();
  const auto specs = op.tensors(rows_->problem().with_size(op.token_size(), rows_->count()));
  ReferenceTensors outputs;
  for (const auto& name : rows_->stages()[run.stage].outputs) {
    const auto count = static_cast<std::size_t>(specs[tensor_index(specs, name)].elements());
    auto values = kept_->find(key_of(run, name), count, *parallel_);
    if (values.empty()) return {};
    outputs[name] = std::move(values);
  }
  return outputs;
}

void References::keep() {
  // Extended references are spread over several parts, so they are not kept.
  if (kept_ && parts_.size() == 1)
    for (const Run& run : not_kept_)
      for (const auto& [name, values] : parts_[0].outputs.at(run))
        kept_->keep(key_of(run, name), values, *parallel_);
  not_kept_.clear();
}

}  // namespace fftune
