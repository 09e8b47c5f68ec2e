// Mutated headers: each is refused with one line, or is sound.
#include <cstring>
#include <random>
#include <span>
#include <string>

#include "core/error.hpp"
#include "safetensors/header.hpp"
#include "support/catch.hpp"
#include "support/safetensors.hpp"

using namespace fftune;
using fftune::testing::SafetensorsWriter;

namespace {

std::string good_file() {
  SafetensorsWriter writer;
  writer.add("model.layers.0.mlp.gate_proj.weight", "BF16", {4, 3}, std::vector<float>(12, 1));
  writer.add("model.layers.0.mlp.up_proj.weight", "F32", {2, 2}, std::vector<float>(4, 1));
  writer.add("lm_head.weight", "I64", {2}, std::string(16, '\1'));
  writer.add("empty", "F8_E4M3", {0, 5}, std::string());
  return writer.bytes();
}

/// Values that numbers are often mistaken at.
const char* const numbers[] = {"0",
                               "1",
                               "-1",
                               "24",
                               "40",
                               "4294967296",
                               "9223372036854775807",
                               "9223372036854775808",
                               "18446744073709551615",
                               "18446744073709551616",
                               "1e400",
                               "2.5",
                               "null",
                               "[]"};

/// Changes a byte, a number, the header's length, or where the file ends.
void mutate(std::string& file, std::mt19937& random) {
  const std::string interesting("\"{}[]:,0-9.eE+ \n\\\xff\xc3tfnu", 24);
  const std::size_t place = random() % file.size();
  switch (random() % 6) {
    case 0:
      file[place] = interesting[random() % interesting.size()];
      return;
    case 1:
      file.insert(place, 1, static_cast<char>(random() % 256));
      return;
    case 2:
      file.erase(place, 1 + random() % 20);
      return;
    case 3: {
      const std::size_t begin = file.find_first_of("0123456789", place);
      if (begin == file.npos) return;
      const std::size_t end = file.find_first_not_of("0123456789", begin);
      file.replace(begin, end == file.npos ? end : end - begin,
                   numbers[random() % std::size(numbers)]);
      return;
    }
    case 4: {
      std::uint64_t length =
          random() % 4 == 0 ? ~std::uint64_t{0} >> random() % 64 : random() % (2 * file.size());
      if (file.size() >= sizeof length) std::memcpy(file.data(), &length, sizeof length);
      return;
    }
    default:
      file.resize(place);
  }
}

/// Keeps the length field right, so that most mutations reach what is behind it.
void repair_length(std::string& file, std::size_t data_bytes) {
  if (file.size() < 8 + data_bytes) return;
  const std::uint64_t length = file.size() - 8 - data_bytes;
  std::memcpy(file.data(), &length, sizeof length);
}

/// Whether it was read.
bool read_soundly(const std::string& file) {
  try {
    std::size_t covered = 0;
    const auto tensors = read_safetensors_header(std::as_bytes(std::span(file)), file.size());
    for (const SavedTensor& tensor : tensors) {
      if (tensor.end < tensor.begin || tensor.end > file.size()) FAIL("out of the file");
      const auto bytes =
          static_cast<std::size_t>(tensor.elements()) * element_bytes(tensor.element);
      if (bytes != tensor.end - tensor.begin) FAIL("another size than its shape's");
      covered += bytes;
      std::vector<double> values(static_cast<std::size_t>(tensor.elements()));
      decode(tensor.element, std::as_bytes(std::span(file)).data() + tensor.begin, values);
    }
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof length);
    if (covered != file.size() - 8 - length) FAIL("a hole");
    return true;
  } catch (const Error& error) {
    const std::string said = error.what();
    if (said.empty() || said.find('\n') != said.npos) FAIL("no line: " << said);
    return false;
  }
}

}  // namespace

TEST_CASE("10,000 mutated headers are refused with one line, or sound") {
  const std::string good = good_file();
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), sizeof header);
  const std::size_t data_bytes = good.size() - 8 - header;
  REQUIRE(read_soundly(good));
  std::mt19937 random(20261122);
  int sound = 0;
  for (int round = 0; round < 10000; ++round) {
    std::string file = good;
    for (auto changes = random() % 3 + 1; changes > 0 && !file.empty(); --changes)
      mutate(file, random);
    if (random() % 4 != 0) repair_length(file, data_bytes);
    sound += read_soundly(file) ? 1 : 0;
  }
  // Some mutations only rename a tensor; were none read, the others would prove little.
  CHECK(sound > 100);
  CHECK(sound < 5000);
}
