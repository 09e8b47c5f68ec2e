// Quantised weights, against what the packages that wrote the files decode from them
// (tests/data/quantised, with the packages' names and versions in index.json).
#include "saved/quantised.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "saved/model.hpp"
#include "store/json.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/safetensors.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_file.hpp"

using namespace fftune;
using namespace fftune::testing;

namespace {

namespace fs = std::filesystem;

const fs::path vectors = fs::path(FFTUNE_SOURCE_DIR) / "tests/data/quantised";

/// A folder with the weights of a file and a config.json.
class Checkpoint {
 public:
  Checkpoint(const fs::path& weights, const std::string& quantisation) {
    fs::copy_file(weights, folder_.path() / "model.safetensors");
    write_text(folder_.path() / "config.json", R"({"quantization_config":)" + quantisation + "}");
  }
  explicit Checkpoint(const SafetensorsWriter& writer, const std::string& quantisation) {
    writer.write(folder_.path() / "model.safetensors");
    write_text(folder_.path() / "config.json", R"({"quantization_config":)" + quantisation + "}");
  }
  const fs::path& path() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
};

std::vector<float> values_of(const SavedModel& model, const std::string& name) {
  const auto& tensor = model.at(name);
  std::vector<float> values(static_cast<std::size_t>(tensor.saved.elements()));
  model.read(tensor, 0, DType::f32, reinterpret_cast<std::byte*>(values.data()), values.size());
  return values;
}

/// The dense weight's name, and whether it is [experts, k, n].
std::string dense_name(const SavedModel& model) {
  for (const auto& [name, tensor] : model.tensors())
    if (tensor.quantised) return name;
  return "";
}

/// The number that kernels make of a code.
double value_of(const CodeFormat& format, const Code& code) {
  const auto decoded = [](Element element, double byte) {
    double value = 0;
    const auto bits = static_cast<std::byte>(byte);
    decode(element, &bits, {&value, 1});
    return value;
  };
  if (format.weights == "int4") return (code.bits - code.zero) * code.scale;
  if (format.weights == "int8") return decoded(Element::i8, code.bits) * code.scale;
  if (format.weights == "fp8") return decoded(Element::f8_e4m3, code.bits) * code.scale;
  constexpr double sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const double size = sizes[code.bits & 7] * (code.bits & 8 ? -1 : 1);
  const Element scale = format.weights == "mxfp4" ? Element::f8_e8m0 : Element::f8_e4m3;
  return size * decoded(scale, code.scale) * code.row_scale;
}

/// Elements whose codes stand for another number than the dense weight has, or whose group has
/// another scale or zero point; none where kernels have no such format.
std::size_t wrong_codes(const SavedModel& model, const SavedModel::Tensor& tensor) {
  const CodeFormat format = model.code_format(tensor);
  if (!format.unfit.empty()) return 0;
  const auto columns = static_cast<std::size_t>(tensor.quantised->code_columns());
  const auto count = static_cast<std::size_t>(tensor.saved.elements());
  const auto& shape = tensor.quantised->dense().shape;
  const bool turned = shape.size() == 3;  // [experts, k, n]
  const std::size_t n = turned ? static_cast<std::size_t>(shape[2]) : count / columns;
  std::vector<float> values(count);
  model.read(tensor, 0, DType::f32, reinterpret_cast<std::byte*>(values.data()), count);
  std::size_t wrong = 0;
  std::vector<Code> codes(columns);
  for (std::size_t row = 0; row < count / columns; ++row) {
    model.read_codes(tensor, row, codes);
    for (std::size_t i = 0; i < columns; ++i) {
      const auto right = static_cast<double>(
          values[turned ? (row / n * columns + i) * n + row % n : row * columns + i]);
      const double ours = value_of(format, codes[i]);
      wrong +=
          std::isfinite(right) && !(std::fabs(ours - right) <= 1e-6 * std::fabs(right) + 1e-37);
      for (const std::int64_t group : format.groups) {
        const Code& first = codes[group == 0 ? 0 : i - i % static_cast<std::size_t>(group)];
        wrong += first.scale != codes[i].scale || first.zero != codes[i].zero;
      }
      wrong += !format.zeros && codes[i].zero != 8 && format.weights == "int4";
    }
  }
  return wrong;
}

std::string weights_complaint(const fs::path& path) {
  return test::error_of([&] {
    const SavedModel model(path);
    for (const auto& [name, tensor] : model.tensors())
      if (tensor.quantised) {
        model.require_readable(tensor);
        values_of(model, name);
        CHECK(wrong_codes(model, tensor) == 0);
      }
  });
}

/// Bytes of words of int32 with fields of `bits`, the lowest first.
std::string words_of(const std::vector<unsigned>& codes, unsigned bits) {
  std::string bytes;
  for (std::size_t first = 0; first < codes.size(); first += 32 / bits) {
    std::uint32_t word = 0;
    for (unsigned i = 0; i < 32 / bits; ++i) word |= codes[first + i] << i * bits;
    bytes.append(reinterpret_cast<const char*>(&word), sizeof word);
  }
  return bytes;
}

/// [n, k] words of codes and their scales, as GPTQModel writes a layer of 8 x 8 in one group.
SafetensorsWriter gptq_layer() {
  SafetensorsWriter writer;
  writer.add("layer.qweight", "I32", {1, 8}, std::string(32, '\x99'));
  writer.add("layer.qzeros", "I32", {1, 1}, std::string(4, '\x77'));
  writer.add("layer.scales", "F16", {1, 8}, std::vector<float>(8, 0.5f));
  return writer;
}

constexpr const char* gptq = R"({"quant_method":"gptq","bits":4,"group_size":-1})";

}  // namespace

TEST_CASE("weights that other packages quantised have those packages' values") {
  const JsonValue index = parse_json(read_whole_file(vectors / "index.json"));
  std::size_t files = 0;
  for (const auto& [file, entry] : *index.get_if<JsonValue::Object>()) {
    if (file == "mxfp4_edge_scales.safetensors") continue;
    CAPTURE(file);
    const Checkpoint checkpoint(vectors / file, json_line(*entry.find("quantization_config")));
    const SavedModel model(checkpoint.path());
    const std::string name = dense_name(model);
    REQUIRE(name != "");
    const auto& tensor = model.at(name);
    const auto expected = values_of(model, "expected");
    const auto ours = values_of(model, name);
    const auto& shape = model.at("expected").saved.shape;
    // gpt-oss' are stored as [E, n, k] for the test, and dense models have [E, k, n].
    const bool turned = shape.size() == 3;
    CHECK(tensor.saved.shape ==
          (turned ? std::vector<std::int64_t>{shape[0], shape[2], shape[1]} : shape));
    // nvfp4 divides or multiplies by the tensor's scale, int8 by 1 / 127: one more rounding of f32.
    const bool rounds = file.find("nvfp4") != file.npos || file.find("bnb") != file.npos;
    REQUIRE(ours.size() == expected.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < ours.size(); ++i) {
      std::size_t place = i;
      if (turned) {
        const auto n = static_cast<std::size_t>(shape[1]), k = static_cast<std::size_t>(shape[2]);
        const std::size_t matrix = i / (n * k), row = i / k % n, column = i % k;
        place = matrix * n * k + column * n + row;
      }
      const bool same =
          std::bit_cast<std::uint32_t>(ours[place]) == std::bit_cast<std::uint32_t>(expected[i]);
      wrong += !same && !(rounds && std::fabs(ours[place] - expected[i]) <=
                                        std::ldexp(std::fabs(expected[i]), -23));
    }
    CHECK(wrong == 0);
    CHECK(wrong_codes(model, tensor) == 0);
    ++files;
  }
  CHECK(files == 30);
}

TEST_CASE("elements are read from any place, by several threads, in any type") {
  const Checkpoint checkpoint(vectors / "ct_int4_asym_g32_n20.safetensors",
                              R"({"quant_method":"compressed-tensors","format":"pack-quantized"})");
  const SavedModel model(checkpoint.path());
  const auto& tensor = model.at("weight");
  CHECK(tensor.saved.element == Element::bf16);
  const auto whole = values_of(SavedModel(checkpoint.path()), "weight");
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> parts(4);
  for (std::size_t i = 0; i < parts.size(); ++i)
    threads.emplace_back([&, i] {
      parts[i].resize(480);
      model.read(tensor, i * 480, DType::f32, reinterpret_cast<std::byte*>(parts[i].data()), 480);
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<float> joined;
  for (const auto& part : parts) joined.insert(joined.end(), part.begin(), part.end());
  CHECK(joined == whole);
  std::vector<std::uint16_t> narrow(2);
  model.read(tensor, 7, DType::bf16, reinterpret_cast<std::byte*>(narrow.data()), 2);
  CHECK(float_from_bf16(narrow[0]) == Approx(whole[7]).epsilon(0.004));
}

TEST_CASE("fp8 with scales stays fp8 for those who take the scales, and is scaled for others") {
  const Checkpoint checkpoint(vectors / "fp8_block_deepseek_v3.safetensors",
                              R"({"quant_method":"fp8","weight_block_size":[128,128]})");
  const SavedModel model(checkpoint.path());
  const auto& tensor = model.at("weight");
  CHECK(tensor.saved.element == Element::f8_e4m3);
  std::byte code{};
  model.read(tensor, 5, DType::fp8, &code, 1);
  double raw = 0, scale = 0;
  decode(Element::f8_e4m3, &code, {&raw, 1});
  float dense = 0, saved_scale = 0;
  model.read(tensor, 5, DType::f32, reinterpret_cast<std::byte*>(&dense), 1);
  model.read(model.at("weight_scale_inv"), 0, DType::f32,
             reinterpret_cast<std::byte*>(&saved_scale), 1);
  scale = saved_scale;
  CHECK(dense == static_cast<float>(raw * scale));
}

TEST_CASE("mxfp4 scales at the ends of their range, and the byte that is no scale") {
  const fs::path file = vectors / "mxfp4_edge_scales.safetensors";
  const std::string mxfp4 = R"({"quant_method":"mxfp4"})";
  CHECK(weights_complaint(Checkpoint(file, mxfp4).path())
            .find("'gate_up_proj_scales' has a scale that is not finite") != std::string::npos);

  // With another byte in its place the rest can be read.
  std::string bytes = read_whole_file(file);
  const SavedTensor scales = SavedModel(file).at("gate_up_proj_scales").saved;
  std::vector<bool> changed;
  for (std::size_t i = scales.begin; i < scales.end; ++i) {
    changed.push_back(bytes[i] == '\xff');
    if (changed.back()) bytes[i] = 127;
  }
  const TemporaryFolder folder;
  write_text(folder.path() / "mended.safetensors", bytes);
  const Checkpoint checkpoint(folder.path() / "mended.safetensors", mxfp4);
  const SavedModel model(checkpoint.path());
  const auto ours = values_of(model, "gate_up_proj"), expected = values_of(model, "expected");
  std::size_t compared = 0;
  for (std::size_t row = 0; row < 16; ++row)
    for (std::size_t i = 0; i < 32 && !changed[row]; ++i, ++compared) {
      const std::size_t place = row / 8 * 256 + i * 8 + row % 8;
      CHECK(std::bit_cast<std::uint32_t>(ours[place]) ==
            std::bit_cast<std::uint32_t>(expected[row * 32 + i]));
    }
  CHECK(compared >= 13 * 32);
}

TEST_CASE("a model without a known quantisation has its tensors as they are") {
  const TemporaryFolder folder;
  gptq_layer().write(folder.path() / "model.safetensors");
  CHECK(dense_name(SavedModel(folder.path())).empty());
  write_text(folder.path() / "config.json", R"({"quantization_config":{"quant_method":"later"}})");
  CHECK(dense_name(SavedModel(folder.path())).empty());
  write_text(folder.path() / "config.json", std::string(R"({"quantization_config":)") + gptq + "}");
  CHECK(dense_name(SavedModel(folder.path())) == "layer.weight");
  // 9 - 8, times 0.5.
  CHECK(values_of(SavedModel(folder.path()), "layer.weight") == std::vector<float>(64, 0.5f));
}

TEST_CASE("codes with scales in a format that is not known are never taken for the weight") {
  for (const char* scale : {"a.weight_scale", "a.weight_scale_inv", "a.SCB", "a.scale",
                            "a.scale_weight", "a.weight_scales"}) {
    CAPTURE(scale);
    SafetensorsWriter writer;
    writer.add("a.weight", "F8_E4M3", {2, 4}, std::string(8, '\x38'));
    writer.add(scale, "F32", {2, 1}, std::vector<float>(2, 0.5f));
    writer.add("plain", "F8_E4M3", {1}, std::string(1, '\x38'));
    writer.add("plain.input_scale", "F32", {1}, std::vector<float>(1, 2));
    const Checkpoint checkpoint(writer, R"({"quant_method":"later"})");
    const SavedModel model(checkpoint.path());
    std::byte code{};
    model.read(model.at("a.weight"), 0, DType::fp8, &code, 1);
    CHECK(code == std::byte{0x38});
    CHECK(values_of(model, "plain") == std::vector<float>{1});
    CHECK_THROWS_WITH(values_of(model, "a.weight"),
                      ContainsSubstring("'a.weight' has codes of F8_E4M3 with scales in '" +
                                        std::string(scale) + "'"));
  }
}

TEST_CASE("integers are never taken for a weight") {
  for (const auto& [element, bytes] :
       {std::pair<const char*, std::size_t>{"I8", 1}, {"U8", 1}, {"I32", 4}, {"I64", 8}}) {
    SafetensorsWriter writer;
    writer.add("a.weight", element, {2}, std::string(2 * bytes, '\1'));
    const Checkpoint checkpoint(writer, R"({"quant_method":"later"})");
    CAPTURE(element);
    CHECK_THROWS_WITH(values_of(SavedModel(checkpoint.path()), "a.weight"),
                      ContainsSubstring("'a.weight' has integers, " + std::string(element) +
                                        ", and the quantizat"));
  }
}

TEST_CASE("zero points of int8, and the names that fp8 models have for scales") {
  const std::string compressed = R"({"quant_method":"compressed-tensors"})";
  for (const int zero : {0, 3}) {
    SafetensorsWriter writer;
    writer.add("a.weight", "I8", {2, 4}, std::string(8, '\5'));
    writer.add("a.weight_scale", "F32", {2, 1}, std::vector<float>{0.5f, 2});
    writer.add("a.weight_zero_point", "I8", {2, 1}, std::string(2, static_cast<char>(zero)));
    const Checkpoint checkpoint(writer, compressed);
    const SavedModel model(checkpoint.path());
    const float code = 5.f - static_cast<float>(zero);
    CHECK(values_of(model, "a.weight") == std::vector<float>{code / 2, code / 2, code / 2, code / 2,
                                                             code * 2, code * 2, code * 2,
                                                             code * 2});
    CHECK(model.code_format(model.at("a.weight")).unfit ==
          (zero == 0 ? "" : "it has zero points of 8 bits"));
  }
  for (const char* name : {"a.weight_scale_inv", "a.scale", "a.qscale_weight"}) {
    SafetensorsWriter writer;
    writer.add("a.weight", "F8_E4M3", {2, 2}, std::string(4, '\x38'));
    writer.add(name, "F32", {1, 1}, std::vector<float>{3});
    // DeepSeek-V4: codes 2 (1) and 7 (6), times 2^1.
    writer.add("b.weight", "I8", {1, 16}, std::string(16, '\x72'));
    writer.add(std::string(name).replace(0, 1, "b"), "F8_E8M0", {1, 1}, std::string(1, '\x80'));
    const Checkpoint checkpoint(writer, R"({"quant_method":"fp8","weight_block_size":[128,128]})");
    const SavedModel model(checkpoint.path());
    CHECK(values_of(model, "a.weight") == std::vector<float>(4, 3));
    const auto of_fp4 = values_of(model, "b.weight");
    REQUIRE(of_fp4.size() == 32);
    CHECK(of_fp4[0] == 2);
    CHECK(of_fp4[1] == 12);
    CHECK(model.code_format(model.at("b.weight")).weights == "mxfp4");
  }
}

TEST_CASE("quantised weights that are not whole are refused with one line") {
  const auto refused = [](const SafetensorsWriter& writer, const std::string& config,
                          const std::string& words) {
    const std::string line = weights_complaint(Checkpoint(writer, config).path());
    CAPTURE(line, words);
    CHECK(line.find('\n') == line.npos);
    CHECK(line.find(words) != line.npos);
  };
  refused(gptq_layer(), R"({"quant_method":"gptq","bits":3,"group_size":-1})",
          "GPTQ weights of 3 bits are not known: 4 and 8 are");
  refused(gptq_layer(), R"({"quant_method":"gptq","bits":4,"checkpoint_format":"marlin"})",
          "the GPTQ layout 'marlin' is not known");
  refused(gptq_layer(), R"({"quant_method":"gptq","bits":4,"group_size":4})",
          "'layer.qzeros' is [1, 1], where the quantised weight takes [2, 1]");
  refused(gptq_layer(), R"({"quant_method":"gptq","bits":4,"group_size":-7})",
          "a group_size of -7");
  refused(gptq_layer(), R"({"quant_method":"awq","bits":4,"version":"gemv"})",
          "the AWQ layout 'gemv' is not known");
  refused(gptq_layer(), R"({"quant_method":"bitsandbytes","load_in_4bit":true})",
          "bitsandbytes weights of 4 bits");
  refused(gptq_layer(),
          R"({"quant_method":"compressed-tensors","transform_config":{"config_groups":{"u":{}}}})",
          "transform_config turns activations");
  SafetensorsWriter ordered;
  ordered.add("a.weight", "I8", {2, 4}, std::string(8, '\5'));
  ordered.add("a.SCB", "F32", {2}, std::vector<float>(2, 1));
  ordered.add("a.weight_format", "U8", {}, std::string(1, '\2'));
  refused(ordered, R"({"quant_method":"bitsandbytes","load_in_8bit":true})",
          "'a.weight_format' is 2, an order of codes that is not known");
  SafetensorsWriter scaled;
  scaled.add("a.weight", "U8", {2, 8}, std::string(16, '\5'));
  scaled.add("a.weight_scale", "F8_E4M3", {2, 1}, std::string(2, '\x38'));
  scaled.add("a.weight_scale_2", "F32", {}, std::vector<float>(1, 1));
  scaled.add("a.pre_quant_scale", "F32", {16}, std::vector<float>(16, 1));
  refused(scaled, R"({"quant_method":"modelopt"})", "'a.pre_quant_scale' multiplies activations");
  SafetensorsWriter turned;
  turned.add("a.weight", "F8_E4M3", {4, 8}, std::string(32, '\x38'));
  turned.add("a.weight_scale_inv", "F32", {4, 2}, std::vector<float>(8, 1));
  refused(turned, R"({"quant_method":"fp8","weight_block_size":[2,2]})",
          "'a.weight_scale_inv' is [4, 2], where [4, 8] has [2, 4] blocks");
  const std::string whole_row =
      R"({"quant_method":"gptq","bits":4,"group_size":9223372036854775807})";
  CHECK(weights_complaint(Checkpoint(gptq_layer(), whole_row).path()) == "");
  SafetensorsWriter lacking;
  lacking.add("layer.qweight", "I32", {1, 8}, std::string(32, '\x99'));
  refused(lacking, gptq, "'layer.scales' is missing");
  SafetensorsWriter endless;
  endless.add("layer.qweight", "I32", {1, 8}, std::string(32, '\x99'));
  endless.add("layer.qzeros", "I32", {1, 1}, std::string(4, '\x77'));
  endless.add("layer.scales", "F16", {1, 8}, std::vector<float>(8, INFINITY));
  refused(endless, gptq, "'layer.scales' has a scale that is not finite");
  // There is group 0 alone.
  for (const std::int32_t group : {0x01010101, 1, -1}) {
    SafetensorsWriter elsewhere = gptq_layer();
    std::string indices;
    for (int i = 0; i < 8; ++i) indices.append(reinterpret_cast<const char*>(&group), sizeof group);
    elsewhere.add("layer.g_idx", "I32", {8}, indices);
    refused(elsewhere, gptq,
            "'layer.g_idx' names group " + std::to_string(group) + ", where there are 1");
  }
  SafetensorsWriter other_type;
  other_type.add("layer.qweight", "F32", {1, 8}, std::vector<float>(8, 1));
  other_type.add("layer.qzeros", "I32", {1, 1}, std::string(4, '\x77'));
  other_type.add("layer.scales", "F16", {1, 8}, std::vector<float>(8, 1));
  refused(other_type, gptq, "'layer.qweight' is F32");
}

TEST_CASE("each GPTQ module has its own bits and groups where `dynamic` may give them") {
  // a: groups of 64 as for all; b: groups of 32; c: 8 bits, in groups of 16; d: 3 bits; e is plain.
  std::mt19937 random(11);
  SafetensorsWriter writer;
  std::map<std::string, std::vector<float>> expected;
  const auto add = [&](const std::string& name, unsigned bits, std::int64_t group) {
    const std::int64_t n = 8, k = 128, groups = k / group;
    const auto fill = [&](std::int64_t count, std::uint32_t least, std::uint32_t most) {
      std::vector<unsigned> values(static_cast<std::size_t>(count));
      for (unsigned& value : values) value = least + random() % (most - least + 1);
      return values;
    };
    const auto place = [](std::int64_t value) { return static_cast<std::size_t>(value); };
    const auto codes = fill(n * k, 0, (1u << bits) - 1);       // [n, k]
    const auto zeros = fill(groups * n, 1, (1u << bits) - 1);  // [groups, n]
    std::vector<unsigned> saved(codes.size()), saved_zeros = zeros;
    for (unsigned& zero : saved_zeros) --zero;
    const std::int64_t fields = 32 / bits;
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t i = 0; i < k; ++i)
        saved[place((i / fields * n + row) * fields + i % fields)] = codes[place(row * k + i)];
    std::vector<float> scales(place(groups * n));
    for (float& scale : scales) scale = static_cast<float>(1 + random() % 16) / 16;
    writer.add(name + ".qweight", "I32", {k / fields, n}, words_of(saved, bits));
    writer.add(name + ".qzeros", "I32", {groups, n / fields}, words_of(saved_zeros, bits));
    writer.add(name + ".scales", "F16", {groups, n}, scales);
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t i = 0; i < k; ++i) {
        const std::size_t of = place(i / group * n + row);
        expected[name].push_back(
            (static_cast<float>(codes[place(row * k + i)]) - static_cast<float>(zeros[of])) *
            scales[of]);
      }
  };
  add("a", 4, 64);
  add("b", 4, 32);
  add("c", 8, 16);
  writer.add("d.qweight", "I32", {12, 8}, std::string(384, '\1'));
  writer.add("d.qzeros", "I32", {2, 3}, std::string(24, '\1'));
  writer.add("d.scales", "F16", {2, 8}, std::vector<float>(16, 1));
  writer.add("e.weight", "F32", {2}, std::vector<float>{1, 2});
  const Checkpoint checkpoint(writer, R"({"quant_method":"gptq","bits":4,"group_size":64,
      "dynamic":{"+:b":{"group_size":32},"c":{"bits":8,"group_size":16},"d":{"bits":3},"-:e":{}}})");
  const SavedModel model(checkpoint.path());
  for (const char* name : {"a", "b", "c"}) {
    CAPTURE(name);
    const auto& tensor = model.at(std::string(name) + ".weight");
    CHECK(values_of(model, tensor.saved.name) == expected.at(name));
    CHECK(wrong_codes(model, tensor) == 0);
  }
  CHECK(model.code_format(model.at("b.weight")).groups == std::vector<std::int64_t>{32});
  CHECK(model.code_format(model.at("c.weight")).unfit == "it has zero points of 8 bits");
  CHECK(values_of(model, "e.weight") == std::vector<float>{1, 2});
  CHECK_THROWS_WITH(values_of(model, "d.weight"),
                    ContainsSubstring("its codes have neither 4 nor 8 bits"));
  CHECK_THROWS_WITH(model.code_format(model.at("d.weight")), ContainsSubstring("neither 4 nor 8"));
}

TEST_CASE("symmetric GPTQ codes of 8 bits are those of int8 kernels") {
  std::vector<unsigned> codes(8 * 32), zeros(8, 127);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<unsigned>(i);
  SafetensorsWriter writer;
  writer.add("a.qweight", "I32", {8, 8}, words_of(codes, 8));
  writer.add("a.qzeros", "I32", {1, 2}, words_of(zeros, 8));
  writer.add("a.scales", "F16", {1, 8}, std::vector<float>(8, 0.5f));
  const Checkpoint checkpoint(writer, R"({"quant_method":"gptq","bits":8,"group_size":32})");
  const SavedModel model(checkpoint.path());
  const CodeFormat format = model.code_format(model.at("a.weight"));
  CHECK(format.unfit == "");
  CHECK(format.weights == "int8");
  CHECK(wrong_codes(model, model.at("a.weight")) == 0);
  CHECK(values_of(model, "a.weight")[1] == (codes[1] - 128.f) / 2);
}

TEST_CASE("fp8 of one scale, of rows and of blocks of two sizes lie in one model") {
  SafetensorsWriter writer;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& scales) {
    writer.add(name + ".weight", "F8_E4M3", {4, 8}, std::string(32, '\x38'));
    std::size_t count = 1;
    for (const std::int64_t extent : scales) count *= static_cast<std::size_t>(extent);
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i + 1);
    writer.add(name + ".weight_scale", "F32", scales, values);
  };
  add("tensor", {1});
  add("scalar", {});
  add("rows", {4, 1});
  add("small", {2, 4});
  add("large", {1, 2});
  add("wrong", {3, 2});
  const Checkpoint checkpoint(writer, R"({"quant_method":"compressed-tensors","config_groups":{
      "a":{"weights":{"block_structure":[2,2]}},"b":{"weights":{"block_structure":"4x4"}},
      "c":{"weights":{"strategy":"tensor","block_structure":null}}}})");
  const SavedModel model(checkpoint.path());
  CHECK(values_of(model, "tensor.weight") == std::vector<float>(32, 1));
  CHECK(values_of(model, "scalar.weight") == std::vector<float>(32, 1));
  CHECK(values_of(model, "rows.weight")[8] == 2);
  CHECK(values_of(model, "small.weight")[16 + 7] == 8);
  CHECK(values_of(model, "large.weight")[3] == 1);
  CHECK(values_of(model, "large.weight")[4] == 2);
  CHECK_THROWS_WITH(values_of(model, "wrong.weight"),
                    ContainsSubstring("'wrong.weight_scale' is [3, 2]"));
}

TEST_CASE("zero points beside packed words are int32 words, or int8 of a whole tensor") {
  const auto layer = [](const char* element, const std::vector<std::int64_t>& shape,
                        const std::string& zeros, const std::vector<std::int64_t>& scales) {
    SafetensorsWriter writer;
    writer.add("a.weight_packed", "I32", {8, 1}, std::string(32, '\x99'));
    const std::int64_t sizes[] = {8, 8};
    writer.add("a.weight_shape", "I64", {2},
               std::string(reinterpret_cast<const char*>(sizes), sizeof sizes));
    writer.add("a.weight_scale", "F32", scales,
               std::vector<float>(scales.size() == 1 ? 1 : 8, 0.5f));
    writer.add("a.weight_zero_point", element, shape, zeros);
    return writer;
  };
  const std::string compressed = R"({"quant_method":"compressed-tensors"})";
  // int8 as words would be read beyond its end.
  for (const auto& [element, bytes] : {std::pair<const char*, std::size_t>{"I8", 1},
                                       {"U8", 1},
                                       {"I16", 2},
                                       {"F16", 2},
                                       {"F32", 4},
                                       {"I64", 8}}) {
    CAPTURE(element);
    const Checkpoint checkpoint(layer(element, {1, 1}, std::string(bytes, '\x77'), {8, 1}),
                                compressed);
    CHECK(weights_complaint(checkpoint.path())
              .find("'a.weight_zero_point' is " + std::string(element) +
                    ", which this quantised format does not have") != std::string::npos);
  }
  const Checkpoint words(layer("I32", {1, 1}, std::string(4, '\x77'), {8, 1}), compressed);
  CHECK(values_of(SavedModel(words.path()), "a.weight") == std::vector<float>(64, 1));
  // 1 - (-1), times 0.5.
  const Checkpoint whole(layer("I8", {1}, "\xff", {1}), compressed);
  CHECK(values_of(SavedModel(whole.path()), "a.weight") == std::vector<float>(64, 1));
}

TEST_CASE("checkpoints of random tensors are read, or refused with one line") {
  const std::vector<std::string> suffixes{"qweight",
                                          "qzeros",
                                          "scales",
                                          "g_idx",
                                          "weight",
                                          "weight_packed",
                                          "weight_scale",
                                          "weight_shape",
                                          "weight_zero_point",
                                          "weight_g_idx",
                                          "weight_global_scale",
                                          "weight_scale_2",
                                          "weight_scale_inv",
                                          "SCB",
                                          "w_blocks",
                                          "w_scales"};
  const std::vector<std::pair<std::string, std::size_t>> elements{
      {"I32", 4}, {"F16", 2}, {"BF16", 2},    {"F32", 4},
      {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"I64", 8}};
  const std::vector<std::string> methods{"gptq", "awq",      "compressed-tensors", "mxfp4",
                                         "fp8",  "modelopt", "bitsandbytes"};
  std::mt19937 random(7);
  const auto below = [&](std::size_t count) { return random() % count; };
  std::size_t read = 0;
  for (int round = 0; round < 3000; ++round) {
    SafetensorsWriter writer;
    for (const std::string& suffix : suffixes) {
      if (below(4) == 0) continue;
      const auto& [name, size] = elements[below(elements.size())];
      std::vector<std::int64_t> shape(below(8) == 0 ? below(5) : suffix.find("w_") == 0 ? 4 : 2);
      std::size_t count = 1;
      for (std::int64_t& extent : shape)
        count *= static_cast<std::size_t>(extent = std::int64_t{1} << below(5) &
                                                   ~std::int64_t{below(16) == 0});
      std::string bytes(count * size, '\0');
      for (char& byte : bytes) byte = static_cast<char>(below(3) ? below(4) : below(256));
      writer.add("a." + suffix, name, shape, bytes);
    }
    const std::string group = below(2) ? "-1" : std::to_string(1 + below(16));
    const Checkpoint checkpoint(
        writer, R"({"bits":4,"weight_block_size":[)" + std::to_string(1 + below(4)) + "," +
                    std::to_string(1 + below(4)) + R"(],"group_size":)" + group +
                    R"(,"quant_method":")" + methods[below(methods.size())] + "\"}");
    const std::string line = weights_complaint(checkpoint.path());
    CHECK(line.find('\n') == line.npos);
    read += line.empty();
  }
  CHECK(read > 100);
  CHECK(read < 2900);
}

TEST_CASE("codes of random GPTQ weights are those of their dense forms") {
  std::mt19937 random(3);
  const auto below = [&](std::size_t count) { return random() % count; };
  std::size_t fit = 0, unfit = 0;
  for (int round = 0; round < 60; ++round) {
    const std::size_t n = 8 * (1 + below(6)), group = 16u << below(4), k = group * (1 + below(5));
    const std::size_t groups = k / group;
    const bool symmetric = below(2), ordered = below(3) != 0;
    const auto bytes = [&](std::size_t count) {
      std::string text(count, '\0');
      for (char& byte : text) byte = static_cast<char>(below(256));
      return text;
    };
    SafetensorsWriter writer;
    const auto extent = [](std::size_t size) { return static_cast<std::int64_t>(size); };
    writer.add("a.qweight", "I32", {extent(k / 8), extent(n)}, bytes(k * n / 2));
    writer.add("a.qzeros", "I32", {extent(groups), extent(n / 8)},
               symmetric ? std::string(groups * n / 2, '\x77') : bytes(groups * n / 2));
    std::vector<float> scales(groups * n);
    for (float& scale : scales) scale = static_cast<float>(1 + below(100)) / 64;
    writer.add("a.scales", "F16", {extent(groups), extent(n)}, scales);
    std::string indices;
    std::vector<std::int32_t> order(k);
    for (std::size_t i = 0; i < k; ++i) order[i] = static_cast<std::int32_t>(i / group);
    if (!ordered) std::shuffle(order.begin(), order.end(), random);
    indices.assign(reinterpret_cast<const char*>(order.data()), k * sizeof(std::int32_t));
    if (below(2) || !ordered) writer.add("a.g_idx", "I32", {extent(k)}, indices);
    const Checkpoint checkpoint(
        writer, R"({"quant_method":"gptq","bits":4,"group_size":)" + std::to_string(group) + "}");
    const SavedModel model(checkpoint.path());
    const auto& tensor = model.at("a.weight");
    const CodeFormat format = model.code_format(tensor);
    CAPTURE(n, k, group, symmetric, ordered, format.unfit);
    CHECK(wrong_codes(model, tensor) == 0);
    // Kernels have groups of 32 and more, or rows.
    const bool has_groups = groups == 1 || (ordered && group >= 32);
    CHECK(format.unfit.empty() == has_groups);
    if (has_groups) CHECK(format.zeros == !symmetric);
    (has_groups ? fit : unfit) += 1;
  }
  CHECK(fit > 15);
  CHECK(unfit > 15);
}
