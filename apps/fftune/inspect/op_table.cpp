#include "apps/fftune/inspect/ops.hpp"

#include <algorithm>
#include <compare>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "apps/fftune/terminal/json.hpp"
#include "core/error.hpp"
#include "tuning/measure/statistics.hpp"

namespace fftune::tool {

namespace {

/// A field that may decide about buffers, and its values: choices, dtypes, or whether a rare size
/// is given.
struct Axis {
  enum class Kind { dtype, size, option } kind = Kind::option;
  std::string name;
  std::vector<std::string> values;
};

/// The place of each axis' value.
using Choice = std::vector<std::size_t>;

/// A buffer apart from its place: another dtype or shape is another buffer.
struct Buffer {
  std::string name;
  Role role = Role::input;
  std::string dtype;
  std::vector<std::int64_t> shape;

  auto operator<=>(const Buffer&) const = default;
};

struct Sample {
  Choice choice;
  Problem problem;
  std::vector<Buffer> buffers;
};

std::vector<Axis> axes_of(const Op& op, const std::string& pass) {
  std::vector<Axis> axes;
  Axis dtypes{Axis::Kind::dtype, "dtype", {"T"}};
  for (const DType dtype : op.dtypes_of_pass(DeviceKind::cuda, pass))
    if (dtype == DType::fp8) dtypes.values.emplace_back(dtype_name(dtype));
  if (dtypes.values.size() > 1) axes.push_back(std::move(dtypes));
  // Strides, the sizes that may exceed 32 bits, make views, whose shapes tell nothing.
  for (const SizeField& field : op.sizes())
    if (field.rare && field.max <= std::numeric_limits<std::int32_t>::max())
      axes.push_back({Axis::Kind::size, field.name, {"", "given"}});
  for (const OptionField& field : options_of(op, pass))
    if (!field.number && !field.pattern && !field.routing && field.choices.size() > 1)
      axes.push_back({Axis::Kind::option, field.name, field.choices});
  return axes;
}

/// Problems of a pass, from which the condition of each buffer is inferred: every value of every
/// field, every pair of them, and random choices of the fields that decide about a buffer.
class Samples {
 public:
  Samples(const Op& op, const std::string& pass)
      : op_(op), usual_(usual_form(op, pass)), axes_(axes_of(op, pass)) {
    for (std::size_t i = 0; i < axes_.size(); ++i)
      for (std::size_t j = 0; j <= i; ++j)
        for (std::size_t a = 0; a < axes_[i].values.size(); ++a)
          for (std::size_t b = 0; b < axes_[j].values.size(); ++b) add(pair(i, a, j, b));
    find_deciding_axes();
    constexpr std::size_t random_choices = 60000;
    std::uint64_t state = 1;
    for (std::size_t n = 0; n < random_choices; ++n) {
      Choice choice(axes_.size());
      for (std::size_t i = 0; i < axes_.size(); ++i) {
        // Half of them as usual: most values ask for others beside them.
        const std::uint64_t drawn = next_random(state);
        if (deciding_[i] && drawn % 2 == 1) choice[i] = (drawn >> 8) % axes_[i].values.size();
      }
      add(choice);
    }
  }

  Json buffers() const {
    Json rows{Json::Array()};
    std::map<const Sample*, std::map<std::string, std::vector<std::string>>> extents;
    for (const Buffer& buffer : in_order()) {
      const Sample& first = *std::find_if(samples_.begin(), samples_.end(), [&](const Sample& s) {
        return std::count(s.buffers.begin(), s.buffers.end(), buffer) > 0;
      });
      auto& extents_of = extents[&first];
      if (extents_of.empty()) extents_of = symbols(op_, first.problem);
      std::vector<const Sample*> samples;
      for (const Sample& sample : samples_) samples.push_back(&sample);
      for (const Json& condition : conditions(buffer, samples))
        rows.push_back(Json::Array{buffer.name, role_name(buffer.role),
                                   dtype_symbol(op_, first.problem, buffer.name),
                                   extents_of[buffer.name], condition});
    }
    return rows;
  }

 private:
  /// The usual choice but for two axes, or one.
  Choice pair(std::size_t i, std::size_t a, std::size_t j, std::size_t b) const {
    Choice choice(axes_.size());
    choice[j] = b;
    choice[i] = a;
    return choice;
  }

  /// An axis decides if one of its values changes the buffers, by itself or beside another's value.
  void find_deciding_axes() {
    std::map<Choice, const Sample*> samples;
    for (const Sample& sample : samples_) samples[sample.choice] = &sample;
    deciding_.assign(axes_.size(), false);
    for (const auto& [choice, sample] : samples)
      for (std::size_t i = 0; i < axes_.size(); ++i) {
        Choice usual = choice;
        usual[i] = 0;
        const auto other = samples.find(usual);
        if (other != samples.end() && other->second->buffers != sample->buffers)
          deciding_[i] = true;
      }
  }

  std::optional<Problem> problem_of(const Choice& choice) const {
    Problem problem = usual_;
    for (std::size_t i = 0; i < axes_.size(); ++i) {
      const Axis& axis = axes_[i];
      const std::string& value = axis.values[choice[i]];
      if (axis.kind == Axis::Kind::option) problem.options[axis.name] = value;
      if (axis.kind == Axis::Kind::dtype && value != "T") problem.dtype = DType::fp8;
      if (axis.kind == Axis::Kind::size && !value.empty())
        problem = with_rare(op_, std::move(problem), axis.name);
    }
    return is_form(op_, problem) ? std::optional(problem) : std::nullopt;
  }

  void add(const Choice& choice) {
    if (!seen_.insert(choice).second) return;
    auto problem = problem_of(choice);
    if (!problem) return;
    std::vector<Buffer> buffers;
    for (const TensorSpec& tensor : op_.tensors(*problem))
      if (tensor.role != Role::intermediate)
        buffers.push_back({tensor.name, tensor.role,
                           tensor.dtype != problem->dtype ? std::string(dtype_name(tensor.dtype))
                           : problem->dtype == DType::fp8 ? "T=fp8"
                                                          : "T",
                           tensor.shape});
    samples_.push_back({choice, std::move(*problem), std::move(buffers)});
  }

  /// Every buffer, in an order that all samples agree with: the usual one's, and each other buffer
  /// in front of its successor.
  std::vector<Buffer> in_order() const {
    std::vector<Buffer> order;
    for (const Sample& sample : samples_)
      for (const Buffer& buffer : sample.buffers)
        if (std::count(order.begin(), order.end(), buffer) == 0) order.push_back(buffer);
    std::map<std::string, std::set<std::string>> before;  // by name
    for (const Sample& sample : samples_)
      for (std::size_t i = 0; i < sample.buffers.size(); ++i)
        for (std::size_t j = 0; j < i; ++j)
          before[sample.buffers[i].name].insert(sample.buffers[j].name);
    std::vector<Buffer> sorted;
    std::set<std::string> done;
    while (sorted.size() < order.size()) {
      const auto next = std::find_if(order.begin(), order.end(), [&](const Buffer& buffer) {
        const auto& needed = before[buffer.name];
        return done.count(buffer.name) == 0 &&
               std::includes(done.begin(), done.end(), needed.begin(), needed.end());
      });
      if (next == order.end())
        throw Error(ErrorKind::internal,
                    std::string(op_.name()) + ": its buffers have no order of their own");
      const std::string name = next->name;
      std::copy_if(order.begin(), order.end(), std::back_inserter(sorted),
                   [&](const Buffer& buffer) { return buffer.name == name; });
      done.insert(name);
    }
    return sorted;
  }

  /// The values that axes have where the buffer is, for those axes that decide about it. If no such
  /// values tell, the axis is split that makes the fewest rows: a condition for each of its values.
  std::vector<Json> conditions(const Buffer& buffer,
                               const std::vector<const Sample*>& samples) const {
    std::vector<std::set<std::size_t>> with(axes_.size());
    std::vector<bool> has;
    for (const Sample* sample : samples) {
      has.push_back(std::count(sample->buffers.begin(), sample->buffers.end(), buffer) > 0);
      if (has.back())
        for (std::size_t i = 0; i < axes_.size(); ++i)
          if (deciding_[i]) with[i].insert(sample->choice[i]);
    }
    if (std::count(has.begin(), has.end(), true) == 0) return {};
    const auto holds_for = [&](const Sample& sample) {
      for (std::size_t i = 0; i < axes_.size(); ++i)
        if (!with[i].empty() && with[i].count(sample.choice[i]) == 0) return false;
      return true;
    };
    const auto is_told = [&] {
      for (std::size_t i = 0; i < samples.size(); ++i)
        if (has[i] != holds_for(*samples[i])) return false;
      return true;
    };
    if (!is_told()) return split(buffer, samples);
    // The last axes first: those that only come along with others are left out.
    for (std::size_t i = axes_.size(); i-- > 0;) {
      auto values = std::exchange(with[i], {});
      if (!is_told()) with[i] = std::move(values);
    }
    Json result{Json::Object()};
    for (std::size_t i = 0; i < axes_.size(); ++i)
      for (const std::size_t value : with[i])
        result[axes_[i].name].push_back(axes_[i].values[value]);
    return {result};
  }

  std::vector<Json> split(const Buffer& buffer, const std::vector<const Sample*>& samples) const {
    std::vector<Json> fewest;
    for (std::size_t i = 0; i < axes_.size(); ++i) {
      std::vector<Json> found;
      for (std::size_t value = 0; value < axes_[i].values.size(); ++value) {
        std::vector<const Sample*> own;
        std::copy_if(samples.begin(), samples.end(), std::back_inserter(own),
                     [&](const Sample* sample) { return sample->choice[i] == value; });
        if (own.size() == samples.size()) break;  // it splits nothing
        for (Json& condition : conditions(buffer, own)) {
          condition[axes_[i].name].push_back(axes_[i].values[value]);
          found.push_back(std::move(condition));
        }
      }
      if (!found.empty() && (fewest.empty() || found.size() < fewest.size()))
        fewest = std::move(found);
    }
    return fewest;
  }

  const Op& op_;
  Problem usual_;
  std::vector<Axis> axes_;
  std::vector<bool> deciding_;
  std::set<Choice> seen_;
  std::vector<Sample> samples_;
};

/// An option's kind, and its choices if it has any.
Json option_row(const OptionField& field) {
  Json row = Json::Array{field.name, field.pass};
  if (field.number)
    row.push_back("number");
  else if (field.pattern || field.routing)
    row.push_back("pattern");
  else
    row.push_back(field.choices);
  return row;
}

/// A list with a line for each of its elements.
std::string lines(const Json& rows, const std::string& indent) {
  std::string text = "[";
  for (const Json& row : *rows.get_if<Json::Array>()) {
    if (text.size() > 1) text += ",";
    text += "\n" + indent + json_line(row);
  }
  return text + "]";
}

std::string op_text(const Op& op) {
  Json sizes{Json::Array()};
  Json options{Json::Array()};
  for (const SizeField& field : op.sizes()) sizes.push_back(field.name);
  for (const OptionField& field : op.options()) options.push_back(option_row(field));
  std::string text =
      " " + json_line(op.name()) + ": {\n  \"tokens\": " + json_line(op.token_size()) +
      ",\n  \"sizes\": " + json_line(sizes) + ",\n  \"options\": " + lines(options, "   ");
  for (const std::string& pass : op.passes())
    text += ",\n  " + json_line(pass) + ": " + lines(Samples(op, pass).buffers(), "   ");
  return text + "}";
}

}  // namespace

std::string op_table(const Catalog& catalog) {
  std::string text = "{";
  for (const Op* op : catalog.ops) {
    // Python lays the buffers of whole layers out itself (_layer_form.py).
    const Problem usual = usual_form(*op, op->passes().front());
    if (!op->parts(usual).empty() && !op->rows_are_alike(usual)) continue;
    if (text.size() > 1) text += ",";
    text += "\n" + op_text(*op);
  }
  return text + "\n}\n";
}

}  // namespace fftune::tool
