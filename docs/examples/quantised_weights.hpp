// Weights of 4 and 8 bits in a saved model, as codes and in the order of kernels: GPTQ, AWQ,
// compressed-tensors' pack-quantized, int-quantized and float-quantized, and transformers' fp8.
// Part of the example run_model.cpp.
#pragma once

#include <fftune/fftune.hpp>

#include "saved_files.hpp"

/// A weight [n, k]: the value of a code times a scale for each group of inputs. Values are q - zero
/// with 4 bits, and e4m3 or integers with 8.
struct Codes {
  std::string format = "int4";  // of the library: or "fp8", "int8"
  std::int64_t n = 0, k = 0, groups = 0;
  std::vector<std::uint8_t> q;      // [n, k]
  std::vector<float> scale;         // [n, groups]
  std::vector<std::uint8_t> zero;   // [n, groups]; empty: 8 everywhere
  std::vector<std::int64_t> group;  // of each input

  float at(std::int64_t row, std::int64_t input) const {
    const auto place =
        static_cast<std::size_t>(row * groups + group[static_cast<std::size_t>(input)]);
    const int code = q[static_cast<std::size_t>(row * k + input)];
    if (format == "fp8") return value_of_e4m3(code) * scale[place];
    const int value =
        format == "int8" ? static_cast<std::int8_t>(code) : code - (zero.empty() ? 8 : zero[place]);
    return static_cast<float>(value) * scale[place];
  }
  static float value_of_e4m3(int code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                     : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    return code & 128 ? -size : size;
  }
  /// The library's word for groups of inputs next to each other; empty where groups are others.
  std::string word() const {
    if (groups == 1) return "row";
    for (const std::int64_t size : {128, 64, 32}) {
      bool fits = k % size == 0;
      for (std::int64_t i = 0; fits && i < k; ++i)
        fits =
            group[static_cast<std::size_t>(i)] == group[static_cast<std::size_t>(i / size * size)];
      if (fits) return std::to_string(size);
    }
    return "";
  }
};

/// A packed weight with its scales and zero points, as inputs of the library's ops.
struct Packed {
  Bytes w, scale, zero;
};

class QuantisedWeights {
 public:
  QuantisedWeights(const Files& files, const json& config) : files_(files) {
    if (!config.contains("quantization_config")) return;
    const json& own = config.at("quantization_config");
    method_ = own.value("quant_method", "");
    const std::string layout = own.value("checkpoint_format", own.value("format", ""));
    if (method_ == "gptq" && (layout == "gptq" || layout == "gptq_v2" || layout.empty()))
      version_ = layout == "gptq_v2" ? 2 : 1;
    else if (!(method_ == "awq" && own.value("version", own.value("format", "gemm")) == "gemm") &&
             !(method_ == "compressed-tensors" && layout.ends_with("-quantized")) &&
             method_ != "fp8")
      fail("quantization_config is " + method_ + " " + layout +
           ": this example runs gptq, awq gemm, fp8, and compressed-tensors pack-quantized, "
           "int-quantized and float-quantized");
    if (!own.value("transform_config", json::object()).empty())
      fail("quantization_config has a transform_config, which turns activations");
    has_bytes_ = method_ == "fp8" || layout == "int-quantized" || layout == "float-quantized";
    bits_ = own.value("bits", 4);
    const auto add_block = [&](const json& holder, const char* key) {
      const json block = holder.value(key, json(nullptr));
      if (block.is_array() && block.size() == 2)
        blocks_.emplace(block.at(0).get<std::int64_t>(), block.at(1).get<std::int64_t>());
    };
    add_block(own, "weight_block_size");
    const json groups = own.value("config_groups", json::object());
    for (const auto& [name, group] : groups.items())
      add_block(group.at("weights"), "block_structure");
  }

  /// Whether the module of this name has codes.
  bool has(const std::string& module) const {
    return !method_.empty() &&
           files_.find(module + (method_ == "fp8"                  ? ".weight_scale_inv"
                                 : has_bytes_                      ? ".weight_scale"
                                 : method_ == "compressed-tensors" ? ".weight_packed"
                                                                   : ".qweight")) != nullptr;
  }
  /// The tensors that a module may have beside a bias.
  std::vector<std::string> tensors() const {
    if (has_bytes_) return {"weight", "weight_scale", "weight_scale_inv"};
    return {"qweight",
            "qzeros",
            "scales",
            "g_idx",
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx"};
  }

  /// The weight; its format alone without `q`.
  Codes codes(const std::string& module, bool with_q = true) const {
    Codes codes = has_bytes_                        ? bytes(module, with_q)
                  : method_ == "compressed-tensors" ? compressed(module, with_q)
                                                    : by_columns(module, with_q);
    for (const float scale : codes.scale)
      if (!std::isfinite(scale)) fail(module + " has a scale that is not finite");
    bool eights = true;
    for (const std::uint8_t zero : codes.zero) eights = eights && zero == 8;
    if (eights) codes.zero.clear();
    return codes;
  }

 private:
  using Words = std::vector<std::uint32_t>;
  /// A tensor of this type and shape: the only way to its bytes.
  Bytes read(const std::string& name, const char* dtype, const Shape& shape) const {
    const Tensor& tensor = files_.at(name);
    if (tensor.dtype != dtype || tensor.shape != shape)
      fail(name + " is " + tensor.dtype + " " + json(tensor.shape).dump() + " instead of " + dtype +
           " " + json(shape).dump());
    return tensor.read(0, tensor.bytes);
  }
  Shape matrix(const std::string& name) const {
    const Shape shape = files_.at(name).shape;
    if (shape.size() != 2 || shape[0] < 1 || shape[1] < 1)
      fail(name + " is " + json(shape).dump() + ", not a matrix");
    return shape;
  }
  Words words(const std::string& name, std::int64_t rows, std::int64_t columns) const {
    const Bytes bytes = read(name, "I32", {rows, columns});
    Words words(bytes.size() / 4);
    std::memcpy(words.data(), bytes.data(), bytes.size());
    return words;
  }
  /// The field at `place` of a word.
  static std::uint8_t field(std::uint32_t word, std::int64_t place, std::int64_t bits) {
    return static_cast<std::uint8_t>(word >> bits * place & ((1u << bits) - 1));
  }
  /// Numbers of a tensor of this shape.
  std::vector<float> numbers(const std::string& name, const Shape& shape) const {
    const Dtype& dtype = dtype_of(files_.at(name).dtype);
    const Bytes bytes = read(name, dtype.saved.c_str(), shape);
    return numbers_of(dtype, bytes.data(), bytes.size() / dtype.bytes);
  }
  /// The group of each input, from a tensor of that name or in their order.
  void set_groups(Codes& codes, const std::string& name) const {
    const std::int64_t size = (codes.k + codes.groups - 1) / codes.groups;
    codes.group.resize(static_cast<std::size_t>(codes.k));
    for (std::int64_t i = 0; i < codes.k; ++i) codes.group[static_cast<std::size_t>(i)] = i / size;
    if (files_.find(name) == nullptr || codes.groups == 1) return;
    const Bytes bytes = read(name, "I32", {codes.k});
    for (std::size_t i = 0; i < codes.group.size(); ++i) {
      std::int32_t group = 0;
      std::memcpy(&group, bytes.data() + 4 * i, 4);
      if (group < 0 || group >= codes.groups) fail(name + " has a group that there is not");
      codes.group[i] = group;
    }
  }

  /// Integers of 8 bits as the library takes them: with a sign, and without zero points.
  static void expect_signed(const std::string& module, Codes& codes) {
    codes.format = "int8";
    for (const std::uint8_t zero : codes.zero)
      if (zero != 128) fail(module + " has zero points of 8 bits");
    codes.zero.clear();
    for (std::uint8_t& code : codes.q) code ^= 128;
  }

  /// GPTQ and AWQ: scales [groups, n], zero points packed along n. A module of GPTQ may have bits
  /// and groups of its own.
  Codes by_columns(const std::string& module, bool with_q) const {
    Codes codes;
    const Shape packed = matrix(module + ".qweight"), zeros = matrix(module + ".qzeros");
    const Shape scales = matrix(module + ".scales");
    codes.groups = scales[0], codes.n = scales[1];
    const bool awq = method_ == "awq";
    const Tensor* const index = files_.find(module + ".g_idx");
    const std::int64_t n = codes.n;
    std::int64_t bits = 0;
    for (const std::int64_t each : {bits_, std::int64_t{4}, std::int64_t{8}})
      if (bits == 0 && (each == 4 || (each == 8 && !awq)) && zeros[1] == (n * each + 31) / 32 &&
          (awq || index == nullptr || index->shape.size() != 1 ||
           packed[0] == (index->shape[0] * each + 31) / 32))
        bits = each;
    if (bits == 0) fail(module + " has codes of neither 4 nor 8 bits");
    const std::int64_t fields = 32 / bits, columns = (n + fields - 1) / fields;
    codes.k = awq                                            ? packed[0]
              : index != nullptr && index->shape.size() == 1 ? index->shape[0]
                                                             : packed[0] * fields;
    const std::int64_t k = codes.k;
    constexpr std::int64_t places[] = {0, 4, 1, 5, 2, 6, 3, 7};
    const Words q =
        words(module + ".qweight", awq ? k : (k + fields - 1) / fields, awq ? columns : n);
    const Words z = words(module + ".qzeros", codes.groups, columns);
    codes.q.resize(static_cast<std::size_t>(with_q ? n * k : 0));
    for (std::int64_t row = 0; with_q && row < n; ++row)
      for (std::int64_t i = 0; i < k; ++i)
        codes.q[static_cast<std::size_t>(row * k + i)] =
            awq ? field(q[static_cast<std::size_t>(i * columns + row / 8)], places[row % 8], 4)
                : field(q[static_cast<std::size_t>(i / fields * n + row)], i % fields, bits);
    const std::vector<float> numbers_of_columns = numbers(module + ".scales", {codes.groups, n});
    codes.scale.resize(static_cast<std::size_t>(n * codes.groups));
    codes.zero.resize(codes.scale.size());
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t group = 0; group < codes.groups; ++group) {
        const auto place = static_cast<std::size_t>(row * codes.groups + group);
        codes.scale[place] = numbers_of_columns[static_cast<std::size_t>(group * n + row)];
        // The first version of GPTQ keeps one less, of the whole word.
        const std::uint32_t one = version_ == 2 ? 0 : bits == 4 ? 0x11111111u : 0x01010101u;
        const std::uint32_t word =
            z[static_cast<std::size_t>(group * columns + row / fields)] + one;
        codes.zero[place] = field(word, awq ? places[row % 8] : row % fields, bits);
      }
    if (bits == 8) expect_signed(module, codes);
    set_groups(codes, module + ".g_idx");
    return codes;
  }

  /// e4m3 or integers of 8 bits [n, k], with a scale of the tensor, of rows or of blocks.
  Codes bytes(const std::string& module, bool with_q) const {
    Codes codes;
    const std::string weight = module + ".weight";
    const Shape shape = matrix(weight);
    codes.format = files_.at(weight).dtype == "I8" ? "int8" : "fp8";
    const std::int64_t n = shape[0], k = shape[1];
    codes.n = n, codes.k = k;
    const std::string name = module + (method_ == "fp8" ? ".weight_scale_inv" : ".weight_scale");
    const Shape scales = files_.at(name).shape;
    const auto grid = [&](const std::pair<std::int64_t, std::int64_t>& block) {
      return Shape{(n + block.first - 1) / block.first, (k + block.second - 1) / block.second};
    };
    std::pair<std::int64_t, std::int64_t> block{0, 0};
    if (scales.empty() || scales == Shape{1} || scales == Shape{1, 1})
      block = {n, k};
    else if (scales == Shape{n} || scales == Shape{n, 1})
      block = {1, k};
    else
      for (const auto& each : blocks_)
        if (each.first > 0 && each.second > 0 && scales == grid(each)) {
          if (block.first > 0) fail(name + " has as many scales as blocks of two sizes");
          block = each;
        }
    if (block.first < 1)
      fail(name + " is " + json(scales).dump() +
           ": it has no scale of the tensor, of rows, or of " +
           "the blocks of quantization_config");
    const std::vector<float> saved = numbers(name, scales);
    codes.groups = grid(block)[1];
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t group = 0; group < codes.groups; ++group)
        codes.scale.push_back(
            saved[static_cast<std::size_t>(row / block.first * codes.groups + group)]);
    for (std::int64_t i = 0; i < k; ++i) codes.group.push_back(i / block.second);
    if (!with_q) return codes;
    const Bytes elements = read(weight, codes.format == "int8" ? "I8" : "F8_E4M3", shape);
    codes.q.assign(elements.begin(), elements.end());
    for (const std::uint8_t code : codes.q)
      if (codes.format == "fp8" && (code & 127) == 127) fail(weight + " has NaN");
    return codes;
  }

  Codes compressed(const std::string& module, bool with_q) const {
    Codes codes;
    std::int64_t sizes[2] = {};
    std::memcpy(sizes, read(module + ".weight_shape", "I64", {2}).data(), sizeof sizes);
    codes.n = sizes[0], codes.k = sizes[1];
    const std::int64_t n = codes.n, k = codes.k;
    if (n < 1 || k < 1 || n > std::int64_t{1} << 40 || k > std::int64_t{1} << 40)
      fail(module + ".weight_shape has no sizes");
    const std::string packed = module + ".weight_packed";
    const std::int64_t bits = matrix(packed)[1] == (k + 7) / 8 ? 4 : 8, fields = 32 / bits;
    const std::int64_t columns = (k + fields - 1) / fields;
    const Words q = words(packed, n, columns);
    codes.q.resize(static_cast<std::size_t>(with_q ? n * k : 0));
    for (std::int64_t row = 0; with_q && row < n; ++row)
      for (std::int64_t i = 0; i < k; ++i)
        codes.q[static_cast<std::size_t>(row * k + i)] =
            field(q[static_cast<std::size_t>(row * columns + i / fields)], i % fields, bits);
    const std::string scale = module + ".weight_scale";
    const Shape scales = files_.at(scale).shape;
    const bool one = scales.empty() || scales == Shape{1} || scales == Shape{1, 1};
    if (!one && (matrix(scale)[0] != n || k % scales[1] != 0))
      fail(scale + " is " + json(scales).dump() + ", not a scale of groups of each row");
    codes.scale = numbers(scale, scales);
    if (one) codes.scale.resize(static_cast<std::size_t>(n), codes.scale[0]);
    codes.groups = one ? 1 : scales[1];
    if (files_.find(module + ".weight_zero_point")) {
      const Words z = words(module + ".weight_zero_point", (n + fields - 1) / fields, codes.groups);
      codes.zero.resize(codes.scale.size());
      for (std::int64_t row = 0; row < n; ++row)
        for (std::int64_t group = 0; group < codes.groups; ++group)
          codes.zero[static_cast<std::size_t>(row * codes.groups + group)] = field(
              z[static_cast<std::size_t>(row / fields * codes.groups + group)], row % fields, bits);
    }
    if (bits == 8) expect_signed(module, codes);
    set_groups(codes, module + ".weight_g_idx");
    return codes;
  }

  const Files& files_;
  std::string method_;
  int version_ = 2;
  bool has_bytes_ = false;
  std::int64_t bits_ = 4;
  std::set<std::pair<std::int64_t, std::int64_t>> blocks_;  // rows and columns with one scale
};

/// The rows of several weights one after the other, in the order of kernels, by the op pack-weight.
inline Packed pack(const std::vector<Codes>& parts, const std::string& group, bool zeros,
                   const Dtype& dtype) {
  const std::int64_t k = parts.front().k, size = group == "row" ? k : std::stoll(group);
  const std::int64_t groups = k / size;
  std::int64_t n = 0;
  for (const Codes& part : parts) n += part.n;
  const std::string& format = parts.front().format;
  const bool narrow = format == "int4";
  const Dtype& of_scale = narrow ? dtype : dtype_of("F32");
  const std::int64_t width = narrow ? (k + 1) / 2 : k;
  Bytes codes(static_cast<std::size_t>(n * width));
  Bytes scale(static_cast<std::size_t>(n * groups) * of_scale.bytes), zero(zeros ? n * groups : 0);
  std::int64_t first = 0;
  for (const Codes& part : parts) {
    for (std::int64_t row = 0; row < part.n; ++row) {
      for (std::int64_t i = 0; i < k; ++i)
        codes[static_cast<std::size_t>((first + row) * width + (narrow ? i / 2 : i))] |=
            static_cast<char>(part.q[static_cast<std::size_t>(row * k + i)]
                              << (narrow ? i % 2 * 4 : 0));
      for (std::int64_t at = 0; at < groups; ++at) {
        const auto from = static_cast<std::size_t>(row * part.groups +
                                                   part.group[static_cast<std::size_t>(at * size)]);
        const auto to = static_cast<std::size_t>((first + row) * groups + at);
        write_number(of_scale, part.scale[from], &scale[to * of_scale.bytes]);
        if (zeros) zero[to] = static_cast<char>(part.zero.empty() ? 8 : part.zero[from]);
      }
    }
    first += part.n;
  }
  static fftune::library::Context host(-1);
  const auto plan = host.plan(json{
      {"op", "pack-weight"},
      {"dtype", dtype.name},
      {"n", n},
      {"k", k},
      {"weights", format},
      {"group", group},
      {"zeros",
       zeros ? "yes" : "no"}}.dump());
  Packed packed;
  std::vector<void*> buffers{codes.data(), scale.data()};
  if (zeros) buffers.push_back(zero.data());
  const json described = json::parse(plan.describe());
  for (const json& buffer : described.at("buffers")) {
    if (buffer.at("role") != "output") continue;
    const std::string name = buffer.at("name");
    Bytes& to = name == "w" ? packed.w : name == "w_scale" ? packed.scale : packed.zero;
    to.resize(buffer.at("bytes").get<std::size_t>());
    buffers.push_back(to.data());
  }
  if (plan.workspace_bytes() > 0) fail("pack-weight needs a workspace");
  plan.run(buffers.data(), buffers.size(), nullptr);
  return packed;
}
