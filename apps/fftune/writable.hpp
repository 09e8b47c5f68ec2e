// Whether files can be written, found out before the work whose result they are to hold; and how
// the tool waits for the lock of a preset file.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>

#include "store/preset_file.hpp"

namespace fftune::tool {

/// Says in the log what is waited for, and ends when the user wants an end, if that can be asked.
LockWait lock_wait(const std::atomic<bool>* cancelled = nullptr);

/// require_mergeable() of the folder that `where` names.
void require_out(const std::filesystem::path& folder, const PresetDevice& device,
                 const std::string& op, const LockWait& wait, const std::string& where = "--out");

/// Throws Error(io) that starts with `where` if `file` cannot be replaced.
void require_writable_file(const std::filesystem::path& file, const std::string& where);

}  // namespace fftune::tool
