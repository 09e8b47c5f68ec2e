// Reading the compiler's and the assembler's log.
#pragma once

#include <string>
#include <string_view>

#include "device/backend.hpp"

namespace fftune::cuda {

/// Registers, spills, static shared memory and warnings of the kernel `entry` (a lowered name) from
/// a log written with --ptxas-options=-v. Functions that it calls count towards its spills. `name`
/// of the report is left empty. Takes any text.
KernelReport read_assembler_log(std::string_view log, std::string_view entry);

/// The reason of a failed compilation in one line: "ffn/down.cu:12: identifier "x" is undefined".
std::string first_error(std::string_view log);

}  // namespace fftune::cuda
