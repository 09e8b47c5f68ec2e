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
    block_ = own.value("weight_block_size", json(nullptr));
    std::vector<json> bits{own.value("bits", json(has_bytes_ ? 8 : 4))};
    if (own.contains("config_groups")) bits.clear();
    const json groups = own.value("config_groups", json::object());
    for (const auto& [name, group] : groups.items()) {
      const json& weights = group.at("weights");
      bits.push_back(weights.at("num_bits"));
      if (block_.is_null()) block_ = weights.value("block_structure", json(nullptr));
    }
    for (const json& number : bits)
      if (number != (has_bytes_ ? 8 : 4))
        fail("weights of " + number.dump() +
             " bits: this example runs those of 4, and of 8 that "
             "have a byte each");
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
  const Tensor& matrix(const std::string& name, const char* dtype) const {
    const Tensor& tensor = files_.at(name);
    if (tensor.dtype != dtype || tensor.shape.size() != 2)
      fail(name + " is " + tensor.dtype + " " + json(tensor.shape).dump());
    return tensor;
  }
  Words words(const std::string& name, std::int64_t rows, std::int64_t columns) const {
    const Tensor& tensor = matrix(name, "I32");
    if (tensor.shape != Shape{rows, columns})
      fail(name + " is " + json(tensor.shape).dump() + " instead of " +
           json(Shape{rows, columns}).dump());
    const Bytes bytes = tensor.read(0, tensor.bytes);
    Words words(bytes.size() / 4);
    std::memcpy(words.data(), bytes.data(), bytes.size());
    return words;
  }
  static std::uint8_t nibble(std::uint32_t word, std::int64_t at) {
    return static_cast<std::uint8_t>(word >> 4 * at & 15);
  }
  std::vector<float> numbers(const Tensor& tensor) const {
    const Bytes bytes = tensor.read(0, tensor.bytes);
    const Dtype& dtype = dtype_of(tensor.dtype);
    return numbers_of(dtype, bytes.data(), bytes.size() / dtype.bytes);
  }
  /// The group of each input, from a tensor of that name or in their order.
  void set_groups(Codes& codes, const std::string& name) const {
    const std::int64_t size = (codes.k + codes.groups - 1) / codes.groups;
    codes.group.resize(static_cast<std::size_t>(codes.k));
    for (std::int64_t i = 0; i < codes.k; ++i) codes.group[static_cast<std::size_t>(i)] = i / size;
    const Tensor* const index = files_.find(name);
    if (index == nullptr || codes.groups == 1) return;
    if (index->dtype != "I32" || index->shape != Shape{codes.k})
      fail(name + " is no group of each input");
    const Bytes bytes = index->read(0, index->bytes);
    for (std::size_t i = 0; i < codes.group.size(); ++i) {
      std::int32_t group = 0;
      std::memcpy(&group, bytes.data() + 4 * i, 4);
      if (group < 0 || group >= codes.groups) fail(name + " has a group that there is not");
      codes.group[i] = group;
    }
  }

  /// GPTQ and AWQ: scales [groups, n], zero points packed along n.
  Codes by_columns(const std::string& module, bool with_q) const {
    Codes codes;
    const Tensor& scales = files_.at(module + ".scales");
    const Shape packed = matrix(module + ".qweight", "I32").shape;
    if (scales.shape.size() != 2) fail(module + ".scales is no matrix");
    codes.groups = scales.shape[0], codes.n = scales.shape[1];
    const bool awq = method_ == "awq";
    const Tensor* const index = files_.find(module + ".g_idx");
    codes.k = awq ? packed[0] : index != nullptr ? index->shape.at(0) : packed[0] * 8;
    const std::int64_t n = codes.n, k = codes.k, columns = (n + 7) / 8;
    constexpr std::int64_t places[] = {0, 4, 1, 5, 2, 6, 3, 7};
    const Words q = words(module + ".qweight", awq ? k : (k + 7) / 8, awq ? columns : n);
    const Words z = words(module + ".qzeros", codes.groups, columns);
    codes.q.resize(static_cast<std::size_t>(with_q ? n * k : 0));
    for (std::int64_t row = 0; with_q && row < n; ++row)
      for (std::int64_t i = 0; i < k; ++i)
        codes.q[static_cast<std::size_t>(row * k + i)] =
            awq ? nibble(q[static_cast<std::size_t>(i * columns + row / 8)], places[row % 8])
                : nibble(q[static_cast<std::size_t>(i / 8 * n + row)], i % 8);
    const std::vector<float> numbers_of_columns = numbers(scales);
    codes.scale.resize(static_cast<std::size_t>(n * codes.groups));
    codes.zero.resize(codes.scale.size());
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t group = 0; group < codes.groups; ++group) {
        const auto place = static_cast<std::size_t>(row * codes.groups + group);
        codes.scale[place] = numbers_of_columns[static_cast<std::size_t>(group * n + row)];
        // The first version of GPTQ keeps one less, of the whole word.
        const std::uint32_t word = z[static_cast<std::size_t>(group * columns + row / 8)] +
                                   (version_ == 1 ? 0x11111111u : 0u);
        codes.zero[place] = nibble(word, awq ? places[row % 8] : row % 8);
      }
    set_groups(codes, module + ".g_idx");
    return codes;
  }

  /// e4m3 or integers of 8 bits [n, k], with a scale of the tensor, of rows or of blocks.
  Codes bytes(const std::string& module, bool with_q) const {
    Codes codes;
    const Tensor& weight = files_.at(module + ".weight");
    codes.format = weight.dtype == "I8" ? "int8" : "fp8";
    if (weight.shape.size() != 2 || (weight.dtype != "I8" && weight.dtype != "F8_E4M3"))
      fail(module + ".weight is " + weight.dtype + " " + json(weight.shape).dump());
    const std::int64_t n = weight.shape[0], k = weight.shape[1];
    codes.n = n, codes.k = k;
    const auto saved =
        numbers(files_.at(module + (method_ == "fp8" ? ".weight_scale_inv" : ".weight_scale")));
    std::int64_t rows = n, columns = k;
    if (block_.is_array())
      rows = block_.at(0), columns = block_.at(1);
    else if (static_cast<std::int64_t>(saved.size()) == n)
      rows = 1;
    if (rows < 1 || columns < 1) fail("a weight_block_size of " + block_.dump());
    codes.groups = (k + columns - 1) / columns;
    if (static_cast<std::int64_t>(saved.size()) != (n + rows - 1) / rows * codes.groups)
      fail(module + " has " + std::to_string(saved.size()) + " scales, not those of blocks of " +
           std::to_string(rows) + " x " + std::to_string(columns));
    for (std::int64_t row = 0; row < n; ++row)
      for (std::int64_t group = 0; group < codes.groups; ++group)
        codes.scale.push_back(saved[static_cast<std::size_t>(row / rows * codes.groups + group)]);
    for (std::int64_t i = 0; i < k; ++i) codes.group.push_back(i / columns);
    if (!with_q) return codes;
    const Bytes elements = weight.read(0, weight.bytes);
    codes.q.assign(elements.begin(), elements.end());
    for (const std::uint8_t code : codes.q)
      if (codes.format == "fp8" && (code & 127) == 127) fail(module + ".weight has NaN");
    return codes;
  }

  Codes compressed(const std::string& module, bool with_q) const {
    Codes codes;
    const Tensor& shape = files_.at(module + ".weight_shape");
    std::int64_t sizes[2] = {};
    if (shape.dtype != "I64" || shape.bytes != sizeof sizes)
      fail(module + ".weight_shape is no pair of sizes");
    std::memcpy(sizes, shape.read(0, sizeof sizes).data(), sizeof sizes);
    codes.n = sizes[0], codes.k = sizes[1];
    const std::int64_t n = codes.n, k = codes.k, columns = (k + 7) / 8;
    if (n < 1 || k < 1) fail(module + ".weight_shape has no sizes");
    const Words q = words(module + ".weight_packed", n, columns);
    codes.q.resize(static_cast<std::size_t>(with_q ? n * k : 0));
    for (std::int64_t row = 0; with_q && row < n; ++row)
      for (std::int64_t i = 0; i < k; ++i)
        codes.q[static_cast<std::size_t>(row * k + i)] =
            nibble(q[static_cast<std::size_t>(row * columns + i / 8)], i % 8);
    codes.scale = numbers(files_.at(module + ".weight_scale"));
    if (codes.scale.size() == 1) codes.scale.resize(static_cast<std::size_t>(n), codes.scale[0]);
    if (codes.scale.empty() || codes.scale.size() % static_cast<std::size_t>(n) != 0)
      fail(module + ".weight_scale has no number for each row");
    codes.groups = static_cast<std::int64_t>(codes.scale.size()) / n;
    if (files_.find(module + ".weight_zero_point")) {
      const Words z = words(module + ".weight_zero_point", (n + 7) / 8, codes.groups);
      codes.zero.resize(codes.scale.size());
      for (std::int64_t row = 0; row < n; ++row)
        for (std::int64_t group = 0; group < codes.groups; ++group)
          codes.zero[static_cast<std::size_t>(row * codes.groups + group)] =
              nibble(z[static_cast<std::size_t>(row / 8 * codes.groups + group)], row % 8);
    }
    set_groups(codes, module + ".weight_g_idx");
    return codes;
  }

  const Files& files_;
  std::string method_;
  int version_ = 2;
  bool has_bytes_ = false;
  json block_;  // rows and columns with one scale
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
