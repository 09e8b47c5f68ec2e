// --device: which devices a command is for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "apps/fftune/command_line/session.hpp"
#include "device/backend.hpp"

namespace fftune::tool {

struct Command;

/// Adds --device; with `several`, a list and "all" as well.
void add_device_option(Command& command, std::string& value, bool several);

/// The one device named; the default one if `value` is empty. Throws Error(invalid_input) if it
/// names none, or several.
std::string device_named(const std::string& value, const Environment& environment);

/// The devices named, in order: the default one if `value` is empty, every GPU, or else the
/// CPU, for "all". A GPU that is named twice is an Error(invalid_input).
std::vector<std::string> devices_named(const std::string& value, const Environment& environment);

/// The same in groups: each of one model, over which one search can be spread. If several are
/// named, a missing one is an Error(unavailable).
std::vector<std::vector<std::string>> devices_by_model(const std::string& value,
                                                       const Environment& environment);

/// The kind of device that a name like "cuda:0" means; throws Error(invalid_input) if it means
/// none.
DeviceKind kind_of_device(const std::string& name);

/// The facts of a device that is here, without opening it; throws like open_device().
DeviceFacts facts_of_device(const std::string& name, const Environment& environment);

/// Opens it, and logs its warnings.
std::unique_ptr<Backend> open_named(const std::string& name, const Session& session);

}  // namespace fftune::tool
