#include "store/damage.hpp"

#include <utility>
#include <vector>

namespace fftune::example {
namespace {

using Object = JsonValue::Object;

/// Calls `change` with each object of a fresh copy of `root`, and each index of a member in it,
/// then `done` with the copy.
void for_each_member(
    const JsonValue& root,
    const std::function<std::pair<std::string, JsonValue>(Object&, std::size_t)>& change,
    const std::function<void(const JsonValue&, const std::pair<std::string, JsonValue>&)>& done) {
  std::vector<std::size_t> members;  // of each object in the order of for_each_value
  auto copy = root;
  for_each_value(copy, [&](JsonValue& value) {
    if (const auto* object = value.get_if<Object>()) members.push_back(object->size());
  });
  for (std::size_t place = 0; place < members.size(); ++place)
    for (std::size_t i = 0; i < members[place]; ++i) {
      copy = root;
      std::vector<Object*> objects;
      for_each_value(copy, [&](JsonValue& value) {
        if (auto* object = std::get_if<Object>(&value.data)) objects.push_back(object);
      });
      const auto member = change(*objects[place], i);
      done(copy, member);
    }
}

}  // namespace

void for_each_value(JsonValue& value, const std::function<void(JsonValue&)>& visit) {
  visit(value);
  if (auto* array = std::get_if<JsonValue::Array>(&value.data))
    for (auto& item : *array) for_each_value(item, visit);
  if (auto* object = std::get_if<Object>(&value.data))
    for (auto& member : *object) for_each_value(member.second, visit);
}

void for_each_other_type(
    JsonValue root,
    const std::function<void(const JsonValue&, const JsonValue&, const JsonValue&)>& visit) {
  std::vector<JsonValue*> places;
  for_each_value(root, [&](JsonValue& value) { places.push_back(&value); });
  const std::vector<JsonValue> others{{nullptr},
                                      {true},
                                      {std::int64_t{-1}},
                                      {std::uint64_t{1} << 63},
                                      {-0.5},
                                      {std::string()},
                                      {std::string("\n\x1b")},
                                      {JsonValue::Array{}},
                                      {Object{}},
                                      {JsonValue::Array{{nullptr}}}};
  for (auto* place : places)
    for (const auto& other : others) {
      if (place->data.index() == other.data.index()) continue;
      // Swapped, not assigned: what lies deeper must keep its place in memory.
      JsonValue before = other;
      std::swap(*place, before);
      visit(root, before, other);
      std::swap(*place, before);
    }
}

void for_each_missing_member(
    const JsonValue& root,
    const std::function<void(const JsonValue&, const std::string&, const JsonValue&)>& visit) {
  for_each_member(
      root,
      [](Object& object, std::size_t i) {
        auto member = object[i];
        object.erase(object.begin() + static_cast<std::ptrdiff_t>(i));
        return member;
      },
      [&](const JsonValue& changed, const auto& member) {
        visit(changed, member.first, member.second);
      });
}

void for_each_repeated_member(
    const JsonValue& root, const std::function<void(const JsonValue&, const std::string&)>& visit) {
  for_each_member(
      root,
      [](Object& object, std::size_t i) {
        const auto member = object[i];
        object.push_back(member);
        return member;
      },
      [&](const JsonValue& changed, const auto& member) { visit(changed, member.first); });
}

}  // namespace fftune::example
