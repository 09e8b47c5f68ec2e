// Numbers as people read them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fftune::tool {

/// "1 file", "2 files".
std::string counted(std::size_t count, std::string_view what);
/// "118 KiB", "139.8 GiB": three or four digits with a binary unit.
std::string bytes_text(double bytes);
/// "12.34": microseconds with four significant digits, no unit.
std::string microseconds_text(double microseconds);
/// "83.1%".
std::string percent_text(double fraction);
/// A share of a limit: "83.1%". "above the limit" for more than 105%, which no share can be: the
/// data came from a cache, or the limit was measured while the machine was busy.
std::string limit_share_text(double fraction);
/// "1.23x"; "▼0.87x" below 1, which is seen without colour too.
std::string ratio_text(double ratio);
/// "1.10-1.40x", and "▼0.70-0.85x" where all of it is below 1.
std::string ratio_range_text(double low, double high);
/// "2.1e-03".
std::string error_text(double error);
/// "45s", "2m05s", "1h02m".
std::string seconds_text(double seconds);

}  // namespace fftune::tool
