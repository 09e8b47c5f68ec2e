#include "cuda/cubin_file.hpp"

#include <cstdint>

#include "core/hash.hpp"
#include "cuda/bytes.hpp"

namespace fftune::cuda {
namespace {

// magic | checksum of all that follows | second hash of the key | its length | fields, each text
// with its length before it. Integers are 64 bits in the machine's byte order: a cache does not
// travel between machines.
constexpr std::string_view magic = "fftunek1";
constexpr std::size_t checksum_end = 16;

/// Independent of the hash that names the file: another starting state.
std::uint64_t second_hash(std::string_view key) {
  return fnv1a(key, fnv1a("the second hash of a cubin's key"));
}

}  // namespace

std::string encode_cubin_file(std::string_view key, const CompiledKernel& kernel) {
  ByteWriter body;
  body.number(second_hash(key));
  body.number(key.size());
  body.text(kernel.lowered_name);
  body.text(kernel.report.name);
  body.number(static_cast<std::uint64_t>(kernel.report.registers));
  body.number(static_cast<std::uint64_t>(kernel.report.spill_bytes));
  body.number(static_cast<std::uint64_t>(kernel.report.static_shared_bytes));
  body.number(kernel.report.warnings.size());
  for (const auto& warning : kernel.report.warnings) body.text(warning);
  body.text(kernel.image);
  ByteWriter file;
  file.out = magic;
  file.number(fnv1a(body.out));
  file.out += body.out;
  return std::move(file.out);
}

std::optional<CompiledKernel> decode_cubin_file(std::string_view key, std::string_view content) {
  if (content.size() < checksum_end || content.substr(0, magic.size()) != magic) return {};
  const auto checksum = ByteReader(content.substr(magic.size())).number();
  const auto body = content.substr(checksum_end);
  if (checksum != fnv1a(body)) return {};
  ByteReader reader(body);
  if (reader.number() != second_hash(key) || reader.number() != key.size()) return {};
  CompiledKernel kernel;
  kernel.lowered_name = reader.text();
  kernel.report.name = reader.text();
  kernel.report.registers = reader.small_number();
  kernel.report.spill_bytes = reader.small_number();
  kernel.report.static_shared_bytes = reader.small_number();
  for (auto left = reader.number(); left > 0 && reader.good(); --left)
    kernel.report.warnings.push_back(reader.text());
  kernel.image = reader.text();
  if (!reader.at_end()) return {};
  return kernel;
}

}  // namespace fftune::cuda
