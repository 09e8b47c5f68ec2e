// A family: one way to write a stage (or several in a row), with a space of parameters.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "core/space.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"

namespace fftune {

class Family {
 public:
  virtual ~Family() = default;

  virtual std::string_view name() const = 0;     // unique within its op: "gate_up_sm80"
  virtual std::string_view summary() const = 0;  // one line for people
  virtual DeviceKind device_kind() const = 0;
  /// The op's stages that it covers, in order.
  virtual std::vector<std::string> stages() const = 0;
  /// A fallback takes what no other family takes, and makes no claim to speed. It must refuse
  /// nothing that the op allows on its kind of device.
  virtual bool is_fallback() const { return false; }

  /// Why no configuration can serve, one line ("rows of d=1001 are not 16-byte aligned: d must be
  /// a multiple of 8"); nothing if the space decides.
  virtual std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const = 0;

  /// Only called when refusal() is empty, as are those below.
  virtual Space space(const Problem&, const DeviceFacts&) const = 0;

  /// The configuration to use untuned: feasible, and chosen by an analytical argument.
  virtual Config default_config(const Problem&, const DeviceFacts&) const = 0;

  /// About how many seconds a feasible configuration takes, by a model of the device; nothing where
  /// the family has no better one than waves of blocks. It need only rank: a search begins with the
  /// least, and a record of another shape serves where it is not much above the default's.
  virtual std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const {
    return std::nullopt;
  }

  /// Whether it should be faster than the families behind it in the op's order are for its stages:
  /// only then does it serve untuned.
  virtual bool is_preferred(const Problem&, const DeviceFacts&) const { return true; }

  /// Whether its program of a problem that is made of equal ones (Repetition) is of all of them,
  /// with tensor arguments in the order of the whole's tensors. Others have a program of one, which
  /// a plan repeats. It covers all repeated stages, and may cover others around them.
  virtual bool covers_repetition() const { return false; }

  /// The program of a feasible configuration. Tensor arguments count in the order of the op's
  /// tensors(problem).
  virtual Program program(const Problem&, const DeviceFacts&, const Config&) const = 0;

  /// Embedded source files whose code, when it changes, makes a tuned choice stale.
  virtual std::vector<std::string> sources() const = 0;
};

}  // namespace fftune
