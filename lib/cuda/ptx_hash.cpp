#include "cuda/ptx_hash.hpp"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "core/error.hpp"
#include "core/hash.hpp"

namespace fftune::cuda {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorKind::internal, "NVRTC's image has no PTX in it");
}

std::string_view part(std::string_view bytes, std::uint64_t offset, std::uint64_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset) refuse();
  return bytes.substr(offset, size);
}

template <class Struct>
Struct read(std::string_view bytes, std::uint64_t offset) {
  Struct value;
  std::memcpy(&value, part(bytes, offset, sizeof value).data(), sizeof value);
  return value;
}

/// The section that has the PTX, its lines apart by zeros.
std::string_view ptx_of(std::string_view cubin) {
  constexpr std::string_view name = ".nv_debug_ptx_txt";
  const auto file = read<Elf64_Ehdr>(cubin, 0);
  if (std::memcmp(file.e_ident, ELFMAG, SELFMAG) != 0 || file.e_ident[EI_CLASS] != ELFCLASS64)
    refuse();
  const auto section = [&](std::uint64_t index) {
    return read<Elf64_Shdr>(cubin, file.e_shoff + index * sizeof(Elf64_Shdr));
  };
  const auto names = section(file.e_shstrndx);
  for (std::uint64_t i = 0; i < file.e_shnum; ++i) {
    const auto each = section(i);
    if (each.sh_name >= names.sh_size) refuse();
    const auto from = part(cubin, names.sh_offset + each.sh_name, names.sh_size - each.sh_name);
    if (from.substr(0, from.find('\0')) == name) return part(cubin, each.sh_offset, each.sh_size);
  }
  refuse();
}

/// Not empty, and those up to the sections for debuggers.
std::vector<std::string_view> lines_of(std::string_view ptx) {
  std::vector<std::string_view> lines;
  while (!ptx.empty()) {
    const auto line = ptx.substr(0, ptx.find('\0'));
    ptx.remove_prefix(std::min(line.size() + 1, ptx.size()));
    if (line.substr(0, 8) == ".section") break;
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

/// The name that `.global .align 4 .u32 name = 3;` defines; empty for another line.
std::string_view global_of(std::string_view line) {
  if (line.substr(0, 8) != ".global ") return {};
  const auto definition = line.substr(0, line.find_first_of("=[;"));
  const auto end = definition.find_last_not_of(' ') + 1;
  const auto begin = definition.find_last_of(' ', end - 1) + 1;
  return definition.substr(begin, end - begin);
}

/// Replaces mangled names, and the numbers of registers, by numbers in the order in which they
/// appear. A kernel's name has the values of its template arguments, and says where a member of a
/// struct is declared. Registers are numbered anew by each change of the source.
class Names {
 public:
  std::string replaced(std::string_view text) {
    constexpr std::string_view digits = "0123456789";
    constexpr std::string_view letters =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_$";
    std::string result;
    while (!text.empty()) {
      const auto begin = std::min({text.find("_Z"), text.find('%'), text.size()});
      const auto end = std::min(text.find_first_not_of(letters, begin + 1), text.size());
      const auto name = text.substr(begin, end - begin);
      result += text.substr(0, begin);
      // `%r12` by its letters and a number; `_Z...` whole.
      const auto kept = name.starts_with('%') ? name.find_last_not_of(digits) + 1 : 0;
      result += name.substr(0, kept);
      if (kept < name.size())
        result += fmt::format("#{}", numbers_.try_emplace(name, numbers_.size()).first->second);
      text.remove_prefix(end);
    }
    return result;
  }

 private:
  std::map<std::string_view, std::size_t> numbers_;
};

}  // namespace

std::string ptx_hash(std::string_view cubin) {
  const auto lines = lines_of(ptx_of(cubin));
  std::string code;
  for (const auto line : lines)
    if (global_of(line).empty()) code.append(line).push_back('\n');
  Names names;
  std::uint64_t hash = fnv1a(names.replaced(code));
  for (const auto line : lines)
    if (const auto name = global_of(line); !name.empty() && code.find(name) != std::string::npos)
      hash = fnv1a(names.replaced(line), hash);
  return hex(hash);
}

}  // namespace fftune::cuda
