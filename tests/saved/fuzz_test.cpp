// Mutated headers, and mutated checkpoints of every quantised format: each is refused with one
// line, or is sound. With AddressSanitizer no read leaves a tensor.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "saved/header.hpp"
#include "saved/model.hpp"
#include "store/json.hpp"
#include "support/catch.hpp"
#include "support/safetensors.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_file.hpp"

using namespace fftune;
using namespace fftune::testing;

namespace fs = std::filesystem;

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

/// A tensor of a file, with its bytes.
struct Content {
  std::string name;
  Element element = Element::f32;
  std::vector<std::int64_t> shape = {};
  std::string bytes = {};

  /// Cuts or repeats the bytes to as many as the shape has.
  void refill() {
    std::size_t count = element_bytes(element);
    for (const std::int64_t extent : shape) count *= static_cast<std::size_t>(extent);
    if (bytes.empty()) bytes = "\3";
    const std::string seed = bytes;
    bytes.resize(count);
    for (std::size_t i = seed.size(); i < count; ++i) bytes[i] = seed[i % seed.size()];
  }
};

std::vector<Content> contents_of(const fs::path& file) {
  const std::string text = read_whole_file(file);
  std::vector<Content> all;
  for (const SavedTensor& tensor :
       read_safetensors_header(std::as_bytes(std::span(text)), text.size()))
    if (tensor.name != "expected")
      all.push_back({tensor.name, tensor.element, tensor.shape,
                     text.substr(tensor.begin, tensor.end - tensor.begin)});
  return all;
}

/// Gives a tensor another element type, another shape or other bytes, or leaves it out.
void mutate_tensor(std::vector<Content>& all, std::mt19937& random) {
  constexpr Element elements[] = {Element::f64, Element::f32,     Element::f16, Element::bf16,
                                  Element::i64, Element::i32,     Element::i16, Element::i8,
                                  Element::u8,  Element::f8_e4m3, Element::u32, Element::f8_e8m0};
  Content& one = all[random() % all.size()];
  auto& shape = one.shape;
  std::int64_t* const extent = shape.empty() ? nullptr : &shape[random() % shape.size()];
  switch (random() % 9) {
    case 0:
    case 1:
    case 2:
      one.element = elements[random() % std::size(elements)];
      break;
    case 3:
      if (extent != nullptr) *extent += random() % 2 == 0 || *extent == 0 ? 1 : -1;
      break;
    case 4:
      if (extent != nullptr) *extent = random() % 2 == 0 ? *extent * 2 : (*extent + 1) / 2;
      break;
    case 5:
      std::reverse(shape.begin(), shape.end());
      break;
    case 6:
      if (!shape.empty() && random() % 2 == 0)
        shape.pop_back();
      else
        shape.insert(shape.begin() + static_cast<long>(random() % (shape.size() + 1)), 1);
      break;
    case 7:
      for (int i = 0; i < 4 && !one.bytes.empty(); ++i)
        one.bytes[random() % one.bytes.size()] = static_cast<char>(random() % 256);
      break;
    default:
      if (all.size() > 1) all.erase(all.begin() + (&one - all.data()));
      return;
  }
  one.refill();
}

/// Reads all that a checkpoint has: values, formats and codes. The line that refuses it, if one
/// does.
std::string read_all(const fs::path& folder) {
  try {
    const SavedModel model(folder);
    for (const auto& [name, tensor] : model.tensors()) {
      std::vector<float> values(static_cast<std::size_t>(tensor.saved.elements()));
      model.read(tensor, 0, DType::f32, reinterpret_cast<std::byte*>(values.data()), values.size());
      if (!tensor.quantised) continue;
      const CodeFormat format = model.code_format(tensor);
      std::vector<Code> codes(static_cast<std::size_t>(tensor.quantised->code_columns()));
      for (std::size_t row = 0; row * codes.size() < values.size(); ++row)
        model.read_codes(tensor, row, codes);
    }
    return "";
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_input) FAIL("not about the input: " << error.what());
    return error.what();
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

TEST_CASE("mutated checkpoints of every quantised format are refused with one line, or sound") {
  const fs::path vectors = fs::path(FFTUNE_SOURCE_DIR) / "tests/data/quantised";
  const JsonValue index = parse_json(read_whole_file(vectors / "index.json"));
  std::mt19937 random(20261129);
  int sound = 0, all = 0;
  for (const auto& [file, entry] : *index.get_if<JsonValue::Object>()) {
    CAPTURE(file);
    const std::vector<Content> good = contents_of(vectors / file);
    for (int round = 0; round < 40; ++round) {
      std::vector<Content> tensors = good;
      std::string config = json_line(*entry.find("quantization_config"));
      for (auto changes = random() % 3; changes > 0; --changes) mutate_tensor(tensors, random);
      if (random() % 4 == 0)
        if (const std::size_t digit = config.find_first_of("0123456789", random() % config.size());
            digit != config.npos)
          config.replace(digit, 1, numbers[random() % std::size(numbers)]);
      SafetensorsWriter writer;
      for (const Content& each : tensors)
        writer.add(each.name, element_name(each.element), each.shape, each.bytes);
      const TemporaryFolder folder;
      writer.write(folder.path() / "model.safetensors");
      write_text(folder.path() / "config.json", R"({"quantization_config":)" + config + "}");
      const std::string said = read_all(folder.path());
      if (said.find('\n') != said.npos) FAIL("no line: " << said);
      sound += said.empty() ? 1 : 0;
      ++all;
    }
  }
  CHECK(sound > all / 8);
  CHECK(sound < all / 2);
}
