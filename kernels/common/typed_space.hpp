// A space whose constraints take a configuration as a struct, which a family of many constraints
// defines: then its default, for which the whole space is enumerated, follows without a Config for
// each candidate. Plans of new numbers of tokens wait for that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/config_reader.hpp"
#include "core/space.hpp"

namespace fftune {

template <class Point>
class TypedSpace {
 public:
  using Set = void (*)(Point&, std::int64_t);
  using Holds = std::function<bool(const Point&)>;
  using Names = std::vector<std::string_view>;

  /// A parameter that is a field of the point.
  template <auto field>
  static void to(Point& point, std::int64_t value) {
    point.*field = static_cast<std::remove_reference_t<decltype(point.*field)>>(value);
  }

  /// `point` has what all configurations share.
  explicit TypedSpace(Point point) : point_(std::move(point)) {}

  TypedSpace& parameter(std::string_view name, std::string_view help, Set set,
                        std::vector<std::int64_t> values) {
    parameters_->push_back({name, help, set, {}, std::move(values)});
    return *this;
  }
  /// `set` gets the index of the word.
  TypedSpace& words(std::string_view name, std::string_view help, Set set,
                    std::vector<std::string_view> words) {
    std::vector<std::int64_t> values;
    for (std::size_t i = 0; i < words.size(); ++i) values.push_back(static_cast<std::int64_t>(i));
    parameters_->push_back({name, help, set, std::move(words), std::move(values)});
    return *this;
  }
  /// As those of Space.
  TypedSpace& when_absent(std::int64_t value) {
    return when_absent_by([value] { return value; });
  }
  TypedSpace& when_absent_by(std::function<std::int64_t()> value) {
    parameters_->back().absent = std::move(value);
    return *this;
  }
  /// `reads` as Constraint::reads. Its parameters were declared before.
  void constraint(std::string reason, const Names& reads, Holds holds) {
    std::uint32_t mask = 0;
    for (std::size_t i = 0; i < parameters_->size(); ++i)
      if (std::find(reads.begin(), reads.end(), (*parameters_)[i].name) != reads.end())
        mask |= std::uint32_t{1} << i;
    constraints_.push_back({std::move(reason), std::move(holds), mask});
  }

  /// The same space for all who take a Config.
  Space space() const {
    Space space;
    for (const Parameter& own : *parameters_) {
      fftune::Parameter parameter{std::string(own.name), std::string(own.help), {}};
      for (const std::int64_t value : own.values) parameter.values.push_back(own.value(value));
      space.parameter(std::move(parameter));
      if (own.absent) space.when_absent_by([own] { return own.value(own.absent()); });
    }
    for (const Constraint& own : constraints_) {
      std::vector<std::string> reads;
      for (std::size_t i = 0; i < parameters_->size(); ++i)
        if (own.reads >> i & 1) reads.emplace_back((*parameters_)[i].name);
      space.constraint(
          own.reason,
          [parameters = parameters_, point = point_, reads = own.reads,
           holds = own.holds](const Config& config) {
            Point read = point;
            ConfigReader reader(config);
            for (std::size_t i = 0; i < parameters->size(); ++i)
              if (reads == 0 || reads >> i & 1)
                (*parameters)[i].set(read, (*parameters)[i].number(reader));
            return holds(read);
          },
          std::move(reads));
    }
    return space;
  }

  /// Calls `visit` with the point of every feasible configuration, in the order of
  /// Space::feasible(), and with a function that makes its Config.
  template <class Visit>
  void for_each_feasible(const Visit& visit) const {
    visit_feasible([&](const Point& point, const auto& config) {
      visit(point, config);
      return true;
    });
  }

  bool is_empty() const {
    return visit_feasible([](const Point&, const auto&) { return false; });
  }

  /// Whether a point whose parameters have values of the space is feasible.
  bool holds(const Point& point) const {
    return std::all_of(constraints_.begin(), constraints_.end(),
                       [&](const Constraint& constraint) { return constraint.holds(point); });
  }

 private:
  struct Parameter {
    std::string_view name, help;  // literals
    Set set = nullptr;
    std::vector<std::string_view> words;  // empty: the values are numbers
    std::vector<std::int64_t> values;     // or the indices of the words
    std::function<std::int64_t()> absent = {};

    ParameterValue value(std::int64_t value) const {
      return words.empty() ? ParameterValue(value)
                           : ParameterValue(words[static_cast<std::size_t>(value)]);
    }
    std::int64_t number(ConfigReader& reader) const {
      if (words.empty()) return reader.at(name);
      return std::find(words.begin(), words.end(), reader.word(name)) - words.begin();
    }
  };
  struct Constraint {
    std::string reason;
    Holds holds;
    std::uint32_t reads = 0;  // a bit for each parameter
  };

  /// Whether `visit` returned true for all of them, the first false being the end.
  template <class Visit>
  bool visit_feasible(const Visit& visit) const {
    // As in Space::feasible(): the constraints that can be judged once the parameters of the levels
    // before have their values. The last level has no parameter.
    struct Level {
      const Parameter* parameter = nullptr;
      std::int64_t value = 0;
      std::vector<const Holds*> decided = {};
    };
    std::vector<Level> levels(parameters_->size() + 1);
    Point point = point_;
    for (std::size_t i = 0; i < parameters_->size(); ++i) {
      const Parameter& parameter = (*parameters_)[i];
      levels[i].parameter = &parameter;
      if (!parameter.values.empty()) parameter.set(point, parameter.values.front());
    }
    for (const Constraint& constraint : constraints_) {
      std::size_t needed = constraint.reads == 0 ? parameters_->size() : 0;
      for (std::size_t i = 0; i < parameters_->size(); ++i)
        if (constraint.reads >> i & 1) needed = i + 1;
      levels[needed].decided.push_back(&constraint.holds);
    }
    const auto config = [&] {
      Config made;
      for (const Level& level : levels)
        if (level.parameter) made.set(level.parameter->name, level.parameter->value(level.value));
      return made;
    };
    const auto descend = [&](const auto& self, Level* level) -> bool {
      for (const Holds* holds : level->decided)
        if (!(*holds)(point)) return true;
      const Parameter* const parameter = level->parameter;
      if (parameter == nullptr) return visit(static_cast<const Point&>(point), config);
      for (const std::int64_t value : parameter->values) {
        parameter->set(point, level->value = value);
        if (!self(self, level + 1)) return false;
      }
      return true;
    };
    return descend(descend, levels.data());
  }

  Point point_;
  std::shared_ptr<std::vector<Parameter>> parameters_ =
      std::make_shared<std::vector<Parameter>>();  // shared with what space() gives
  std::vector<Constraint> constraints_;
};

}  // namespace fftune
