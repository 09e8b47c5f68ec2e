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
#include "measure/statistics.hpp"

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
  std::size_t list = 0;  // its buffers, of the lists that there are
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
    constexpr std::size_t random_choices = 150000;
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
      const std::vector<bool> in_list = lists_with(buffer);
      const Sample& first = *std::find_if(samples_.begin(), samples_.end(),
                                          [&](const Sample& s) { return in_list[s.list]; });
      auto& extents_of = extents[&first];
      if (extents_of.empty()) extents_of = symbols(op_, first.problem);
      std::vector<const Sample*> samples;
      for (const Sample& sample : samples_) samples.push_back(&sample);
      for (const Json& condition : conditions(in_list, samples))
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
  /// One whose values need two others beside them has no sample yet, and may decide.
  void find_deciding_axes() {
    std::map<Choice, const Sample*> samples;
    for (const Sample& sample : samples_) samples[sample.choice] = &sample;
    for (std::size_t i = 0; i < axes_.size(); ++i)
      deciding_.push_back(std::all_of(samples_.begin(), samples_.end(),
                                      [&](const Sample& sample) { return sample.choice[i] == 0; }));
    for (const auto& [choice, sample] : samples)
      for (std::size_t i = 0; i < axes_.size(); ++i) {
        Choice usual = choice;
        usual[i] = 0;
        const auto other = samples.find(usual);
        if (other != samples.end() && other->second->list != sample->list) deciding_[i] = true;
      }
  }

  Problem problem_of(const Choice& choice) const {
    Problem problem = usual_;
    for (std::size_t i = 0; i < axes_.size(); ++i) {
      const Axis& axis = axes_[i];
      const std::string& value = axis.values[choice[i]];
      if (axis.kind == Axis::Kind::option) problem.options[axis.name] = value;
      if (axis.kind == Axis::Kind::dtype && value != "T") problem.dtype = DType::fp8;
      if (axis.kind == Axis::Kind::size && !value.empty())
        problem = with_rare(op_, std::move(problem), axis.name);
    }
    return without_unneeded(op_, std::move(problem));
  }

  void add(const Choice& choice) {
    if (!seen_.insert(choice).second) return;
    Problem problem = problem_of(choice);
    const auto tensors = tensors_of_form(op_, problem);
    if (!tensors) return;
    std::vector<Buffer> buffers;
    for (const TensorSpec& tensor : *tensors)
      if (tensor.role != Role::intermediate)
        buffers.push_back({tensor.name, tensor.role,
                           tensor.dtype != problem.dtype ? std::string(dtype_name(tensor.dtype))
                           : problem.dtype == DType::fp8 ? "T=fp8"
                                                         : "T",
                           tensor.shape});
    const std::size_t list =
        numbers_.try_emplace(std::move(buffers), numbers_.size()).first->second;
    samples_.push_back({choice, std::move(problem), list});
  }

  /// Every buffer, in an order that all samples agree with: the usual one's, and each other buffer
  /// in front of its successor.
  std::vector<Buffer> in_order() const {
    std::vector<Buffer> order;
    for (const auto* buffers : lists())
      for (const Buffer& buffer : *buffers)
        if (std::count(order.begin(), order.end(), buffer) == 0) order.push_back(buffer);
    std::map<std::string, std::set<std::string>> before;  // by name
    for (const auto* buffers : lists())
      for (std::size_t i = 0; i < buffers->size(); ++i)
        for (std::size_t j = 0; j < i; ++j) before[(*buffers)[i].name].insert((*buffers)[j].name);
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

  /// The lists of buffers in the order in which they were found.
  std::vector<const std::vector<Buffer>*> lists() const {
    std::vector<const std::vector<Buffer>*> all(numbers_.size());
    for (const auto& [buffers, number] : numbers_) all[number] = &buffers;
    return all;
  }
  std::vector<bool> lists_with(const Buffer& buffer) const {
    std::vector<bool> with;
    for (const auto* buffers : lists())
      with.push_back(std::count(buffers->begin(), buffers->end(), buffer) > 0);
    return with;
  }

  using Values = std::vector<std::uint64_t>;  // of each axis, a bit for each; none: any

  /// The values that axes have in the samples of the lists `in_list`, for those axes that decide;
  /// no value if these samples cannot be told from the others by them.
  std::optional<Values> values_of(const std::vector<bool>& in_list,
                                  const std::vector<const Sample*>& samples) const {
    Values with(axes_.size());
    for (const Sample* sample : samples)
      if (in_list[sample->list])
        for (std::size_t i = 0; i < axes_.size(); ++i)
          if (deciding_[i]) with[i] |= std::uint64_t{1} << sample->choice[i];
    return tells(with, in_list, samples) ? std::optional(with) : std::nullopt;
  }
  bool tells(const Values& with, const std::vector<bool>& in_list,
             const std::vector<const Sample*>& samples) const {
    return std::all_of(samples.begin(), samples.end(), [&](const Sample* sample) {
      bool holds = true;
      for (std::size_t i = 0; holds && i < axes_.size(); ++i)
        holds = with[i] == 0 || (with[i] >> sample->choice[i] & 1) != 0;
      return holds == in_list[sample->list];
    });
  }
  std::vector<const Sample*> with_value(const std::vector<const Sample*>& samples, std::size_t axis,
                                        std::size_t value) const {
    std::vector<const Sample*> own;
    std::copy_if(samples.begin(), samples.end(), std::back_inserter(own),
                 [&](const Sample* sample) { return sample->choice[axis] == value; });
    return own;
  }
  static bool any_in(const std::vector<bool>& in_list, const std::vector<const Sample*>& samples) {
    return std::any_of(samples.begin(), samples.end(),
                       [&](const Sample* sample) { return in_list[sample->list]; });
  }

  /// The conditions under which a sample is of the lists `in_list`. If no values of the axes tell,
  /// an axis is split: its values have conditions of their own.
  std::vector<Json> conditions(const std::vector<bool>& in_list,
                               const std::vector<const Sample*>& samples) const {
    if (!any_in(in_list, samples)) return {};
    auto with = values_of(in_list, samples);
    if (!with) return split(in_list, samples);
    // The last axes first: those that only come along with others are left out.
    for (std::size_t i = axes_.size(); i-- > 0;) {
      const auto values = std::exchange((*with)[i], 0);
      if (values != 0 && !tells(*with, in_list, samples)) (*with)[i] = values;
    }
    Json result{Json::Object()};
    for (std::size_t i = 0; i < axes_.size(); ++i)
      for (std::size_t value = 0; value < axes_[i].values.size(); ++value)
        if (((*with)[i] >> value & 1) != 0) result[axes_[i].name].push_back(axes_[i].values[value]);
    return {result};
  }

  /// Splits the axis that leaves the fewest values to split further, and then makes the fewest
  /// rows.
  std::vector<Json> split(const std::vector<bool>& in_list,
                          const std::vector<const Sample*>& samples) const {
    std::optional<std::size_t> best;
    std::pair<int, int> least;  // values that are not told, and rows of those that are
    for (std::size_t i = 0; i < axes_.size(); ++i) {
      if (!deciding_[i]) continue;
      std::pair<int, int> cost{0, 0};
      std::size_t most = 0;
      for (std::size_t value = 0; value < axes_[i].values.size(); ++value) {
        const auto own = with_value(samples, i, value);
        most = std::max(most, own.size());
        if (!any_in(in_list, own)) continue;
        ++(values_of(in_list, own) ? cost.second : cost.first);
      }
      if (most == samples.size() || (best && cost >= least)) continue;  // the first splits nothing
      best = i;
      least = cost;
    }
    if (!best)
      throw Error(ErrorKind::internal,
                  std::string(op_.name()) + ": no field tells where one of its buffers is");
    std::vector<Json> found;
    for (std::size_t value = 0; value < axes_[*best].values.size(); ++value)
      for (Json& condition : conditions(in_list, with_value(samples, *best, value))) {
        condition[axes_[*best].name].push_back(axes_[*best].values[value]);
        found.push_back(std::move(condition));
      }
    return found;
  }

  const Op& op_;
  Problem usual_;
  std::vector<Axis> axes_;
  std::vector<bool> deciding_;
  std::set<Choice> seen_;
  std::map<std::vector<Buffer>, std::size_t> numbers_;  // of the lists of buffers
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

std::string op_entry(const Op& op) {
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
    text += "\n" + op_entry(*op);
  }
  return text + "\n}\n";
}

}  // namespace fftune::tool
