// The members of a device's struct that the host fills in: a kernel's parameters.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "kernels/common/op_parts.hpp"

namespace fftune {

/// Sets members of a `Params`, which lies at `base` in the parameters of a kernel. Members that are
/// not set are zero.
template <class Params>
class ParameterFields {
 public:
  explicit ParameterFields(ParameterStruct& parameters, std::size_t base = 0)
      : parameters_(parameters), base_(base) {}

  /// Where a member lies in the parameters.
  template <typename Member>
  std::size_t offset_of(Member Params::*member) const {
    static const Params params{};
    return base_ + static_cast<std::size_t>(reinterpret_cast<const char*>(&(params.*member)) -
                                            reinterpret_cast<const char*>(&params));
  }

  /// Members, each with its value: a number, which is converted to the member's type, or an
  /// argument.
  template <typename Member, typename Value, typename... More>
  void set(Member Params::*member, const Value& value, const More&... more) {
    add(member, argument_for<Member>(value));
    set(more...);
  }
  void set() {}

  /// The same for members that are pointers to tensors, by their names. Those that the options
  /// leave out stay null.
  template <class Places, typename Member, typename... More>
  void set_tensors(const Places& places, Member Params::*member, const char* name,
                   const More&... more) {
    set_places(member, places.at(name));
    set_tensors(places, more...);
  }
  template <class Places>
  void set_tensors(const Places&) {}

  /// The same for the elements of a member that is an array.
  template <class Places, typename Array>
  void set_tensors_of(const Places& places, Array Params::*member,
                      std::initializer_list<std::string> names) {
    std::size_t index = 0;
    for (const std::string& name : names) {
      if (const std::size_t place = places.at(name); place != absent)
        set_at(member, index, TensorArgument{place});
      ++index;
    }
  }

  /// The same where every tensor that has a name is there; an empty name leaves its member null.
  template <typename Member, typename... More>
  void set_named(const TensorPlaces& places, Member Params::*member, std::string_view name,
                 const More&... more) {
    if (!name.empty()) add(member, tensor_of(places, name));
    set_named(places, more...);
  }
  void set_named(const TensorPlaces&) {}

  /// The same by their positions, or `absent`.
  template <typename Member, typename... More>
  void set_places(Member Params::*member, std::size_t place, const More&... more) {
    if (place != absent) add(member, TensorArgument{place});
    set_places(more...);
  }
  void set_places() {}

  /// An element of a member that is an array; of one of several dimensions, counted through all.
  template <typename Array, typename Value>
  void set_at(Array Params::*member, std::size_t index, const Value& value) {
    using Element = std::remove_all_extents_t<Array>;
    parameters_.fields.push_back(
        {offset_of(member) + index * sizeof(Element), argument_for<Element>(value)});
  }

  /// The members of a struct within this one.
  template <typename Inner>
  ParameterFields<Inner> inside(Inner Params::*member) const {
    return ParameterFields<Inner>(parameters_, offset_of(member));
  }
  /// The same of an element of an array of structs.
  template <typename Inner, std::size_t count>
  ParameterFields<Inner> inside(Inner (Params::*member)[count], std::size_t index) const {
    return ParameterFields<Inner>(parameters_, offset_of(member) + index * sizeof(Inner));
  }
  /// The members of a base of this struct.
  template <typename Base>
  ParameterFields<Base> base() const {
    static const Params params{};
    const Base& base = params;
    return ParameterFields<Base>(
        parameters_, base_ + static_cast<std::size_t>(reinterpret_cast<const char*>(&base) -
                                                      reinterpret_cast<const char*>(&params)));
  }

  /// The members of a struct within this one, as set in the parameters of such a struct alone.
  template <typename Inner>
  void set_struct(Inner Params::*member, const ParameterStruct& inner) {
    for (const ParameterStruct::Field& field : inner.fields)
      parameters_.fields.push_back({offset_of(member) + field.offset, field.value});
  }

  /// A member that points to scratch memory, which joins the program's.
  template <typename Member>
  void set_scratch(Program& program, Member Params::*member, std::int64_t bytes) {
    program.scratch.push_back({static_cast<std::size_t>(bytes)});
    add(member, ScratchArgument{program.scratch.size() - 1});
  }

 private:
  template <typename Member>
  void add(Member Params::*member, Argument value) {
    parameters_.fields.push_back({offset_of(member), std::move(value)});
  }

  template <typename Member, typename Value>
  static Argument argument_for(const Value& value) {
    if constexpr (std::is_arithmetic_v<Value>) {
      static_assert(std::is_arithmetic_v<Member>, "a pointer takes a tensor or scratch memory");
      if constexpr (std::floating_point<Member>)
        return static_cast<float>(value);
      else if constexpr (sizeof(Member) == 4)
        return static_cast<std::int32_t>(value);
      else
        return static_cast<std::int64_t>(value);
    } else {
      return value;
    }
  }

  ParameterStruct& parameters_;
  std::size_t base_;
};

}  // namespace fftune
