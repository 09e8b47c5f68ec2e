// A saved model on a device: plans of its layers and its head, with their weights and caches. Part
// of the example run_model.cpp.
//
// Layers that are alike and follow each other are one plan with `layers`. Where kinds take turns,
// as those with and without a window do in Gemma, a plan of each kind runs in its turn. If all
// layers are alike, a token behind the prompt is one plan of the op decode, whose runs need nothing
// of the host in between.
#pragma once

#include <cmath>
#include <fftune/fftune.hpp>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "device_memory.hpp"

using nlohmann::json;
using Ids = std::vector<std::int32_t>;

/// A plan with its buffers.
struct Step {
  const fftune::library::Plan* plan = nullptr;
  std::map<std::string, std::size_t> places = {};
  std::vector<void*> buffers = {};
  void* workspace = nullptr;

  void*& at(const std::string& name) { return buffers.at(places.at(name)); }
  void run() const { plan->run(buffers.data(), buffers.size(), workspace); }
};

class Model {
 public:
  /// `logits`: of every id, for whoever wants them; else ids are chosen on the device.
  Model(const std::string& folder, int device, std::int64_t prompt, std::int64_t cache, bool logits)
      : saved_(folder), memory_(device), context_(device), facts_(json::parse(saved_.describe())) {
    for (const char* fact : {"vocab", "d", "dtype"})
      if (!facts_.contains(fact)) fail(folder + " has no embedding by a name that is known");
    const bool alike = add_layers(prompt > 1 ? "prefill" : "decode", prompt, cache);
    const bool whole = alike && !logits && !facts_.at("learned_positions");
    if (whole)
      steps_["token"].push_back(
          step("token", problem("decode", 0, {{"batch", 1}, {"cache", cache}})));
    else if (prompt > 1)
      add_layers("decode", 1, cache);
    json head = problem("head", 0, {{"m", 1}});
    cap_ = std::stof(head.value("softcap", "0"));
    if (logits) {
      head.erase("softcap");
      head.update({{"choose", "none"}, {"logits", "f32"}});
    }
    steps_["head"].push_back(step("head", head));
  }

  std::int64_t vocabulary() const { return facts_.at("vocab"); }
  Memory& memory() { return memory_; }
  /// Bytes that a token reads at least, with this number of keys.
  double floor_bytes(double keys) const {
    double bytes = keys * key_bytes_;
    for (const auto& [source, size] : weights_) bytes += static_cast<double>(size);
    return bytes;
  }

  /// The id that follows these; `position` is that of the first.
  std::int32_t next(const Ids& ids, std::int32_t position) {
    std::int32_t id = 0;
    memory_.read(&id, run(ids, position).at("ids"), sizeof id);
    return id;
  }

  /// The ids that follow `last`, whose position is `position`.
  Ids decode(std::int32_t last, std::int32_t position, std::size_t count) {
    Ids ids;
    if (!steps_.contains("token")) {
      for (; ids.size() < count; ++position)
        ids.push_back(next({ids.empty() ? last : ids.back()}, position));
      return ids;
    }
    Step& token = steps_.at("token").front();
    const std::int32_t most = std::numeric_limits<std::int32_t>::max();
    for (const auto& [name, value] : std::map<std::string, std::int32_t>{
             {"ids", last}, {"lengths", position}, {"steps", 0}, {"ended", 0}, {"limits", most}})
      memory_.write(token.at(name), &value, sizeof value);
    for (std::size_t i = 0; i < count; ++i) token.run();
    ids.resize(count);
    memory_.read(ids.data(), token.at("out"), ids.size() * sizeof ids[0]);
    return ids;
  }

  /// The logits that the next id is chosen by, of a model that has them.
  std::vector<float> logits(const Ids& ids, std::int32_t position) {
    std::vector<float> logits(static_cast<std::size_t>(vocabulary()));
    memory_.read(logits.data(), run(ids, position).at("logits"), logits.size() * sizeof logits[0]);
    for (float& logit : logits) logit = cap_ > 0 ? cap_ * std::tanh(logit / cap_) : logit;
    return logits;
  }

 private:
  /// Runs the layers and the head, which is returned.
  Step& run(const Ids& ids, std::int32_t position) {
    auto& layers = steps_.at(ids.size() > 1 ? "prefill" : "decode");
    Step& first = layers.front();  // the others read the same positions, slots and lengths
    std::vector<char> rows(first.plan->buffer_bytes(first.places.at("x")));
    saved_.embed(ids.data(), ids.size(), position, dtype().c_str(), rows.data(), rows.size());
    memory_.write(first.at("x"), rows.data(), rows.size());
    Ids positions;
    for (std::size_t i = 0; i < ids.size(); ++i) positions.push_back(position++);
    memory_.write(first.at("lengths"), &position, sizeof position);  // with the new tokens
    for (const char* name : {"positions", "slots"})  // one sequence: its slots are its positions
      if (first.places.contains(name))
        memory_.write(first.at(name), positions.data(), positions.size() * sizeof positions[0]);
    for (const Step& step : layers) step.run();
    Step& head = steps_.at("head").front();
    head.at("x") =
        static_cast<char*>(layers.back().at("y")) + rows.size() / ids.size() * (ids.size() - 1);
    head.run();
    return head;
  }

  std::string dtype() const { return facts_.at("dtype"); }

  json problem(const char* op, std::int64_t layer, json sizes) const {
    sizes.update({{"op", op}, {"dtype", dtype()}});
    json problem = json::parse(saved_.problem(context_, sizes.dump(), layer));
    // A window that the cache does not exceed is none.
    if (problem.contains("window") && problem.at("window") >= problem.at("cache"))
      problem.erase("window");
    return problem;
  }

  /// The layers for `tokens` new ones of one sequence: each run of layers that are alike is a step.
  /// Returns whether there is one.
  bool add_layers(const std::string& phase, std::int64_t tokens, std::int64_t cache) {
    std::vector<Step>& steps = steps_[phase];
    const json sizes{{"batch", 1}, {"s", tokens}, {"cache", cache}};
    const std::int64_t count = facts_.at("layers");
    for (std::int64_t first = 0, next = 0; first < count; first = next) {
      json layers = problem("layer", first, sizes);
      for (next = first + 1; next < count && problem("layer", next, sizes) == layers;) ++next;
      layers["layers"] = next - first;
      steps.push_back(step(phase, layers, first));
      if (first > 0) steps.back().at("x") = steps[steps.size() - 2].at("y");
    }
    return steps.size() == 1;
  }

  /// `first`: the layer of the model that is the plan's first.
  Step step(const std::string& phase, const json& problem, std::int64_t first = 0) {
    const std::string text = problem.dump();
    if (!plans_.contains(text)) plans_.emplace(text, context_.plan(text));
    const auto& plan = plans_.at(text);
    Step step{.plan = &plan, .workspace = memory("workspace of " + text, plan.workspace_bytes())};
    const json described = json::parse(plan.describe());
    for (const json& buffer : described.at("buffers")) {
      const std::size_t index = step.buffers.size(), bytes = plan.buffer_bytes(index);
      std::string name = buffer.at("name");
      step.places[name] = index;
      const std::string source = saved_.source(plan, index, first);
      if (name.ends_with("_cache")) {  // of a layer of the model: all phases have the same
        const auto dot = name.find('.', 7);
        name = std::to_string(first + std::stoll(name.substr(7))) + name.substr(dot);
        if (!memories_.contains(name))
          key_bytes_ += static_cast<double>(bytes / buffer.at("shape").at(0).get<std::size_t>());
      } else {  // of y there are two in turn
        name = phase + " " + name + (name == "y" ? std::to_string(turn_++ % 2) : "");
      }
      const bool known = memories_.contains(source);
      step.buffers.push_back(memory(source.empty() ? name : source, bytes));
      if (source.empty()) continue;
      if (!step.places.contains("embedding") || step.places.at("embedding") != index)
        weights_[source] = bytes;
      if (known) continue;
      std::vector<char> values(bytes);
      saved_.input(plan, index, values.data(), first);
      memory_.write(step.buffers.back(), values.data(), bytes);
    }
    return step;
  }

  /// For as long as the process runs.
  void* memory(const std::string& name, std::size_t bytes) {
    void*& memory = memories_[name];
    if (memory == nullptr) memory = memory_.allocate(bytes);
    return memory;
  }

  fftune::library::SavedModel saved_;
  Memory memory_;
  fftune::library::Context context_;
  json facts_;
  std::map<std::string, fftune::library::Plan> plans_;  // by their problems
  std::map<std::string, std::vector<Step>> steps_;      // prefill, decode or token, and head
  std::map<std::string, void*> memories_;               // weights by their sources
  std::map<std::string, std::size_t> weights_;          // bytes of those that a token reads
  double key_bytes_ = 0;
  float cap_ = 0;  // of the logits; 0: none
  int turn_ = 0;
};
