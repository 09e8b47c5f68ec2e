#include "emulator/cubin.hpp"

#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace fftune::emulator {

CubinFacts facts_of_cubin(const char* image) {
  CubinFacts facts;
  if (std::memcmp(image, ELFMAG, SELFMAG) != 0) {
    facts.ptx = image;
    return facts;
  }
  const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(image);
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(image + header->e_shoff);
  const char* const names = image + sections[header->e_shstrndx].sh_offset;
  std::string_view info;
  const Elf64_Sym* symbols = nullptr;
  const char* symbol_names = nullptr;
  for (int i = 0; i < header->e_shnum; ++i) {
    const std::string_view name = names + sections[i].sh_name;
    const char* const content = image + sections[i].sh_offset;
    if (name == ".nv_debug_ptx_txt") facts.ptx.assign(content, sections[i].sh_size);
    if (name == ".nv.info") info = {content, sections[i].sh_size};
    if (name == ".symtab") {
      symbols = reinterpret_cast<const Elf64_Sym*>(content);
      symbol_names = image + sections[sections[i].sh_link].sh_offset;
    }
  }
  if (facts.ptx.empty()) throw std::runtime_error("the cubin has no PTX in it");
  // Records of a format, an attribute, and the number of bytes behind them or a value.
  constexpr char sized = 4, register_count = 0x2f;
  while (info.size() >= 4) {
    std::uint16_t bytes = 0;
    std::memcpy(&bytes, info.data() + 2, sizeof bytes);
    if (info[0] == sized && info[1] == register_count) {
      std::uint32_t values[2];  // a symbol and its registers
      std::memcpy(values, info.data() + 4, sizeof values);
      facts.registers[symbol_names + symbols[values[0]].st_name] = static_cast<int>(values[1]);
    }
    info.remove_prefix(std::min<std::size_t>(4 + (info[0] == sized ? bytes : 0), info.size()));
  }
  return facts;
}

}  // namespace fftune::emulator
