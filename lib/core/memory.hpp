// Whether something fits in memory: one answer, in the same words, for whatever allocates.
#pragma once

#include <string>

namespace fftune {

/// "118 KiB", "139.8 GiB": three or four digits with a binary unit.
std::string bytes_text(double bytes);

/// One line that says what `what` lacks on `where`; empty if it fits. Sizes are doubles, because
/// those of a problem may multiply beyond 64 bits.
std::string misfit(const std::string& what, double needed, double there, const std::string& where);

/// Throws Error(unavailable) with that line unless it fits.
void require_fit(const std::string& what, double needed, double there, const std::string& where);

}  // namespace fftune
