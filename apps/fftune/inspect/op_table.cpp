#include "apps/fftune/inspect/ops.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/terminal/json.hpp"
#include "core/error.hpp"

namespace fftune::tool {

namespace {

/// Places of axes, a bit for each.
using Axes = std::uint64_t;

bool has(Axes axes, std::size_t axis) {
  return (axes >> axis & 1) != 0;
}

/// The axes that have another value than the usual one.
Axes changed(const Choice& choice) {
  Axes axes = 0;
  for (std::size_t i = 0; i < choice.size(); ++i) axes |= Axes{choice[i] != 0} << i;
  return axes;
}

/// The values of both, and of the second where both are unusual.
Choice joined(Choice choice, const Choice& other) {
  for (std::size_t i = 0; i < choice.size(); ++i)
    if (other[i] != 0) choice[i] = other[i];
  return choice;
}

/// A buffer apart from its place: another dtype or shape is another buffer.
struct Buffer {
  std::string name;
  Role role = Role::input;
  std::string dtype;
  std::vector<std::int64_t> shape;

  auto operator<=>(const Buffer&) const = default;
};

/// The buffers of a pass, and the values of axes with which each is there.
///
/// A buffer has axes of its own: at first those that change it beside up to two other values. An
/// atom, which is a value or a few that only go together, adds its axes if it changes the buffer
/// beside some choice of these, or makes the op take one that it refuses. When no atom does, the
/// choices of the buffer's axes are its truth table, from which its conditions are read.
class Buffers {
 public:
  Buffers(const Op& op, const std::string& pass)
      : op_(op), usual_(usual_form(op, pass)), axes_(axes_of(op, pass)) {
    constexpr int most_values = 3;
    for (int values = 0; values <= most_values; ++values)
      add_choices(Choice(axes_.size()), 0, values);
    for (const auto& [name, choice] : firsts()) grow(name, own_axes_[name]);
  }

  Json rows() {
    std::map<std::string, std::vector<Choice>> choices;  // by a buffer's name
    for (const auto& [name, own] : own_axes_) choices[name] = choices_of(own);
    Json rows{Json::Array()};
    std::map<const List*, std::map<std::string, std::vector<std::string>>> extents;
    for (const auto& [buffer, list] : in_order()) {
      std::vector<Sample> samples;
      for (const Choice& choice : choices[buffer.name])
        if (const auto there = list_of(choice))
          samples.push_back({&choice, buffer_of(*there, buffer.name) == buffer});
      const auto found = conditions(samples);
      if (found.empty()) fail("nothing tells where " + buffer.name + " is");
      const Problem problem = problem_of(op_, usual_, axes_, list->choice);
      auto& extents_of = extents[list];
      if (extents_of.empty()) extents_of = symbols(op_, problem);
      for (const Json& condition : found)
        rows.push_back(Json::Array{buffer.name, role_name(buffer.role),
                                   dtype_symbol(op_, problem, buffer.name), extents_of[buffer.name],
                                   condition});
    }
    return rows;
  }

 private:
  struct List {
    const std::vector<Buffer>* buffers = nullptr;
    Choice choice;  // the first that has them
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorKind::internal, fmt::format("{}/{}: {}", op_.name(), usual_.pass, what));
  }

  /// The place of the choice's buffers in lists_; nothing if the op refuses it.
  std::optional<std::size_t> list_of(const Choice& choice) {
    const auto [known, is_new] = found_.try_emplace(choice);
    if (!is_new) return known->second;
    const Problem problem = problem_of(op_, usual_, axes_, choice);
    const auto tensors = tensors_of_form(op_, problem, usual_);
    if (!tensors) return std::nullopt;
    std::vector<Buffer> buffers;
    for (const TensorSpec& tensor : *tensors)
      if (tensor.role != Role::intermediate)
        buffers.push_back({tensor.name, tensor.role,
                           tensor.dtype != problem.dtype ? std::string(dtype_name(tensor.dtype))
                           : problem.dtype == DType::fp8 ? "T=fp8"
                                                         : "T",
                           tensor.shape});
    const auto [list, added] = numbers_.try_emplace(std::move(buffers), lists_.size());
    if (added) lists_.push_back({&list->first, choice});
    return known->second = list->second;
  }
  std::optional<Buffer> buffer_of(std::size_t list, const std::string& name) const {
    for (const Buffer& buffer : *lists_[list].buffers)
      if (buffer.name == name) return buffer;
    return std::nullopt;
  }
  /// The first choice that has a buffer of each name.
  std::map<std::string, Choice> firsts() const {
    std::map<std::string, Choice> firsts;
    for (const List& list : lists_)
      for (const Buffer& buffer : *list.buffers) firsts.try_emplace(buffer.name, list.choice);
    return firsts;
  }

  /// The choice and so many more values, of axes from `first` on.
  void add_choices(Choice choice, std::size_t first, int values) {
    if (values == 0) {
      note_changes(choice);
      if (is_atom(choice)) atoms_.push_back(choice);
      return;
    }
    for (std::size_t i = first; i < axes_.size(); ++i) {
      for (std::size_t value = 1; value < axes_[i].values.size(); ++value) {
        choice[i] = static_cast<std::uint8_t>(value);
        add_choices(choice, i + 1, values - 1);
      }
      choice[i] = 0;
    }
  }

  /// Which buffers each value of the choice changes beside its others.
  void note_changes(const Choice& choice) {
    const auto list = list_of(choice);
    for (std::size_t i = 0; list && i < choice.size(); ++i) {
      Choice without = choice;
      without[i] = 0;
      const auto other = list_of(without);
      if (!other || *other == *list) continue;
      for (const std::size_t one : {*list, *other})
        for (const Buffer& buffer : *lists_[one].buffers)
          if (buffer_of(*list, buffer.name) != buffer_of(*other, buffer.name))
            own_axes_[buffer.name] |= Axes{1} << i;
    }
  }

  /// Whether the op takes the choice, which is one value, or has some that are refused without all
  /// others. Fewer of these it takes: else they are refused for another reason.
  bool is_atom(const Choice& choice) {
    const Axes all = changed(choice);
    const auto takes = [&](Axes part) {
      Choice values = choice;
      for (std::size_t i = 0; i < values.size(); ++i)
        if (!has(part, i)) values[i] = 0;
      return list_of(values).has_value();
    };
    if (!takes(all)) return false;
    for (Axes some = (all - 1) & all; some != 0; some = (some - 1) & all) {
      bool needs_all = !takes(some);
      for (Axes other = (all - 1) & all; needs_all && other != 0; other = (other - 1) & all) {
        const bool fewer = other != some && (other & some) == other;
        const bool more = other != some && (other & some) == some;
        if (fewer || more) needs_all = takes(other) == fewer;
      }
      if (needs_all) return true;
    }
    return std::has_single_bit(all);
  }

  /// The choices of some axes, beside the usual values of all others.
  std::vector<Choice> choices_of(Axes own) const {
    std::vector<Choice> choices{Choice(axes_.size())};
    for (std::size_t i = 0; i < axes_.size(); ++i) {
      const std::size_t before = choices.size();
      for (std::size_t value = 1; has(own, i) && value < axes_[i].values.size(); ++value)
        for (std::size_t n = 0; n < before; ++n) {
          choices.push_back(choices[n]);
          choices.back()[i] = static_cast<std::uint8_t>(value);
        }
    }
    return choices;
  }

  void grow(const std::string& name, Axes& own) {
    for (auto atom = atoms_.begin(); atom != atoms_.end();) {
      const bool grows = decides(*atom, own, name);
      if (grows) own |= changed(*atom);
      atom = grows ? atoms_.begin() : std::next(atom);
    }
  }

  /// Whether the atom changes the buffer beside some choice of its own axes, or makes the op take
  /// one. The atom's values of these axes are among the choice's.
  bool decides(const Choice& atom, Axes own, const std::string& name) {
    if ((changed(atom) & ~own) == 0) return false;
    for (const Choice& choice : choices_of(own)) {
      const Choice with = joined(choice, atom);
      bool is_beside = true;
      for (std::size_t i = 0; is_beside && i < with.size(); ++i)
        is_beside = !has(own, i) || with[i] == choice[i];
      if (!is_beside) continue;
      const auto list = list_of(choice);
      if (!list && (changed(atom) & own) == 0) continue;
      const auto other = list_of(with);
      if (other && (!list || buffer_of(*list, name) != buffer_of(*other, name))) return true;
    }
    return false;
  }

  /// Every buffer with the first list that has it, in an order that all lists agree with: the usual
  /// one's, and each other buffer in front of its successor.
  std::vector<std::pair<Buffer, const List*>> in_order() {
    const auto own = firsts();  // buffers that are there with different choices may be so together
    for (const auto& [name, one] : own)
      for (const auto& [other_name, other] : own) list_of(joined(one, other));
    std::vector<std::pair<Buffer, const List*>> found, sorted;
    std::set<Buffer> known;
    std::map<std::string, std::set<std::string>> before;  // by name
    for (const List& list : lists_) {
      std::set<std::string> names;
      for (const Buffer& buffer : *list.buffers) {
        if (known.insert(buffer).second) found.emplace_back(buffer, &list);
        before[buffer.name].insert(names.begin(), names.end());
        names.insert(buffer.name);
      }
    }
    std::set<std::string> done;
    while (sorted.size() < found.size()) {
      const auto next = std::find_if(found.begin(), found.end(), [&](const auto& one) {
        const auto& needed = before[one.first.name];
        return done.count(one.first.name) == 0 &&
               std::includes(done.begin(), done.end(), needed.begin(), needed.end());
      });
      if (next == found.end()) fail("its buffers have different orders");
      const std::string name = next->first.name;
      std::copy_if(found.begin(), found.end(), std::back_inserter(sorted),
                   [&](const auto& one) { return one.first.name == name; });
      done.insert(name);
    }
    return sorted;
  }

  struct Sample {
    const Choice* choice = nullptr;
    bool is_there = false;  // the buffer in question
  };
  using Values = std::vector<std::uint64_t>;  // of each axis, a bit for each; none: any

  /// Whether the values are those of the samples with the buffer, and of no others.
  static bool tell(const Values& values, const std::vector<Sample>& samples) {
    return std::all_of(samples.begin(), samples.end(), [&](const Sample& sample) {
      bool holds = true;
      for (std::size_t i = 0; holds && i < values.size(); ++i)
        holds = values[i] == 0 || (values[i] >> (*sample.choice)[i] & 1) != 0;
      return holds == sample.is_there;
    });
  }
  std::optional<Values> values_of(const std::vector<Sample>& samples) const {
    Values with(axes_.size());
    for (const Sample& sample : samples)
      for (std::size_t i = 0; sample.is_there && i < axes_.size(); ++i)
        with[i] |= std::uint64_t{1} << (*sample.choice)[i];
    return tell(with, samples) ? std::optional(with) : std::nullopt;
  }
  static std::vector<Sample> with_value(const std::vector<Sample>& samples, std::size_t axis,
                                        std::size_t value) {
    std::vector<Sample> own;
    std::copy_if(samples.begin(), samples.end(), std::back_inserter(own),
                 [&](const Sample& sample) { return (*sample.choice)[axis] == value; });
    return own;
  }
  static bool any_there(const std::vector<Sample>& samples) {
    return std::any_of(samples.begin(), samples.end(),
                       [](const Sample& sample) { return sample.is_there; });
  }

  /// The conditions under which the buffer is there. If no values of the axes tell, an axis is
  /// split: its values have conditions of their own.
  std::vector<Json> conditions(const std::vector<Sample>& samples) const {
    if (!any_there(samples)) return {};
    auto with = values_of(samples);
    if (!with) return split(samples);
    // The last axes first: those that only come along with others are left out.
    for (std::size_t i = axes_.size(); i-- > 0;) {
      const auto values = std::exchange((*with)[i], 0);
      if (values != 0 && !tell(*with, samples)) (*with)[i] = values;
    }
    Json result{Json::Object()};
    for (std::size_t i = 0; i < axes_.size(); ++i)
      for (std::size_t value = 0; value < axes_[i].values.size(); ++value)
        if (((*with)[i] >> value & 1) != 0) result[axes_[i].name].push_back(axes_[i].values[value]);
    return {result};
  }

  /// Splits the axis that leaves the fewest values to split further, and then makes the fewest
  /// rows. There is one: samples differ, and one alone is told by its values.
  std::vector<Json> split(const std::vector<Sample>& samples) const {
    std::size_t best = 0;
    // Values that are not told, and rows of those that are.
    std::pair<int, int> least{std::numeric_limits<int>::max(), 0};
    for (std::size_t i = 0; i < axes_.size(); ++i) {
      std::pair<int, int> cost{0, 0};
      std::size_t most = 0;
      for (std::size_t value = 0; value < axes_[i].values.size(); ++value) {
        const auto own = with_value(samples, i, value);
        most = std::max(most, own.size());
        if (!any_there(own)) continue;
        ++(values_of(own) ? cost.second : cost.first);
      }
      if (most == samples.size() || cost >= least) continue;  // the first splits nothing
      best = i;
      least = cost;
    }
    std::vector<Json> found;
    for (std::size_t value = 0; value < axes_[best].values.size(); ++value)
      for (Json& condition : conditions(with_value(samples, best, value))) {
        condition[axes_[best].name].push_back(axes_[best].values[value]);
        found.push_back(std::move(condition));
      }
    return found;
  }

  const Op& op_;
  Problem usual_;
  std::vector<Axis> axes_;
  std::map<Choice, std::optional<std::size_t>> found_;
  std::map<std::vector<Buffer>, std::size_t> numbers_;  // of lists_
  std::deque<List> lists_;
  std::vector<Choice> atoms_;
  std::map<std::string, Axes> own_axes_;
};

/// An option's kind, and its choices if it has any.
Json option_row(const OptionField& field) {
  Json row = Json::Array{field.name, field.pass};
  if (field.number)
    row.push_back("number");
  else if (field.has_choices())
    row.push_back(field.choices);
  else
    row.push_back("pattern");
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
    text += ",\n  " + json_line(pass) + ": " + lines(Buffers(op, pass).rows(), "   ");
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
