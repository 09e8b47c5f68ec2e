// The bytes of a cached kernel.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "cuda/cubin_cache.hpp"

namespace fftune::cuda {

/// The file's content for `kernel`, published under `key`.
std::string encode_cubin_file(std::string_view key, const CompiledKernel& kernel);

/// The inverse; nothing if the content is damaged or belongs to another key. Takes any bytes.
std::optional<CompiledKernel> decode_cubin_file(std::string_view key, std::string_view content);

}  // namespace fftune::cuda
