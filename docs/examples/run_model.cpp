// Runs a saved Llama-like model: prefill, then greedy decoding, a plan of all its layers for each.
//
// usage: run-model DIR --prompt-ids 1,2,3 --tokens N [--device cpu|ORDINAL]
//
// DIR is as transformers saves Llama, Mistral, Qwen2 and Qwen3: config.json and safetensors. It
// uses the public API alone, and the CUDA driver for memory. Prints the ids that follow the prompt.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fftune/fftune.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;
using fftune::library::Context;
using fftune::library::Plan;
using nlohmann::json;
using Ids = std::vector<std::int32_t>;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what);
}

json read_json(const fs::path& path) {
  std::ifstream stream(path);
  if (!stream) fail(path.string() + " cannot be read");
  json value = json::parse(stream, nullptr, false);
  if (!value.is_object()) fail(path.string() + " is no JSON object");
  return value;
}

// ---- the model's tensors ------------------------------------------------------------------------

struct Tensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  const char* data = nullptr;
  std::size_t bytes = 0;
};

/// Maps the files for good: the weights are read once, when they are uploaded.
class Weights {
 public:
  explicit Weights(const fs::path& folder) {
    std::set<std::string> files{"model.safetensors"};
    if (const fs::path index = folder / "model.safetensors.index.json"; fs::exists(index)) {
      files.clear();
      const json map = read_json(index).at("weight_map");
      for (const auto& [name, file] : map.items()) files.insert(file.get<std::string>());
    }
    for (const std::string& file : files) add(folder / file);
  }

  const Tensor* find(const std::string& name) const {
    const auto entry = tensors_.find(name);
    return entry == tensors_.end() ? nullptr : &entry->second;
  }
  const Tensor& at(const std::string& name) const {
    const Tensor* const tensor = find(name);
    return tensor ? *tensor : (fail("the model has no tensor " + name), *tensor);
  }

 private:
  void add(const fs::path& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY);
    struct stat status {};
    if (descriptor < 0 || ::fstat(descriptor, &status) != 0)
      fail(path.string() + " cannot be read");
    const auto size = static_cast<std::size_t>(status.st_size);
    void* const memory =
        size == 0 ? MAP_FAILED : ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    ::close(descriptor);
    std::uint64_t length = 0;
    if (memory == MAP_FAILED || size < sizeof length)
      fail(path.string() + " is no safetensors file");
    const auto* const file = static_cast<const char*>(memory);
    std::memcpy(&length, file, sizeof length);
    if (length > size - sizeof length) fail(path.string() + " is cut short");
    const char* const text = file + sizeof length;
    const json header = json::parse(text, text + length, nullptr, false);
    if (!header.is_object()) fail(path.string() + " has no header");
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") continue;
      const auto offsets = entry.at("data_offsets").get<std::vector<std::size_t>>();
      if (offsets.size() != 2 || offsets[0] > offsets[1] ||
          offsets[1] > size - sizeof length - length)
        fail(path.string() + " is cut short at " + name);
      tensors_[name] = {.dtype = entry.at("dtype"),
                        .shape = entry.at("shape").get<std::vector<std::int64_t>>(),
                        .data = text + length + offsets[0],
                        .bytes = offsets[1] - offsets[0]};
    }
  }

  std::map<std::string, Tensor> tensors_;
};

// ---- memory of a device -------------------------------------------------------------------------

/// The CPU's, or a GPU's in its primary context, which the library uses too.
class Memory {
 public:
  explicit Memory(int device) {
    if (device < 0) return;
    driver_ = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (driver_ == nullptr) fail("there is no CUDA driver (libcuda.so.1) here");
    void* context = nullptr;
    int handle = 0;
    call<unsigned>("cuInit", 0u);
    call<int*, int>("cuDeviceGet", &handle, device);
    call<void**, int>("cuDevicePrimaryCtxRetain", &context, handle);
    call<void*>("cuCtxSetCurrent", context);
  }

  void* allocate(std::size_t bytes) {
    bytes = (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256;
    if (driver_ == nullptr) {
      void* const memory = std::aligned_alloc(256, bytes);
      return memory ? memory : (fail("out of memory"), nullptr);
    }
    std::uint64_t address = 0;
    call<std::uint64_t*, std::size_t>("cuMemAlloc_v2", &address, bytes);
    return reinterpret_cast<void*>(address);
  }
  void write(void* to, const void* from, std::size_t bytes) {
    if (driver_ == nullptr)
      std::memcpy(to, from, bytes);
    else
      call<void*, const void*, std::size_t>("cuMemcpyHtoD_v2", to, from, bytes);
  }
  /// After all that was enqueued before.
  void read(void* to, const void* from, std::size_t bytes) {
    if (driver_ == nullptr)
      std::memcpy(to, from, bytes);
    else
      call<void*, const void*, std::size_t>("cuMemcpyDtoH_v2", to, from, bytes);
  }

 private:
  template <typename... Args>
  void call(const char* name, Args... args) {
    const auto function = reinterpret_cast<int (*)(Args...)>(::dlsym(driver_, name));
    const int status = function ? function(args...) : -1;
    if (status != 0) fail(std::string(name) + " failed with " + std::to_string(status));
  }

  void* driver_ = nullptr;
};

// ---- the model's problems -----------------------------------------------------------------------

/// "BF16" as the library says it.
std::string dtype_of(const std::string& saved) {
  if (saved == "F32") return "f32";
  if (saved == "BF16") return "bf16";
  fail("the weights are " + saved + ": this example runs F32 and BF16");
}

float number_of(const std::string& dtype, const char* element) {
  std::uint32_t bits = 0;
  if (dtype == "f32") {
    std::memcpy(&bits, element, 4);
  } else {  // bf16 is the upper half of f32
    std::uint16_t half = 0;
    std::memcpy(&half, element, 2);
    bits = std::uint32_t{half} << 16;
  }
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// All layers of the model for `tokens` new ones, as a problem of the op layer.
json layers_problem(const json& config, const Weights& weights, std::int64_t tokens,
                    std::int64_t cache) {
  const std::string type = config.at("model_type");
  if (!std::set<std::string>{"llama", "mistral", "qwen2", "qwen3"}.contains(type))
    fail("model_type " + type + " is not llama, mistral, qwen2 or qwen3");
  const std::int64_t heads = config.at("num_attention_heads");
  const std::int64_t d = config.at("hidden_size");
  const auto get = [](const json& object, const char* key, const json& otherwise) {
    return object.contains(key) && !object.at(key).is_null() ? object.at(key) : otherwise;
  };
  const std::string first = "model.layers.0.self_attn.";
  json problem{{"op", "layer"},
               {"batch", 1},
               {"s", tokens},
               {"cache", cache},
               {"layers", config.at("num_hidden_layers")},
               {"d", d},
               {"h", config.at("intermediate_size")},
               {"heads", heads},
               {"kv-heads", get(config, "num_key_value_heads", heads)},
               {"dim", get(config, "head_dim", d / heads)},
               {"dtype", dtype_of(weights.at("model.norm.weight").dtype)},
               {"act", get(config, "hidden_act", "silu")},
               {"eps", get(config, "rms_norm_eps", 1e-6).dump()},
               {"qkv-bias", weights.find(first + "q_proj.bias") ? "yes" : "no"},
               {"out-bias", weights.find(first + "o_proj.bias") ? "yes" : "no"},
               {"qk-norm", weights.find(first + "q_norm.weight") ? "yes" : "no"}};
  const json window = get(config, "sliding_window", nullptr);
  if (window.is_number() && get(config, "use_sliding_window", true).get<bool>() && window < cache)
    problem["window"] = window;

  // Older configurations have rope_theta beside rope_scaling, newer ones both in rope_parameters.
  const json rope = get(config, "rope_parameters", get(config, "rope_scaling", json::object()));
  problem["base"] = get(rope, "rope_theta", get(config, "rope_theta", 10000)).dump();
  const std::string kind = get(rope, "rope_type", get(rope, "type", "default"));
  if (kind == "llama3") {
    problem["angles"] = kind;
    for (const auto& [ours, theirs] : {std::pair{"factor", "factor"},
                                       {"low", "low_freq_factor"},
                                       {"high", "high_freq_factor"},
                                       {"context", "original_max_position_embeddings"}})
      problem[ours] = rope.at(theirs).dump();
  } else if (kind != "default") {
    fail("rope_type " + kind + " is not one that this example knows");
  }
  return problem;
}

/// "layers.3.w_q" as transformers saves it.
std::string saved_name(const std::string& buffer) {
  static const std::map<std::string, std::string> names{
      {"attn_norm", "input_layernorm.weight"}, {"w_q", "self_attn.q_proj.weight"},
      {"w_k", "self_attn.k_proj.weight"},      {"w_v", "self_attn.v_proj.weight"},
      {"b_q", "self_attn.q_proj.bias"},        {"b_k", "self_attn.k_proj.bias"},
      {"b_v", "self_attn.v_proj.bias"},        {"q_norm", "self_attn.q_norm.weight"},
      {"k_norm", "self_attn.k_norm.weight"},   {"w_o", "self_attn.o_proj.weight"},
      {"b_o", "self_attn.o_proj.bias"},        {"ffn_norm", "post_attention_layernorm.weight"},
      {"w_gate", "mlp.gate_proj.weight"},      {"w_up", "mlp.up_proj.weight"},
      {"w_down", "mlp.down_proj.weight"}};
  const auto dot = buffer.rfind('.');
  const auto name = names.find(buffer.substr(dot + 1));
  if (dot == buffer.npos || name == names.end()) fail("the layers have an input " + buffer);
  return "model." + buffer.substr(0, dot + 1) + name->second;
}

// ---- plans with their buffers -------------------------------------------------------------------

class Model {
 public:
  Model(const fs::path& folder, int device, std::int64_t prompt, std::int64_t cache)
      : weights_(folder),
        memory_(device),
        context_(device),
        config_(read_json(folder / "config.json")) {
    json problem = layers_problem(config_, weights_, prompt, cache);
    dtype_ = problem.at("dtype");
    element_ = dtype_ == "f32" ? 4 : 2;
    width_ = problem.at("d").get<std::size_t>() * element_;
    vocabulary_ = config_.at("vocab_size");
    add("prefill", problem);
    problem["s"] = 1;
    add("decode", problem);
    add("norm", {{"op", "rmsnorm"},
                 {"dtype", dtype_},
                 {"m", 1},
                 {"d", problem.at("d")},
                 {"eps", problem.at("eps")}});
    add("head", {{"op", "linear"},
                 {"dtype", dtype_},
                 {"m", 1},
                 {"k", problem.at("d")},
                 {"n", vocabulary_}});
  }

  /// The id that follows these, of which the first is at `position`.
  std::int32_t next(const Ids& ids, std::int32_t position) {
    Step& layers = steps_.at(ids.size() > 1 ? "prefill" : "decode");
    const Tensor& table = weights_.at("model.embed_tokens.weight");
    std::vector<char> rows;
    Ids positions;
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= vocabulary_) fail("there is no id " + std::to_string(id));
      const char* const row = table.data + static_cast<std::size_t>(id) * width_;
      rows.insert(rows.end(), row, row + width_);
      positions.push_back(position++);
    }
    memory_.write(layers.at("x"), rows.data(), rows.size());
    for (const char* name : {"positions", "slots"})  // one sequence: its slots are its positions
      memory_.write(layers.at(name), positions.data(), positions.size() * sizeof positions[0]);
    memory_.write(layers.at("lengths"), &position, sizeof position);
    layers.run();

    Step &norm = steps_.at("norm"), &head = steps_.at("head");
    norm.at("x") = static_cast<char*>(layers.at("y")) + (ids.size() - 1) * width_;
    norm.run();
    head.at("x") = norm.at("y");
    head.run();
    std::vector<char> logits(static_cast<std::size_t>(vocabulary_) * element_);
    memory_.read(logits.data(), head.at("y"), logits.size());
    std::int32_t best = 0;
    const auto logit = [&](std::int32_t id) {
      return number_of(dtype_, logits.data() + static_cast<std::size_t>(id) * element_);
    };
    for (std::int32_t id = 1; id < vocabulary_; ++id)
      if (logit(id) > logit(best)) best = id;
    return best;
  }

 private:
  struct Step {
    Plan plan;
    std::vector<std::string> names;
    std::vector<void*> buffers;
    void* workspace;

    void*& at(const std::string& name) {
      const auto found = std::find(names.begin(), names.end(), name);
      if (found == names.end()) fail("the plan has no buffer " + name);
      return buffers[static_cast<std::size_t>(found - names.begin())];
    }
    void run() const { plan.run(buffers.data(), buffers.size(), workspace); }
  };

  /// A plan, its own buffers, and the weights and caches that it has in common with others.
  void add(const std::string& name, const json& problem) {
    Plan plan = context_.plan(problem.dump());
    const json described = json::parse(plan.describe());
    void* const workspace = memory_.allocate(plan.workspace_bytes());
    Step step{std::move(plan), {}, {}, workspace};
    for (const json& buffer : described.at("buffers")) {
      step.names.push_back(buffer.at("name"));
      step.buffers.push_back(address(name, step.names.back(), buffer));
    }
    steps_.emplace(name, std::move(step));
  }

  void* address(const std::string& step, const std::string& name, const json& buffer) {
    const bool layer = name.starts_with("layers.");
    if (buffer.at("role") == "updated") return shared(name, buffer.at("bytes"));
    if (layer) return uploaded(saved_name(name), buffer);
    if (name != "w") return memory_.allocate(buffer.at("bytes"));
    if (step == "norm") return uploaded("model.norm.weight", buffer);
    const bool tied = weights_.find("lm_head.weight") == nullptr;
    return uploaded(tied ? "model.embed_tokens.weight" : "lm_head.weight", buffer);
  }

  void* shared(const std::string& name, std::size_t bytes) {
    void*& memory = shared_[name];
    if (memory == nullptr) memory = memory_.allocate(bytes);
    return memory;
  }

  void* uploaded(const std::string& name, const json& buffer) {
    const Tensor& tensor = weights_.at(name);
    if (tensor.shape != buffer.at("shape").get<std::vector<std::int64_t>>() ||
        dtype_of(tensor.dtype) != buffer.at("dtype"))
      fail(name + " is " + tensor.dtype + " " + json(tensor.shape).dump() + " instead of " +
           buffer.at("dtype").get<std::string>() + " " + buffer.at("shape").dump());
    const bool known = shared_.count(name) > 0;
    void* const memory = shared(name, tensor.bytes);
    if (!known) memory_.write(memory, tensor.data, tensor.bytes);
    return memory;
  }

  Weights weights_;
  Memory memory_;
  Context context_;
  json config_;
  std::string dtype_;
  std::size_t element_ = 0;
  std::size_t width_ = 0;  // bytes of a token
  std::int32_t vocabulary_ = 0;
  std::map<std::string, Step> steps_;
  std::map<std::string, void*> shared_;  // for as long as the process runs
};

// ---- the command --------------------------------------------------------------------------------

Ids parse_ids(const std::string& text) {
  Ids ids;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) ids.push_back(std::stoi(word));
  return ids;
}

int run(const std::vector<std::string>& words) {
  const auto option = [&](const std::string& name, const std::string& otherwise) {
    for (std::size_t i = 1; i + 1 < words.size(); ++i)
      if (words[i] == name) return words[i + 1];
    return otherwise;
  };
  const Ids prompt = parse_ids(option("--prompt-ids", ""));
  const int tokens = std::stoi(option("--tokens", "16"));
  if (words.empty() || prompt.empty() || tokens < 1)
    fail("usage: run-model DIR --prompt-ids 1,2,3 --tokens N [--device cpu|ORDINAL]");
  const std::string device = option("--device", "cpu");

  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  };
  const auto length = static_cast<std::int32_t>(prompt.size());
  // The caches have whole blocks of 64 keys.
  const std::int64_t cache = (length + tokens + 63) / 64 * 64;
  Model model(words[0], device == "cpu" ? -1 : std::stoi(device), length, cache);
  const auto start = Clock::now();
  Ids ids{model.next(prompt, 0)};
  const auto prefilled = Clock::now();
  for (std::int32_t at = length; static_cast<int>(ids.size()) < tokens; ++at)
    ids.push_back(model.next({ids.back()}, at));
  const double decoding = seconds(Clock::now() - prefilled);
  for (const std::int32_t id : ids) std::printf("%d ", id);
  std::printf("\nprefill of %d tokens: %.2f ms", length, 1e3 * seconds(prefilled - start));
  if (ids.size() > 1)
    std::printf("; decode: %.1f tokens/s", static_cast<double>(ids.size() - 1) / decoding);
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run({words + 1, words + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "run-model: %s\n", error.what());
    return 1;
  }
}
