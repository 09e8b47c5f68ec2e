// decode: its fields, and what follows from its parts and its own stages.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "device/backend.hpp"
#include "device/parallel.hpp"
#include "kernels/all_argmax/all_argmax.hpp"
#include "kernels/common/part_stages.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/kinds.hpp"
#include "kernels/decode/parts.hpp"
#include "kernels/head/head.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/layer/sequences.hpp"
#include "registry/last_problems.hpp"
#include "registry/part_family.hpp"

namespace fftune::decoding {
namespace {

using NameOf = std::function<std::string(const std::string&)>;

/// The tensors of a part under their names here.
std::vector<TensorSpec> tensors_of_part(const OpPart& part, const NameOf& name_of) {
  std::vector<TensorSpec> tensors = part.op->tensors(part.problem);
  for (TensorSpec& tensor : tensors) {
    tensor.name = name_of(tensor.name);
    for (std::string* name : {&tensor.of_choice, &tensor.choice.from, &tensor.live_rows})
      if (!name->empty()) *name = name_of(*name);
    for (std::string& name : tensor.choice.by) name = name_of(name);
  }
  return tensors;
}

std::vector<TensorSpec> tensors_of_part(const OpPart& part) {
  return tensors_of_part(part, [&](const std::string& name) { return part.tensor(name); });
}

/// Whether layers read a tensor that all of them share.
bool layers_read(const Problem& problem, const char* name) {
  const auto parts = parts_of(problem);
  return std::any_of(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(kinds_of(problem)),
                     [&](const OpPart& part) {
                       return find_tensor(layer_op().tensors(part.problem), name).has_value();
                     });
}
bool rotates(const Problem& problem) {
  return layers_read(problem, "positions");
}
/// Whether layers have caches, and not states alone.
bool attends(const Problem& problem) {
  return layers_read(problem, "slots");
}
bool has_states(const Problem& problem) {
  return layers_read(problem, "state_indices");
}

/// Layers of several kinds one after the other, whose tensors and stages are told by their numbers.
class Layers {
 public:
  explicit Layers(const Problem& problem)
      : parts_(parts_of(problem)),
        kinds_(kinds_in_order(problem)),
        repeated_(problem.sizes.contains("layers")),
        names_(kinds_, repeated_, has_own_angles(problem)) {}

  std::size_t count() const { return kinds_.size(); }
  std::size_t kind(std::size_t layer) const { return kinds_[layer]; }
  const OpPart& part(std::size_t layer) const { return parts_[kinds_[layer]]; }
  NameOf names(std::size_t layer) const {
    return [this, layer](const std::string& own) { return names_(layer, own); };
  }
  std::size_t stages(std::size_t layer) const {
    return layer_op().stages(part(layer).problem).size();
  }

  /// Tensors that layers share, in the order of their kinds, and then those of each layer.
  std::vector<TensorSpec> tensors() const {
    std::vector<TensorSpec> all;
    for (std::size_t kind = 0; kind <= *std::max_element(kinds_.begin(), kinds_.end()); ++kind) {
      const auto layer =
          static_cast<std::size_t>(std::find(kinds_.begin(), kinds_.end(), kind) - kinds_.begin());
      for (TensorSpec& tensor : tensors_of_part(part(layer), names(layer)))
        if (LayerNames::are_shared(tensor.name) && !find(all, tensor.name))
          all.push_back(std::move(tensor));
    }
    for (std::size_t layer = 0; layer < count(); ++layer)
      for (TensorSpec& tensor : tensors_of_part(part(layer), names(layer))) {
        const bool is_own = tensor.name == names_(layer, "y");
        if (LayerNames::are_shared(tensor.name) || (!is_own && find(all, tensor.name))) continue;
        if (is_own && tensor.name != "last_hidden") tensor.role = Role::intermediate;
        all.push_back(std::move(tensor));
      }
    return all;
  }

  std::vector<StageSpec> all_stages() const {
    std::vector<StageSpec> all;
    for (std::size_t layer = 0; layer < count(); ++layer)
      for (StageSpec stage : layer_op().stages(part(layer).problem)) {
        stage.name = repeated_ ? fmt::format("layers.{}.{}", layer, stage.name)
                               : part(layer).stage(stage.name);
        for (auto* list : {&stage.inputs, &stage.outputs})
          for (std::string& name : *list) name = names_(layer, name);
        all.push_back(std::move(stage));
      }
    return all;
  }

 private:
  static bool find(const std::vector<TensorSpec>& tensors, const std::string& name) {
    return find_tensor(tensors, name).has_value();
  }

  std::vector<OpPart> parts_;
  std::vector<std::size_t> kinds_;
  bool repeated_;
  LayerNames names_;
};

/// Ids of the test data, the same for every seed: no id twice if there are enough.
std::vector<std::int64_t> drawn_ids(std::int64_t batch, std::int64_t vocab) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(vocab));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(static_cast<std::uint64_t>(batch)));
  while (std::ssize(ids) < batch) ids.insert(ids.end(), ids.begin(), ids.begin() + vocab);
  ids.resize(static_cast<std::size_t>(batch));
  return ids;
}

/// Test data: sequences with keys as the layers' `lengths` have them, the new one among them; some
/// sequences have ended, and some end in this step.
class State {
 public:
  explicit State(const Problem& problem) : problem_(problem), limit_(sequences_of(problem).cache) {
    const auto parts = parts_of(problem);
    for (const std::size_t kind : kinds_in_order(problem))
      for (TensorSpec& tensor : layer_op().tensors(parts[kind].problem))
        if (!find_tensor(layer_, tensor.name)) layer_.push_back(std::move(tensor));
  }

  /// An int32 tensor whose values are value_of(sequence).
  template <typename ValueOf>
  TensorSpec tensor(const char* name, Role role, const ValueOf& value_of) const {
    TensorSpec tensor{name, DType::i32, {problem_.size("batch")}, role};
    tensor.draw = [value_of](std::uint64_t, std::span<double> values) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(i);
    };
    return tensor;
  }
  TensorSpec lengths() const {
    TensorSpec tensor{"lengths", DType::i32, {problem_.size("batch")}, Role::updated};
    const auto cached = find_tensor(layer_, "lengths");
    tensor.draw = [draw = cached ? layer_[*cached].draw : nullptr, limit = limit_](
                      std::uint64_t seed, std::span<double> values) {
      if (!draw) std::fill(values.begin(), values.end(), std::min(9.0, double(limit)));
      if (draw) draw(seed, values);
      for (double& value : values) --value;
    };
    return tensor;
  }
  TensorSpec embedding() const {
    const std::int64_t d = problem_.size("d"), vocab = problem_.size("vocab"),
                       batch = problem_.size("batch");
    TensorSpec tensor{"embedding", problem_.dtype, {vocab, d}, Role::input};
    tensor.read_share = std::min(1.0, static_cast<double>(batch) / static_cast<double>(vocab));
    // The rows that are read are such that a router chooses clearly.
    if (const auto& draw = spec("x").draw)
      tensor.draw = [=](std::uint64_t seed, std::span<double> values) {
        const auto ids = drawn_ids(batch, vocab);
        std::mt19937_64 random(seed);
        std::normal_distribution<double> normal;
        for (double& value : values) value = normal(random);
        std::vector<double> x(static_cast<std::size_t>(batch * d));
        draw(seed, x);
        for (std::size_t i = 0; i < ids.size(); ++i)
          std::copy_n(x.begin() + static_cast<std::ptrdiff_t>(i) * d, d,
                      values.begin() + static_cast<std::ptrdiff_t>(ids[i] * d));
      };
    return tensor;
  }
  /// An intermediate that the layers read.
  TensorSpec found(const std::string& name, const std::string& of_layer) const {
    TensorSpec tensor = spec(of_layer);
    tensor.name = name;
    tensor.role = Role::intermediate;
    tensor.draw = nullptr;
    return tensor;
  }

 private:
  const TensorSpec& spec(const std::string& name) const {
    return layer_[tensor_index(layer_, name)];
  }

  const Problem& problem_;
  std::int64_t limit_;
  std::vector<TensorSpec> layer_;
};

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const std::int64_t batch = problem.size("batch"), vocab = problem.size("vocab"),
                     stops = size_or(problem, "stops", 0);
  const State state(problem);
  const auto of_head = tensors_of_part(head_part(problem));
  std::vector<TensorSpec> inputs, outputs, intermediates;

  const IdChoice choice =
      of_head[tensor_index(of_head, slices_head(problem) ? "own_chosen" : "chosen")].choice;
  TensorSpec ids{"ids", DType::i32, {batch}, Role::updated};
  ids.draw = [batch, vocab](std::uint64_t, std::span<double> values) {
    const auto drawn = drawn_ids(batch, vocab);
    std::copy(drawn.begin(), drawn.end(), values.begin());
  };
  ids.choice = choice;
  inputs.push_back(std::move(ids));
  inputs.push_back(state.lengths());
  inputs.push_back(state.tensor("steps", Role::updated,
                                [](std::size_t i) { return static_cast<double>(i % 5); }));
  inputs.push_back(state.tensor("ended", Role::updated, [](std::size_t i) {
    return i % 4 == 2 ? static_cast<double>(1 + i % 8 / 4) : 0.0;
  }));
  inputs.back().of_choice = "ids";
  TensorSpec out{"out", DType::i32, {batch, sequences_of(problem).room}, Role::updated};
  out.draw = [](std::uint64_t, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 11);
  };
  out.of_choice = "ids";
  inputs.push_back(std::move(out));
  // Every third sequence has the keys for it.
  inputs.push_back(
      state.tensor("limits", Role::input, [](std::size_t i) { return i % 3 == 1 ? 1.0 : 0x1p30; }));
  if (stops > 0) {
    TensorSpec stop{"stop", DType::i32, {stops}, Role::input};
    stop.draw = [vocab](std::uint64_t, std::span<double> values) {
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<double>(static_cast<std::int64_t>(i * 3 + 1) % vocab);
    };
    inputs.push_back(std::move(stop));
  }
  inputs.push_back(state.embedding());
  intermediates.push_back(state.found("x", "x"));
  if (rotates(problem)) intermediates.push_back(state.found("positions", "positions"));
  if (attends(problem)) {
    intermediates.push_back(state.found("slots", "slots"));
    intermediates.push_back(state.found("key_lengths", "lengths"));
  }
  if (has_states(problem)) intermediates.push_back(state.found("state_indices", "state_indices"));

  const auto add = [&](const std::vector<TensorSpec>& tensors,
                       std::initializer_list<std::string_view> read_again) {
    for (TensorSpec tensor : tensors) {
      if (find_tensor(inputs, tensor.name) || find_tensor(intermediates, tensor.name)) continue;
      if (std::find(read_again.begin(), read_again.end(), tensor.name) != read_again.end())
        tensor.role = Role::intermediate;
      (tensor.role == Role::output         ? outputs
       : tensor.role == Role::intermediate ? intermediates
                                           : inputs)
          .push_back(std::move(tensor));
    }
  };
  add(kinds_of(problem) > 1 ? Layers(problem).tensors() : tensors_of_part(layer_part(problem)),
      {"last_hidden"});
  add(of_head, {"own_chosen", "own_logit"});
  if (slices_head(problem)) {
    auto best = tensors_of_part(parts_of(problem).back());
    best[tensor_index(best, "chosen")].choice = choice;
    best[tensor_index(best, "logit")].of_choice = "chosen";
    add(best, {});
  }
  for (auto* more : {&outputs, &intermediates})
    inputs.insert(inputs.end(), std::make_move_iterator(more->begin()),
                  std::make_move_iterator(more->end()));
  return inputs;
}

StageSpec own_stage(const Problem& problem, const char* name) {
  const bool embeds = name == std::string_view(stage_embed);
  StageSpec stage;
  stage.name = name;
  if (embeds) {
    stage.inputs = {"ids", "lengths", "ended", "embedding"};
    stage.outputs = {"x"};
    if (attends(problem)) {
      stage.outputs.insert(stage.outputs.end(), {"slots", "key_lengths"});
      if (problem.sizes.contains("page")) stage.inputs.emplace_back("pages");
    }
    if (rotates(problem)) stage.outputs.emplace_back("positions");
    stage.flops = static_cast<double>(problem.size("batch") * problem.size("d"));
    stage.bytes = 2 * stage.flops * static_cast<double>(dtype_bytes(problem.dtype));
  } else if (name == std::string_view(stage_states)) {
    stage.inputs = {"lengths", "ended"};
    stage.outputs = {"state_indices"};
    stage.bytes = 12 * static_cast<double>(problem.size("batch"));
  } else {
    stage.inputs = {"chosen", "ids", "lengths", "steps", "ended", "out", "limits"};
    stage.outputs = {"ids", "lengths", "steps", "ended", "out"};
    if (problem.sizes.contains("stops")) stage.inputs.emplace_back("stop");
    stage.bytes = 36 * static_cast<double>(problem.size("batch"));
  }
  return stage;
}

/// The stages in front of the layers.
std::vector<StageSpec> own_stages_in_front(const Problem& problem) {
  std::vector stages{own_stage(problem, stage_embed)};
  if (has_states(problem)) stages.push_back(own_stage(problem, stage_states));
  return stages;
}

/// Why layers have what a decode step does not give them, or tensors that all of them share are not
/// the same.
std::string contradiction_of_shared(const Problem& problem) {
  for (std::size_t kind = 0; kind < kinds_of(problem); ++kind) {
    const Problem layers = parts_of(problem)[kind].problem;
    if (layers.sizes.contains("input-h"))
      return fmt::format("input-h={}: a decode step has no inputs of its layers",
                         layers.size("input-h"));
    for (const auto& [name, usual] : {std::pair{"keys", "own"}, {"query-scale", "no"}})
      if (option_or(layers, name, usual) != usual)
        return fmt::format("{}={}: a decode step has layers that are alike, with keys of their own",
                           name, layers.option(name));
  }
  const bool own_angles = has_own_angles(problem);
  std::size_t rotating = 0;
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (std::size_t kind = 0; kind < kinds_of(problem); ++kind)
    for (const TensorSpec& tensor : layer_op().tensors(parts_of(problem)[kind].problem)) {
      if (!layer::is_shared(tensor.name)) continue;
      if (tensor.name == "angles" && own_angles) {
        ++rotating;
        continue;
      }
      const auto [known, is_new] = shapes.emplace(tensor.name, tensor.shape);
      if (known->second != tensor.shape)
        return fmt::format(
            "{} of {} has another shape than that of other layers: give all the same", tensor.name,
            kind_parts[kind]);
    }
  if (own_angles && rotating < 2)
    return fmt::format("angles-for=kinds: {} of the kinds of layers {} a table of angles", rotating,
                       rotating == 1 ? "has" : "have");
  return "";
}

/// The first kernel of the layers does not start before `embed` is complete: kernels behind it may
/// read lengths, slots and pages before they wait.
void launch_behind_embed(const Family& family, const Problem& problem, const DeviceFacts&,
                         Program& program) {
  const Problem one = unrepeated(decode_op(), problem);
  auto* const launch =
      program.steps.empty() ? nullptr : std::get_if<KernelLaunch>(&program.steps.front());
  if (launch != nullptr && !family.covers_repetition() &&
      family.stages().front() == decode_op().stages(one).at(own_stages_in_front(one).size()).name)
    launch->read_early.push_back({tensor_index(decode_op().tensors(one), "x")});
}

std::vector<SizeField> size_fields() {
  std::vector<SizeField> fields = layer_op().sizes();
  // Sequence i has state i.
  std::erase_if(fields,
                [](const SizeField& field) { return field.name == "s" || field.name == "states"; });
  for (SizeField& field : fields)
    if (field.name == "cache")
      field.help += ": there tokens that a sequence may have, any number if left out";
  for (const SizeField& field : head_op().sizes())
    if (field.name == "vocab" || field.name == "best") fields.push_back(field);
  fields.push_back(
      neutral(rare_size("stops", "ids that end a sequence; none if left out", 1024, 1)));
  fields.push_back(
      neutral(rare_size("room",
                        "ids of a sequence that `out` has room for; the cache's keys if left "
                        "out",
                        1 << 24, 256, same_as("cache"))));
  return fields;
}

std::vector<OptionField> option_fields() {
  std::vector<OptionField> fields = layer_op().options();
  std::erase_if(fields, [](const OptionField& field) {
    return field.name == "conv-indices" || field.name == "null-index";
  });
  for (OptionField& field : kind_options()) fields.push_back(std::move(field));
  for (OptionField field : head_op().options())
    for (const auto& [name, here] : head_options)
      if (field.name == name) {
        field.name = here;
        std::erase(field.choices, "none");
        if (field.name == "choose")
          field.help =
              "the best id; a sample by temperature; or filtered: a sample of the ids that top-k, "
              "top-p and min-p keep";
        fields.push_back(std::move(field));
        break;
      }
  fields.push_back(rare_option("head",
                               "with ranks, whether each has all rows of the head or, sliced, its "
                               "part of them",
                               {"whole", "sliced"}));
  fields.push_back(rare_number("embed-scale", "a factor of the embedding", "1", {-1e6, 1e6}));
  fields.push_back(rare_number("pad", "the id of a sequence that has ended", "0", {0, 0x1p31 - 1}));
  return fields;
}

OpFacts facts() {
  return {
      .name = "decode",
      .summary =
          "one token of a language model: embedding, layers, head, the next ids, and the state of "
          "the sequences",
      .passes = {"fwd"},
      .sizes = size_fields(),
      .options = option_fields(),
      .token_size = "batch",
      .rows_are_alike = false,
      .sharded_sizes = layer::sharded_sizes(),
      .known_models = known_models,
      .families = {cuda_families, cpu_families}};
}

class Decode final : public DescribedOp {
 public:
  Decode() : DescribedOp(facts()) {}

  std::string contradiction(const Problem& problem) const override {
    if (auto reason = contradiction_of_kinds(problem); !reason.empty()) return reason;
    if (!problem.sizes.contains("cache") && !problem.sizes.contains("room"))
      return "room without cache: give the ids of a sequence that `out` has room for";
    const double pad = number_or_default(decode_op(), problem, "pad");
    if (pad != static_cast<double>(static_cast<std::int32_t>(pad)))
      return "pad=" + problem.option("pad") + " is no id: give a whole number";
    if (slices_head(problem)) {
      const std::int64_t ranks = size_or(problem, "ranks", 0);
      if (ranks == 0) return "head=sliced without ranks: give the ranks of the group";
      if (problem.size("vocab") % ranks != 0)
        return fmt::format("head=sliced: {} ranks do not divide vocab={}", ranks,
                           problem.size("vocab"));
      if (problem.sizes.contains("best"))
        return fmt::format("head=sliced with best={}: a rank knows the best ids of its slice alone",
                           problem.size("best"));
      for (const auto& [name, value] : {std::pair{"choose", "argmax"}, {"logprobs", "no"}})
        if (option_or(problem, name, value) != value)
          return fmt::format("head=sliced with {}={}: a draw needs all logits", name,
                             problem.option(name));
    }
    if (auto reason = contradiction_of_parts(problem, parts_of); !reason.empty()) return reason;
    return contradiction_of_shared(problem);
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return *tensors_.of(problem, [&] { return tensors_of(problem); });
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
    return *stages_.of(problem, [&] {
      auto stages = own_stages_in_front(problem);
      auto parts = parts_of(problem);
      if (kinds_of(problem) > 1) {
        append(stages, Layers(problem).all_stages());
        parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(kinds_of(problem)));
      }
      append(stages, stages_of_parts(parts));
      stages.push_back(own_stage(problem, stage_advance));
      return stages;
    });
  }
  void reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    if (stage == 0) return define_embed(problem, tensors);
    const std::size_t in_front = own_stages_in_front(problem).size();
    if (stage < in_front) return define_states(problem, tensors);
    stage -= in_front;
    auto parts = parts_of(problem);
    if (const std::size_t kinds = kinds_of(problem); kinds > 1) {
      const Layers layers(problem);
      for (std::size_t layer = 0; layer < layers.count(); ++layer) {
        if (const std::size_t count = layers.stages(layer); stage >= count) {
          stage -= count;
          continue;
        }
        return reference_of_part(layers.part(layer), stage, tensors, parallel, layers.names(layer));
      }
      parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(kinds));
    }
    if (!reference_of_parts(parts, stage, tensors, parallel)) define_advance(problem, tensors);
  }
  std::vector<OpPart> parts(const Problem& problem) const override { return parts_of(problem); }

  /// That of the layers. In each time, the tensors that are not theirs are the same.
  std::optional<Repetition> repetition(const Problem& problem) const override {
    if (!problem.sizes.contains("layers")) return std::nullopt;
    return *repetitions_.of(problem, [&] { return repetition_of(problem); });
  }

  std::vector<const Family*> families() const override {
    std::vector<const Family*> list = persistent_tokens();
    for (const Family* family : DescribedOp::families()) list.push_back(family);
    static const auto families = [] {
      std::deque<PartFamily> all;
      std::vector<std::pair<const char*, const Op& (*)()>> parts{{"head", &head_op},
                                                                 {"argmax", &all_argmax_op}};
      for (std::size_t kind = most_kinds; kind-- > 0;)
        parts.insert(parts.begin(), {kind_parts[kind], &layer_op});
      for (const auto& [name, op] : parts)
        for (const Family* family : op().families())
          all.emplace_back(decode_op, name, *family, launch_behind_embed);
      return all;
    }();
    for (const PartFamily& family : families) list.push_back(&family);
    return list;
  }

 private:
  static Repetition repetition_of(const Problem& problem) {
    if (kinds_of(problem) > 1) return repetition_of_kinds(problem);
    Repetition repetition{problem, {}};
    repetition.one.sizes.erase("layers");
    const OpPart all = layer_part(problem), one = layer_part(repetition.one);
    const auto layers = layer_op().repetition(all.problem);
    const auto of_all = layer_op().tensors(all.problem), of_one = layer_op().tensors(one.problem);
    std::map<std::string, std::size_t> whole;
    for (const TensorSpec& tensor : decode_op().tensors(problem))
      whole.emplace(tensor.name, whole.size());
    const auto tensors = decode_op().tensors(repetition.one);
    for (const auto& places : layers->places) {
      std::map<std::string, std::string> names;
      for (std::size_t i = 0; i < of_one.size(); ++i)
        names[one.tensor(of_one[i].name)] = all.tensor(of_all[places[i]].name);
      auto& time = repetition.places.emplace_back();
      for (const TensorSpec& tensor : tensors) {
        const auto renamed = names.find(tensor.name);
        time.push_back(whole.at(renamed == names.end() ? tensor.name : renamed->second));
      }
    }
    repetition.first = own_stages_in_front(problem).size();
    repetition.end = repetition.first + layer_op().stages(one.problem).size();
    return repetition;
  }

  /// One layer of each kind, and at every time one of them.
  static Repetition repetition_of_kinds(const Problem& problem) {
    Repetition repetition{problem, {}};
    repetition.one.sizes.erase("layers");
    repetition.one.options.erase("pattern");
    const Layers all(problem), one(repetition.one);
    std::map<std::string, std::size_t> whole;
    for (const TensorSpec& tensor : decode_op().tensors(problem))
      whole.emplace(tensor.name, whole.size());
    const auto tensors = decode_op().tensors(repetition.one);
    // A time has the tensors of its kind, and those that are none of the layers.
    std::set<std::string> of_layers;
    for (std::size_t kind = 0; kind < one.count(); ++kind)
      for (const TensorSpec& tensor : layer_op().tensors(one.part(kind).problem))
        if (!layer::is_shared(tensor.name) || tensor.name == "x")
          of_layers.insert(one.names(kind)(tensor.name));
    of_layers.erase("x");
    of_layers.erase("last_hidden");
    for (std::size_t layer = 0; layer < all.count(); ++layer) {
      std::map<std::string, std::string> names;
      for (const TensorSpec& tensor : layer_op().tensors(all.part(layer).problem))
        names[one.names(all.kind(layer))(tensor.name)] = all.names(layer)(tensor.name);
      auto& time = repetition.places.emplace_back();
      for (const TensorSpec& tensor : tensors)
        if (const auto renamed = names.find(tensor.name); renamed != names.end())
          time.push_back(whole.at(renamed->second));
        else
          time.push_back(of_layers.contains(tensor.name) ? nowhere : whole.at(tensor.name));
    }
    repetition.first = own_stages_in_front(problem).size();
    repetition.end = repetition.first;
    for (std::size_t kind = 0; kind < one.count(); ++kind) repetition.end += one.stages(kind);
    return repetition;
  }

  mutable OfLastProblems<std::vector<TensorSpec>> tensors_;
  mutable OfLastProblems<std::vector<StageSpec>> stages_;
  mutable OfLastProblems<Repetition> repetitions_;
};

}  // namespace

Sequences sequences_of(const Problem& problem) {
  const std::int64_t batch = problem.size("batch"),
                     cache = size_or(problem, "cache", std::numeric_limits<std::int32_t>::max()),
                     page = attends(problem) ? size_or(problem, "page", 0) : 0;
  return {.dtype = problem.dtype,
          .batch = batch,
          .d = problem.size("d"),
          .vocab = problem.size("vocab"),
          .cache = cache,
          .rows = page > 0 ? layer::pages_of(problem) * page : batch * cache,
          .page = page,
          .table = page > 0 ? (cache + page - 1) / page : 0,
          .stops = size_or(problem, "stops", 0),
          .room = size_or(problem, "room", cache),
          .pad = static_cast<std::int32_t>(number_or_default(decode_op(), problem, "pad")),
          .scale = static_cast<float>(number_or_default(decode_op(), problem, "embed-scale"))};
}

TensorPlaces places_of(const Problem& problem) {
  return TensorPlaces(decode_op().tensors(unrepeated(decode_op(), problem)));
}

}  // namespace fftune::decoding

const fftune::Op& fftune::decode_op() {
  static const decoding::Decode op;
  return op;
}
