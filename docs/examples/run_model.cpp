// Runs a saved model: prefill, then greedy decoding, with plans of whole layers for each.
//
// usage: run-model DIR --prompt-ids 1,2,3 --tokens N [--device cpu|ORDINAL] [--logits FILE]
//        run-model DIR --benchmark --prompt-tokens M --tokens N [--device cpu|ORDINAL]
//
// DIR is as transformers saves a model: config.json and safetensors. The library reads it: it
// completes the problem of a layer and gives the weights in the form that the layer's plan takes.
// FILE gets the logits that the ids are chosen by, as rows of f32.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "running_model.hpp"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Whole runs of ids at random. The last one is timed: the first makes caches and clocks warm.
void benchmark(Model& model, std::int32_t prompt, std::size_t tokens) {
  Ids ids;
  for (std::uint32_t random = 1; std::ssize(ids) < prompt;) {
    random = random * 1664525 + 1013904223;
    ids.push_back(static_cast<std::int32_t>((random >> 8) % model.vocabulary()));
  }
  double first = 0, others = 0;  // of the last round, when everything is compiled
  for (int round = 0; round < 3; ++round) {
    auto start = Clock::now();
    const std::int32_t id = model.next(ids, 0);
    first = seconds_since(start);
    start = Clock::now();
    model.decode(id, prompt, tokens - 1);
    others = seconds_since(start) / static_cast<double>(tokens - 1);
  }
  // Weights, and the keys and values of half of the tokens, read once at the rate of a copy.
  const double bytes = model.floor_bytes(prompt + static_cast<double>(tokens) / 2);
  const double rate = model.memory().copy_rate();
  std::printf(
      "time to the first of %zu tokens, prompt of %d: %.2f ms\n%.1f tokens/s, %.1f us for each\n"
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
  Ids prompt;
  std::istringstream stream(option("--prompt-ids", ""));
  for (std::string word; std::getline(stream, word, ',');) prompt.push_back(std::stoi(word));
  const int tokens = std::stoi(option("--tokens", "16"));
  const bool benchmarks = std::count(words.begin(), words.end(), "--benchmark") > 0;
  const int length =
      benchmarks ? std::stoi(option("--prompt-tokens", "128")) : static_cast<int>(prompt.size());
  if (words.empty() || prompt.empty() != benchmarks || tokens < 1 + benchmarks || length < 1)
    fail(
        "usage: run-model DIR --prompt-ids 1,2,3 --tokens N [--device cpu|ORDINAL] [--logits "
        "FILE], or DIR --benchmark --prompt-tokens M --tokens N (2 or more)");
  const std::string device = option("--device", "cpu"), path = option("--logits", "");
  // The caches have whole blocks of 64 keys.
  Model model(words[0], device == "cpu" ? -1 : std::stoi(device), length,
              (length + tokens + 63) / 64 * 64, !path.empty());
  if (benchmarks) {
    benchmark(model, length, static_cast<std::size_t>(tokens));
    return 0;
  }
  std::ofstream file;
  if (!path.empty()) file.open(path, std::ios::binary);
  if (!file) fail(path + " cannot be written");
  const auto next = [&](const Ids& given, std::int32_t position) {
    if (path.empty()) return model.next(given, position);
    const std::vector<float> logits = model.logits(given, position);
    file.write(reinterpret_cast<const char*>(logits.data()),
               static_cast<std::streamsize>(logits.size() * sizeof logits[0]));
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) -
                                     logits.begin());
  };
  auto start = Clock::now();
  Ids ids{next(prompt, 0)};
  const double prefill = seconds_since(start);
  start = Clock::now();
  if (path.empty()) {
    const Ids others = model.decode(ids.front(), length, static_cast<std::size_t>(tokens - 1));
    ids.insert(ids.end(), others.begin(), others.end());
  }
  for (std::int32_t at = length; static_cast<int>(ids.size()) < tokens; ++at)
    ids.push_back(next({ids.back()}, at));
  const double decoding = seconds_since(start);
  for (const std::int32_t id : ids) std::printf("%d ", id);
  std::printf("\nprefill of %d tokens: %.2f ms", length, 1e3 * prefill);
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
