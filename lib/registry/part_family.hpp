// A family of one op that serves stages of another, which has the former as a part.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "registry/catalog.hpp"
#include "registry/family.hpp"
#include "registry/last_problems.hpp"
#include "registry/op.hpp"

namespace fftune {

class PartFamily final : public Family {
 public:
  /// Changes the program of a family of a part for its place in the whole.
  using Adjust = void (*)(const Family&, const Problem&, const DeviceFacts&, Program&);

  /// `part`: the name of the part of `whole`. Both have to outlive this.
  PartFamily(const Op& (*whole)(), std::string part, const Family& family, Adjust adjust = nullptr);

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return family_.summary(); }
  DeviceKind device_kind() const override { return family_.device_kind(); }
  std::vector<std::string> stages() const override;
  bool is_fallback() const override { return family_.is_fallback(); }
  std::vector<std::string> sources() const override { return family_.sources(); }

  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  bool is_preferred(const Problem&, const DeviceFacts&) const override;
  bool covers_repetition() const override { return family_.covers_repetition(); }
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;

 private:
  /// The part in a program: its tensors are those with these numbers among the whole's.
  struct Placed {
    OpPart part;
    std::vector<Pointer> places;
    std::size_t tensors = 0;
  };

  /// None: the problem has no such part.
  using Part = std::optional<OpPart>;

  std::shared_ptr<const Part> part_of(const Problem&) const;
  const OpPart& existing(const Part&, const Problem&) const;

  const Op& (*whole_)();
  std::string part_;
  std::string name_;
  const Family& family_;
  Adjust adjust_;
  mutable OfLastProblems<Part> part_of_last_;
  mutable OfLastProblems<Placed> placed_last_;
};

/// The part of that name, or null.
const OpPart* part_named(const std::vector<OpPart>& parts, std::string_view name);

/// Lets an input of the part begin behind the first `elements` of the whole's tensor: it may be
/// some columns. OpPart::names keeps the number beside the tensor's name.
void set_first(OpPart& part, const std::string& own, std::int64_t elements);
/// That number: 0 of an input that begins where the whole's tensor does.
std::int64_t first_of(const OpPart& part, const std::string& own);

/// The name of a part's family in the whole: "qkv.product_sm90".
std::string part_family_name(std::string_view part, std::string_view family);

/// Appends `from` to `program`: its tensor number i is at places[i] there, in a tensor or in
/// scratch memory. `tensors` is how many the host functions of `program` may look at.
/// `first_scratch`: where the scratch memory of an equal program begins, which this one takes too.
void append_moved(Program& program, Program from, const std::vector<Pointer>& places,
                  std::size_t tensors, std::optional<std::size_t> first_scratch = std::nullopt);
/// The same where tensor number i is tensor number places[i].
void append_moved(Program& program, Program from, const std::vector<std::size_t>& places,
                  std::size_t tensors);

/// Whether a variant of the recipe has a program of all repetitions.
bool is_repeated_by_family(const Op& op, const Recipe& recipe);

}  // namespace fftune
