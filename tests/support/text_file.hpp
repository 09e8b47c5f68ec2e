// The text of a file, read and written whole.
#pragma once

#include <filesystem>
#include <string>

namespace fftune::testing {

/// Empty if it is not there.
std::string text_of(const std::filesystem::path& path);
/// Makes the folders above the file too.
void write_text(const std::filesystem::path& path, const std::string& text);

}  // namespace fftune::testing
