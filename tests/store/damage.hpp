// Every way to make one value of a document another type, and every way to lose or repeat a key.
#pragma once

#include <functional>

#include "store/json.hpp"

namespace fftune::example {

/// Calls `visit` with every value in the tree, the outermost first.
void for_each_value(JsonValue& value, const std::function<void(JsonValue&)>& visit);

/// Calls `visit` with `root` after each single change of a value to one of another type, and with
/// what stood there. Integers and reals are types of their own.
void for_each_other_type(JsonValue root,
                         const std::function<void(const JsonValue& root, const JsonValue& before,
                                                  const JsonValue& now)>& visit);

/// Calls `visit` with `root` without one member, for each, and with that member.
void for_each_missing_member(const JsonValue& root,
                             const std::function<void(const JsonValue& root, const std::string& key,
                                                      const JsonValue& before)>& visit);

/// Calls `visit` with `root` with one member twice, for each.
void for_each_repeated_member(
    const JsonValue& root,
    const std::function<void(const JsonValue& root, const std::string& key)>& visit);

}  // namespace fftune::example
