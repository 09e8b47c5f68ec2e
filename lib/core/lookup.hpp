// A value for each enumerator, or for each of some keys, as a table that is read in both
// directions.
#pragma once

#include <initializer_list>
#include <optional>
#include <utility>

#include "core/error.hpp"

namespace fftune {

template <typename Key, typename Value>
using Lookup = std::initializer_list<std::pair<Key, Value>>;

template <typename Key, typename Value>
std::optional<Value> find_value(const Key& key, Lookup<Key, Value> rows) {
  for (const auto& [known, value] : rows)
    if (known == key) return value;
  return {};
}

template <typename Key, typename Value>
std::optional<Key> find_key(const Value& value, Lookup<Key, Value> rows) {
  for (const auto& [key, known] : rows)
    if (known == value) return key;
  return {};
}

/// For a table of the whole enumeration. Throws Error(internal) if it has no such row.
template <typename Key, typename Value>
Value value_of(const Key& key, Lookup<Key, Value> rows) {
  if (const auto found = find_value(key, rows)) return *found;
  throw Error(ErrorKind::internal, "a value outside the enumeration");
}

}  // namespace fftune
