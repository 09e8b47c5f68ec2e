// Records to write, read, damage and look up.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "store/preset_file.hpp"

namespace fftune::example {

Problem ffn(std::int64_t m, DType dtype = DType::bf16);

PresetRecord record(const Problem& problem, double median_us = 20.1234);

/// The problem by this recipe, with the sources of today.
PresetRecord record(const Catalog& catalog, const Op& op, const Problem& problem,
                    const Recipe& recipe);

PresetDevice device();

std::string text(const std::filesystem::path& path);

void write(const std::filesystem::path& path, const std::string& text);

}  // namespace fftune::example
