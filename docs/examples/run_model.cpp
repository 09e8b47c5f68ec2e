// Runs a saved model: prefill, then greedy decoding, with plans of whole layers for each.
//
// usage: run-model DIR --prompt-ids 1,2,3 --tokens N [--device cpu|ORDINAL] [--logits FILE]
//        run-model DIR --benchmark --prompt-tokens M --tokens N [--device cpu|ORDINAL]
//
// DIR is as transformers saves Llama, Mistral, Qwen2 and 3, Gemma, Gemma 2 and 3, Phi, Phi-3,
// GPT-2, Mixtral and Qwen3-MoE: config.json and safetensors. It uses the public API alone, and the
// CUDA driver for memory. Prints the ids that follow the prompt; FILE gets the logits that they are
// chosen by, as rows of f32.
//
// Layers that are alike and follow each other are one plan with `layers`. Where kinds take turns,
// as those with and without a window do in Gemma, a plan of each kind runs in its turn: a plan is
// given addresses, so it serves all the layers of its kind. If all layers are alike, a token behind
// the prompt is one plan of the op decode, whose runs need nothing of the host in between.
//
// --benchmark takes ids at random. It prints the time to the first token, tokens a second, and the
// share of the floor: weights, keys and values read once at the rate of a copy that is timed here.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fftune/fftune.hpp>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "saved_model.hpp"

namespace {

using fftune::library::Context;
using fftune::library::Plan;
using Ids = std::vector<std::int32_t>;

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
  void copy(void* to, const void* from, std::size_t bytes) {
    if (driver_ == nullptr)
      std::memcpy(to, from, bytes);
    else
      call<void*, const void*, std::size_t>("cuMemcpyDtoD_v2", to, from, bytes);
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

// ---- plans with their buffers -------------------------------------------------------------------

class Model {
 public:
  /// `logits`: of every id, for whoever wants them; else ids are chosen on the device.
  Model(const std::filesystem::path& folder, int device, std::int64_t prompt, std::int64_t cache,
        bool logits)
      : saved_(folder), memory_(device), context_(device) {
    if (prompt > 1) add_layers("prefill", prompt, cache);
    json token = logits ? json() : saved_.token();
    if (prompt == 1 || token.is_null()) add_layers("decode", 1, cache);
    if (!token.is_null()) {
      token.update({{"batch", 1}, {"cache", cache}});
      if (token.contains("window") && token.at("window") >= cache) token.erase("window");
      steps_["token"].push_back(step("token", token, 0));
    }
    steps_["head"].push_back(step("head", saved_.head(logits), 0));
  }

  /// The id that follows these; `position` is that of the first.
  std::int32_t next(const Ids& ids, std::int32_t position) {
    std::int32_t id = 0;
    memory_.read(&id, run(ids, position).at("ids"), sizeof id);
    return id;
  }

  /// The ids that follow `last`, whose position is `position`.
  Ids decode(std::int32_t last, std::int32_t position, int count) {
    Ids ids;
    if (!steps_.contains("token")) {
      while (static_cast<int>(ids.size()) < count)
        ids.push_back(next({ids.empty() ? last : ids.back()},
                           position + static_cast<std::int32_t>(ids.size())));
      return ids;
    }
    Step& token = steps_.at("token").front();
    for (const auto& [name, value] : {std::pair<const char*, std::int32_t>{"ids", last},
                                      {"lengths", position},
                                      {"steps", 0},
                                      {"ended", 0},
                                      {"limits", std::numeric_limits<std::int32_t>::max()}})
      memory_.write(token.at(name), &value, sizeof value);
    for (int i = 0; i < count; ++i) token.run();
    ids.resize(static_cast<std::size_t>(count));
    memory_.read(ids.data(), token.at("out"), ids.size() * sizeof ids[0]);
    return ids;
  }

  /// Bytes that a token reads at least, with this number of keys.
  double floor_bytes(double keys) const {
    double bytes = 0;
    for (const auto& [name, size] : weights_) bytes += static_cast<double>(size);
    const json layer = saved_.layer(0);
    return bytes + keys * 2 * static_cast<double>(saved_.layers()) *
                       layer.at("kv-heads").get<double>() * layer.at("dim").get<double>() *
                       static_cast<double>(saved_.dtype().bytes);
  }

  /// Bytes that a copy reads and writes in a second.
  double copy_rate() {
    constexpr std::size_t bytes = std::size_t{256} << 20;
    void *const from = shared("copied from", bytes), *const to = shared("copied to", bytes);
    std::uint32_t end = 0;
    double fastest = std::numeric_limits<double>::infinity();
    constexpr int times = 10;
    // The first touches the memory. Other work on the machine makes some of them longer.
    for (int round = 0; round < 6; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < times; ++i) memory_.copy(to, from, bytes);
      memory_.read(&end, to, sizeof end);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      fastest = std::min(fastest, seconds.count());
    }
    return 2.0 * times * static_cast<double>(bytes) / fastest;
  }

  std::int64_t vocabulary() const { return saved_.vocabulary(); }

  /// The logits that it is chosen by, of a model that has them.
  std::vector<float> logits(const Ids& ids, std::int32_t position) {
    const void* const from = run(ids, position).at("logits");
    const auto count = static_cast<std::size_t>(saved_.vocabulary());
    Bytes bytes(count * saved_.dtype().bytes);
    memory_.read(bytes.data(), from, bytes.size());
    std::vector<float> logits = numbers_of(saved_.dtype(), bytes.data(), count);
    if (const auto cap = static_cast<float>(saved_.softcap()); cap > 0)
      for (float& logit : logits) logit = cap * std::tanh(logit / cap);
    return logits;
  }

 private:
  /// A plan with its buffers.
  struct Step {
    const Plan* plan = nullptr;
    std::vector<std::string> names;
    std::vector<void*> buffers;
    void* workspace = nullptr;

    bool has(const std::string& name) const {
      return std::find(names.begin(), names.end(), name) != names.end();
    }
    void*& at(const std::string& name) {
      if (!has(name)) fail("the plan has no buffer " + name);
      return buffers[static_cast<std::size_t>(std::find(names.begin(), names.end(), name) -
                                              names.begin())];
    }
    void run() const { plan->run(buffers.data(), buffers.size(), workspace); }
  };

  /// Runs the layers and the head, which is returned.
  Step& run(const Ids& ids, std::int32_t position) {
    auto& layers = steps_.at(ids.size() > 1 ? "prefill" : "decode");
    Bytes rows;
    Ids positions;
    for (const std::int32_t id : ids) {
      saved_.add_embedding(id, position, rows);
      positions.push_back(position++);
    }
    Step& first = layers.front();  // the others read the same positions, slots and lengths
    memory_.write(first.at("x"), rows.data(), rows.size());
    for (const char* name : {"positions", "slots"})  // one sequence: its slots are its positions
      if (first.has(name)) memory_.write(first.at(name), positions.data(), positions.size() * 4);
    memory_.write(first.at("lengths"), &position, sizeof position);
    for (const Step& step : layers) step.run();
    Step& head = steps_.at("head").front();
    head.at("x") =
        static_cast<char*>(layers.back().at("y")) + rows.size() / ids.size() * (ids.size() - 1);
    head.run();
    return head;
  }

  /// The layers for `tokens` new ones of one sequence: each run of layers that are alike is a step.
  void add_layers(const std::string& phase, std::int64_t tokens, std::int64_t cache) {
    const auto problem_of = [&](std::int64_t layer) {
      json problem = saved_.layer(layer);
      problem.update({{"batch", 1}, {"s", tokens}, {"cache", cache}});
      // A window that the cache does not exceed is none.
      if (problem.contains("window") && problem.at("window") >= cache) problem.erase("window");
      return problem;
    };
    std::vector<Step>& steps = steps_[phase];
    for (std::int64_t first = 0, next = 0; first < saved_.layers(); first = next) {
      json problem = problem_of(first);
      do {
        ++next;
      } while (next < saved_.layers() && problem_of(next) == problem);
      problem["layers"] = next - first;
      steps.push_back(step(phase, problem, first));
      if (first > 0) steps.back().at("x") = steps[steps.size() - 2].at("y");
    }
  }

  /// `first`: the layer of the model that is the plan's first.
  Step step(const std::string& phase, const json& problem, std::int64_t first) {
    auto known = plans_.find(problem.dump());
    if (known == plans_.end())
      known = plans_.emplace(problem.dump(), context_.plan(problem.dump())).first;
    const Plan& plan = known->second;
    Step step{&plan, {}, {}, shared("workspace of " + problem.dump(), plan.workspace_bytes())};
    const json buffers = json::parse(plan.describe()).at("buffers");
    std::map<std::int64_t, std::map<std::string, Shape>> weights;
    for (const json& buffer : buffers)
      if (const auto [layer, name] = split(buffer.at("name"), first);
          layer >= 0 && buffer.at("role") == "input")
        weights[layer][name] = buffer.at("shape").get<Shape>();
    for (const auto& [layer, shapes] : weights) saved_.expect_same(layer, shapes);
    for (const json& buffer : buffers) {
      const auto [layer, name] = split(buffer.at("name"), first);
      const std::size_t bytes = buffer.at("bytes");
      const std::string place = layer < 0 ? phase : "layer " + std::to_string(layer);
      step.names.push_back(buffer.at("name"));
      if (layer >= 0 && buffer.at("role") == "input")
        step.buffers.push_back(uploaded(place + " " + name, bytes, [&, at = layer, of = name] {
          return saved_.weight(at, of, weights.at(at));
        }));
      else if (const std::string saved = tensor_of(phase, name, buffer.at("role")); !saved.empty())
        step.buffers.push_back(uploaded(
            saved, bytes, [&] { return saved_.tensor(saved, buffer.at("shape").get<Shape>()); }));
      else  // caches are those of their layers, and of y there are two in turn
        step.buffers.push_back(
            shared(place + " " + name + (name == "y" ? std::to_string(turn_++ % 2) : ""), bytes));
    }
    return step;
  }

  /// The saved name of an input of the head, or of the embedding; empty: it is none.
  std::string tensor_of(const std::string& phase, const std::string& name,
                        const std::string& role) const {
    static const std::map<std::string, std::string> of_token{{"final_norm", "w_norm"},
                                                             {"final_norm_bias", "b_norm"},
                                                             {"w_head", "w"},
                                                             {"b_head", "bias"}};
    if (role != "input" || (phase == "head" && name == "x")) return "";
    if (phase == "head") return saved_.tensor_of(name);
    if (phase != "token") return "";
    if (name == "embedding") return saved_.embedding_tensor();
    const auto own = of_token.find(name);
    return own == of_token.end() ? "" : saved_.tensor_of(own->second);
  }

  /// "layers.3.w_q" is w_q of the layer `first` + 3; what is of no layer is of layer -1.
  static std::pair<std::int64_t, std::string> split(const std::string& name, std::int64_t first) {
    if (!name.starts_with("layers.")) return {-1, name};
    const auto dot = name.find('.', 7);
    return {first + std::stoll(name.substr(7, dot - 7)), name.substr(dot + 1)};
  }

  /// The memory of that name, for as long as the process runs.
  void* shared(const std::string& name, std::size_t bytes) {
    void*& memory = memories_[name];
    if (memory == nullptr) memory = memory_.allocate(bytes);
    return memory;
  }

  template <typename Read>
  void* uploaded(const std::string& name, std::size_t bytes, const Read& read) {
    const bool known = memories_.count(name) > 0;
    void* const memory = shared(name, bytes);
    if (!known) memory_.write(memory, read().data(), bytes);
    // One row is read of an embedding that is no weight of the head.
    if (name != saved_.embedding_tensor() || name == saved_.tensor_of("w")) weights_[name] = bytes;
    return memory;
  }

  SavedModel saved_;
  Memory memory_;
  Context context_;
  std::map<std::string, Plan> plans_;  // by their problems
  std::map<std::string, std::vector<Step>> steps_;
  std::map<std::string, void*> memories_;
  std::map<std::string, std::size_t> weights_;  // bytes of those that a token reads
  int turn_ = 0;
};

// ---- the command --------------------------------------------------------------------------------

Ids parse_ids(const std::string& text) {
  Ids ids;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) ids.push_back(std::stoi(word));
  return ids;
}

/// Whole runs. The last one is timed: the first makes caches and clocks warm.
void benchmark(Model& model, int prompt, int tokens) {
  using Clock = std::chrono::steady_clock;
  Ids ids;
  std::uint32_t random = 1;
  for (int i = 0; i < prompt; ++i) {
    random = random * 1664525 + 1013904223;
    ids.push_back(
        static_cast<std::int32_t>((random >> 8) % static_cast<std::uint32_t>(model.vocabulary())));
  }
  double first = 0, others = 0;  // of the last round, when everything is compiled
  for (int round = 0; round < 3; ++round) {
    const auto start = Clock::now();
    const std::int32_t id = model.next(ids, 0);
    const auto prefilled = Clock::now();
    model.decode(id, prompt, tokens - 1);
    first = std::chrono::duration<double>(prefilled - start).count();
    others = std::chrono::duration<double>(Clock::now() - prefilled).count() / (tokens - 1);
  }
  const double bytes = model.floor_bytes(prompt + tokens / 2.0), rate = model.copy_rate();
  std::printf(
      "time to the first of %d tokens, prompt of %d: %.2f ms\n%.1f tokens/s, %.1f us for each\n"
      "floor %.1f us (%.3g GB at %.3g GB/s): %.1f%% of it\n",
      tokens, prompt, 1e3 * first, 1 / others, 1e6 * others, 1e6 * bytes / rate, 1e-9 * bytes,
      1e-9 * rate, 100 * bytes / rate / others);
}

int run(const std::vector<std::string>& words) {
  const auto option = [&](const std::string& name, const std::string& otherwise) {
    for (std::size_t i = 1; i + 1 < words.size(); ++i)
      if (words[i] == name) return words[i + 1];
    return otherwise;
  };
  const Ids prompt = parse_ids(option("--prompt-ids", ""));
  const int tokens = std::stoi(option("--tokens", "16"));
  const bool benchmarks = std::find(words.begin(), words.end(), "--benchmark") != words.end();
  const int prompt_tokens = std::stoi(option("--prompt-tokens", "128"));
  if (words.empty() || prompt.empty() != benchmarks || tokens < 1 + benchmarks || prompt_tokens < 1)
    fail(
        "usage: run-model DIR --prompt-ids 1,2,3 --tokens N [--device cpu|ORDINAL] [--logits "
        "FILE], or DIR --benchmark --prompt-tokens M --tokens N (2 or more)");
  const std::string device = option("--device", "cpu");

  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  };
  const auto length = benchmarks ? prompt_tokens : static_cast<std::int32_t>(prompt.size());
  // The caches have whole blocks of 64 keys.
  const std::int64_t cache = (length + tokens + 63) / 64 * 64;
  const std::string path = option("--logits", "");
  Model model(words[0], device == "cpu" ? -1 : std::stoi(device), length, cache, !path.empty());
  if (benchmarks) {
    benchmark(model, length, tokens);
    return 0;
  }
  std::ofstream file;
  if (!path.empty()) {
    file.open(path, std::ios::binary);
    if (!file) fail(path + " cannot be written");
  }
  const auto next = [&](const Ids& given, std::int32_t position) {
    if (path.empty()) return model.next(given, position);
    const std::vector<float> logits = model.logits(given, position);
    file.write(reinterpret_cast<const char*>(logits.data()),
               static_cast<std::streamsize>(logits.size() * sizeof logits[0]));
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) -
                                     logits.begin());
  };
  const auto start = Clock::now();
  Ids ids{next(prompt, 0)};
  const auto prefilled = Clock::now();
  if (path.empty()) {
    const Ids others = model.decode(ids.front(), length, tokens - 1);
    ids.insert(ids.end(), others.begin(), others.end());
  }
  for (std::int32_t at = length; static_cast<int>(ids.size()) < tokens; ++at)
    ids.push_back(next({ids.back()}, at));
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
