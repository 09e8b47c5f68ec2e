// The op decode: its buffers, its refusals, its stages against the float64 reference, and that n
// runs of it are n times embedding, layers, head, and what the host would do with the ids.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.hpp"  // its names come before those of device headers
#include "core/error.hpp"
#include "device/backend.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/head/head.hpp"
#include "kernels/layer/persistent.cuh"
#include "layer/problems.hpp"
#include "registry/part_family.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "store/example.hpp"
#include "store/preset_file.hpp"
#include "support/error_of.hpp"
#include "support/op_reference.hpp"
#include "support/temporary_folder.hpp"
#include "support/verify_plan.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Names = std::vector<std::string>;

Problem decode_problem(DeviceKind kind, DType dtype, Sizes sizes, Options options = {}) {
  return canonical(decode_op(), {"decode", "fwd", dtype, std::move(sizes), std::move(options)},
                   kind);
}

Problem problem_of(const SmallModel& model, DeviceKind kind, DType dtype, Sizes sizes,
                   Options options = {}) {
  sizes.insert(model.sizes.begin(), model.sizes.end());
  sizes.insert({"vocab", 96});
  options.insert(model.options.begin(), model.options.end());
  return decode_problem(kind, dtype, std::move(sizes), std::move(options));
}

Problem small_llama(DeviceKind kind, Sizes more, Options options = {}) {
  return problem_of(small_models().front(), kind,
                    kind == DeviceKind::cpu ? DType::f32 : DType::bf16, std::move(more),
                    std::move(options));
}

Names names_of(const Problem& problem) {
  Names names;
  for (const auto& tensor : decode_op().tensors(problem))
    if (tensor.role != Role::intermediate) names.push_back(tensor.name);
  return names;
}

std::string complaint(const Sizes& more, const Options& options = {}) {
  return error_of([&] { small_llama(DeviceKind::cuda, more, options); });
}

/// How ids are chosen, and where keys are.
struct Use {
  Sizes sizes;
  Options options;
};
std::vector<Use> uses() {
  return {{{{"batch", 1}, {"cache", 33}}, {}},
          {{{"batch", 7}, {"cache", 20}, {"stops", 30}, {"room", 3}},
           {{"lengths", "ragged"}, {"choose", "sample"}, {"pad", "5"}, {"embed-scale", "8.5"}}},
          {{{"batch", 5}, {"cache", 70}, {"page", 16}, {"stops", 2}},
           {{"lengths", "ragged"}, {"choose", "filtered"}, {"logprobs", "yes"}}},
          {{{"batch", 2}, {"cache", 20}},
           {{"head-weights", "int4"}, {"head-group", "row"}, {"head-zeros", "yes"}}}};
}
/// A rank's slices: of the layers, and of the head too.
std::vector<Use> uses_of_ranks() {
  return {{{{"batch", 3}, {"cache", 33}, {"ranks", 2}, {"stops", 2}}, {{"head", "sliced"}}},
          {{{"batch", 1}, {"cache", 20}, {"ranks", 3}}, {{"choose", "sample"}}}};
}

/// Plans of one layer and of three.
void verify_plans(Backend& backend, const SmallModel& model, DType dtype,
                  const std::vector<Use>& all) {
  for (const Use& use : all)
    for (const std::int64_t layers : {1, 3}) {
      Sizes sizes = use.sizes;
      if (layers > 1) sizes["layers"] = layers;
      verify_plan(backend, decode_op(),
                  problem_of(model, backend.facts().kind, dtype, sizes, use.options), 1);
    }
}

bool is_no_part(const Family& family) {
  return dynamic_cast<const PartFamily*>(&family) == nullptr;
}

void verify_model(Backend& backend, const SmallModel& model, DType dtype, int more,
                  const std::vector<Use>& all = uses()) {
  const DeviceKind kind = backend.facts().kind;
  std::mt19937_64 random(1);
  for (const Use& use : all) {
    CAPTURE(model.name);
    const Problem problem = problem_of(model, kind, dtype, use.sizes, use.options);
    CHECK(verify_variants(backend, decode_op(), problem, random, more) > 0);
  }
  verify_plans(backend, model, dtype, all);
}

// ---- steps one by one ---------------------------------------------------------------------------

using Ints = std::vector<std::int32_t>;

/// Device memory for tensors by name, with their test data.
class Memory {
 public:
  Memory(Backend& backend, const std::vector<TensorSpec>& tensors) : backend_(backend) {
    std::mt19937_64 random(3);
    for (const TensorSpec& spec : tensors) {
      const std::vector<std::byte> bytes = drawn_bytes(spec, random);
      write(spec.name, bytes);
    }
  }

  void write(const std::string& name, const std::vector<std::byte>& bytes) {
    auto& buffer = buffers_[name];
    if (!buffer || buffer->bytes() != bytes.size()) buffer = backend_.allocate(bytes.size());
    backend_.write(buffer->data(), bytes.data(), bytes.size());
  }
  void write(const std::string& name, const Ints& values) {
    std::vector<std::byte> bytes(values.size() * sizeof values[0]);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    write(name, bytes);
  }
  std::vector<std::byte> read(const std::string& name) const {
    std::vector<std::byte> bytes(buffers_.at(name)->bytes());
    backend_.read(bytes.data(), buffers_.at(name)->data(), bytes.size());
    return bytes;
  }
  Ints ints(const std::string& name) const {
    const auto bytes = read(name);
    Ints values(bytes.size() / sizeof(std::int32_t));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  /// Runs a plan on the memory of its buffers' names; memory that is not there yet is made.
  void run(const Plan& plan, const std::function<std::string(const std::string&)>& name_of) {
    std::vector<void*> addresses;
    for (std::size_t i = 0; i < plan.buffer_count(); ++i) {
      auto& buffer = buffers_[name_of(plan.tensors()[i].name)];
      if (!buffer) buffer = backend_.allocate(plan.tensors()[i].bytes());
      addresses.push_back(buffer->data());
    }
    const auto workspace = backend_.allocate(std::max<std::size_t>(plan.workspace_bytes(), 256));
    backend_.fill(workspace->data(), 0xff, workspace->bytes());
    plan.run(addresses.data(), workspace->data(), backend_.stream());
    backend_.synchronize();
  }

 private:
  Backend& backend_;
  std::map<std::string, std::unique_ptr<Buffer>> buffers_;
};

Plan plan_of(Backend& backend, const Op& op, const Problem& problem) {
  return {backend, op, problem, default_recipe(op, problem, backend.facts())};
}

/// A step by plans of layers and head, with the host in between.
class Apart {
 public:
  Apart(Backend& backend, const Problem& problem)
      : problem_(problem),
        parts_(decode_op().parts(problem)),
        layers_(plan_of(backend, layer_op(), parts_[0].problem)),
        head_(plan_of(backend, head_op(), parts_[1].problem)) {}

  void step(Memory& memory) const {
    embed(memory);
    memory.run(layers_, [&](const std::string& name) { return parts_[0].tensor(name); });
    memory.run(head_, [&](const std::string& name) { return parts_[1].tensor(name); });
    append(memory);
  }

 private:
  std::int64_t size(const char* name, std::int64_t otherwise = 0) const {
    return size_or(problem_, name, otherwise);
  }
  bool goes_on(const Memory& memory, std::size_t i) const {
    return memory.ints("ended")[i] == 0 && memory.ints("lengths")[i] < size("cache");
  }

  void embed(Memory& memory) const {
    const auto batch = static_cast<std::size_t>(size("batch")),
               row = static_cast<std::size_t>(size("d")) * dtype_bytes(problem_.dtype);
    const std::int64_t cache = size("cache"), page = size("page");
    const auto embedding = memory.read("embedding");
    const Ints ids = memory.ints("ids"), lengths = memory.ints("lengths"),
               pages = page > 0 ? memory.ints("pages") : Ints{};
    std::vector<std::byte> x;
    Ints positions, slots, keys;
    for (std::size_t i = 0; i < batch; ++i) {
      const auto at = embedding.begin() + static_cast<std::ptrdiff_t>(row) * ids[i];
      x.insert(x.end(), at, at + static_cast<std::ptrdiff_t>(row));
      const bool alive = goes_on(memory, i);
      const std::int32_t place = alive ? lengths[i] : std::max(lengths[i], 1) - 1;
      positions.push_back(place);
      keys.push_back(place + 1);
      const auto width = static_cast<std::size_t>(page > 0 ? (cache + page - 1) / page : 0);
      const std::int64_t slot =
          page > 0 ? pages[i * width + static_cast<std::size_t>(place / page)] * page + place % page
                   : static_cast<std::int64_t>(i) * cache + place;
      slots.push_back(alive ? static_cast<std::int32_t>(slot) : -1);
    }
    memory.write("x", x);
    memory.write("positions", positions);
    memory.write("slots", slots);
    memory.write("key_lengths", keys);
  }

  void append(Memory& memory) const {
    Ints ids = memory.ints("ids"), lengths = memory.ints("lengths"), steps = memory.ints("steps"),
         ended = memory.ints("ended"), out = memory.ints("out");
    const Ints chosen = memory.ints("chosen"), limits = memory.ints("limits"),
               stop = size("stops") > 0 ? memory.ints("stop") : Ints{};
    const auto room = static_cast<std::size_t>(size("room", size("cache")));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (!goes_on(memory, i)) {
        ids[i] = std::stoi(option_or(problem_, "pad", "0"));
        ended[i] = std::max(ended[i], ended[i] == 0 ? 2 : 0);
        continue;
      }
      ids[i] = chosen[i];
      if (static_cast<std::size_t>(steps[i]) < room)
        out[i * room + static_cast<std::size_t>(steps[i])] = chosen[i];
      ++steps[i];
      ++lengths[i];
      if (lengths[i] == size("cache") || lengths[i] + 1 >= limits[i]) ended[i] = 2;
      if (std::count(stop.begin(), stop.end(), chosen[i])) ended[i] = 1;
    }
    memory.write("ids", ids);
    memory.write("lengths", lengths);
    memory.write("steps", steps);
    memory.write("ended", ended);
    memory.write("out", out);
  }

  Problem problem_;
  std::vector<OpPart> parts_;
  Plan layers_, head_;
};

std::vector<TensorSpec> buffers_of(const Plan& plan) {
  return {plan.tensors().begin(),
          plan.tensors().begin() + static_cast<std::ptrdiff_t>(plan.buffer_count())};
}

/// A state in which every sequence goes on, with few keys.
void begin(Memory& memory, std::int64_t batch, std::int64_t stops) {
  Ints lengths, limits;
  for (std::int32_t i = 0; i < batch; ++i) {
    lengths.push_back(3 * i % 7);
    limits.push_back(i % 3 == 1 ? lengths.back() + 4 + i : 1000);
  }
  const auto count = static_cast<std::size_t>(batch);
  memory.write("lengths", lengths);
  memory.write("limits", limits);
  memory.write("steps", Ints(count, 0));
  memory.write("ended", Ints(count, 0));
  if (stops > 0) memory.write("stop", Ints(static_cast<std::size_t>(stops), -1));
}

std::string own_name(const std::string& name) {
  return name;
}

void run_steps(const Plan& plan, Memory& memory, int steps) {
  for (int i = 0; i < steps; ++i) memory.run(plan, own_name);
}

/// Bit by bit, n runs are n steps by the parts. Sequences meet the stop id at different steps.
void compare_with_parts(Backend& backend, const Problem& problem) {
  CAPTURE(problem.text());
  constexpr int steps = 9;
  const Plan plan = plan_of(backend, decode_op(), problem);
  const Apart parts(backend, problem);
  const std::int64_t batch = problem.size("batch"), stops = size_or(problem, "stops", 0),
                     room = size_or(problem, "room", problem.size("cache"));
  Memory free(backend, buffers_of(plan));
  begin(free, batch, stops);
  run_steps(plan, free, steps);
  const Ints chosen = free.ints("out");

  Memory together(backend, buffers_of(plan)), apart(backend, buffers_of(plan));
  for (Memory* memory : {&together, &apart}) {
    begin(*memory, batch, stops);
    if (stops > 0) {
      Ints stop(static_cast<std::size_t>(stops), -1);
      stop[0] = chosen[2];
      memory->write("stop", stop);
    }
  }
  for (int step = 0; step < steps; ++step) {
    together.run(plan, own_name);
    parts.step(apart);
    for (const TensorSpec& spec : buffers_of(plan)) {
      CAPTURE(step, spec.name);
      CHECK((together.read(spec.name) == apart.read(spec.name)));
    }
  }
  const Ints ended = together.ints("ended"), counts = together.ints("steps");
  if (stops > 0) {
    CHECK(ended[0] == 1);
    CHECK(counts[0] <= 3);
    CHECK(together.ints("ids")[0] == std::stoi(option_or(problem, "pad", "0")));
    CHECK(together.ints("lengths")[0] == counts[0]);
    // Those behind the end are as they were.
    const Ints out = together.ints("out"), drawn = Memory(backend, buffers_of(plan)).ints("out");
    for (std::int32_t i = counts[0]; i < room; ++i)
      CHECK(out[static_cast<std::size_t>(i)] == drawn[static_cast<std::size_t>(i)]);
  }
  if (batch > 1 && ended[1] == 2) CHECK(counts[1] == 4);
}

/// Two models in every use, alone and in three layers.
void compare_models_with_parts(Backend& backend) {
  for (const std::size_t model : {std::size_t{0}, std::size_t{2}})
    for (const Use& use : uses()) {
      Sizes sizes = use.sizes;
      Options options = use.options;
      options.erase("embed-scale");
      for (const std::int64_t layers : {0, 3}) {
        if (layers > 0) sizes["layers"] = layers;
        compare_with_parts(backend, problem_of(small_models()[model], backend.facts().kind,
                                               DType::bf16, sizes, options));
      }
    }
}

}  // namespace

TEST_CASE("decode's buffers are in the order that the API promises") {
  const Names state{"ids", "lengths", "steps", "ended", "out", "limits"};
  const Names layer{"attn_norm", "w_q",      "w_k",    "w_v",  "k_cache", "v_cache",
                    "w_o",       "ffn_norm", "w_gate", "w_up", "w_down"};
  Names one = state;
  one.emplace_back("embedding");
  one.insert(one.end(), layer.begin(), layer.end());
  Names two = state;
  two.emplace_back("stop");
  two.emplace_back("embedding");
  two.emplace_back("pages");
  for (const char* at : {"layers.0.", "layers.1."})
    for (const std::string& name : layer) two.push_back(at + name);
  for (Names* names : {&one, &two}) {
    names->emplace_back("final_norm");
    names->emplace_back("w_head");
  }
  for (const char* name : {"temperature", "seeds"}) two.emplace_back(name);
  for (const char* name : {"chosen", "logit"}) one.emplace_back(name), two.emplace_back(name);
  two.emplace_back("logprob");
  const Sizes sizes{{"batch", 2}, {"cache", 32}};
  CHECK(names_of(small_llama(DeviceKind::cuda, sizes)) == one);
  CHECK(
      names_of(small_llama(DeviceKind::cuda,
                           {{"batch", 2}, {"cache", 32}, {"layers", 2}, {"page", 16}, {"stops", 1}},
                           {{"choose", "sample"}, {"logprobs", "yes"}})) == two);
}

TEST_CASE("decode refuses fields that do not go together, and those that it has not") {
  const Sizes sizes{{"batch", 2}, {"cache", 32}};
  const auto with = [&](const char* name, std::int64_t value) {
    Sizes more = sizes;
    more[name] = value;
    return more;
  };
  CHECK(complaint(sizes) == "");
  CHECK(complaint(sizes, {{"pad", "1.5"}}).find("pad=1.5 is no id") != std::string::npos);
  CHECK(complaint(sizes, {{"choose", "none"}}).find("choose") != std::string::npos);
  CHECK(complaint(with("s", 3)).find("'s'") != std::string::npos);
  CHECK(complaint(with("pages", 3)).find("pages without page") != std::string::npos);
  CHECK(complaint(with("experts", 8)).find("experts=8 is of ffn=moe") != std::string::npos);
  CHECK(complaint(with("input-h", 8)).find("no inputs of its layers") != std::string::npos);
  CHECK(complaint(sizes, {{"query-scale", "rows"}}).find("layers that are alike") !=
        std::string::npos);
  const auto of_ranks = [&](std::int64_t ranks, Options options) {
    options["head"] = "sliced";
    return complaint(ranks > 0 ? with("ranks", ranks) : sizes, options);
  };
  CHECK(of_ranks(2, {}) == "");
  CHECK(of_ranks(0, {}).find("head=sliced without ranks") != std::string::npos);
  CHECK(of_ranks(5, {}).find("5 ranks do not divide vocab=96") != std::string::npos);
  CHECK(of_ranks(2, {{"choose", "sample"}}).find("a draw needs all logits") != std::string::npos);
  CHECK(complaint({{"batch", 2}, {"cache", 32}, {"ranks", 2}, {"best", 4}}, {{"head", "sliced"}})
            .find("head=sliced with best=4") != std::string::npos);
}

namespace {

/// Layers of attention between layers of other mixers.
struct Hybrid {
  const char* name;
  Sizes sizes;
  Options options;
};

std::vector<Hybrid> hybrids() {
  const Sizes attention{{"d", 64},   {"h", 96},     {"heads", 4}, {"kv-heads", 2},
                        {"dim", 16}, {"cache", 20}, {"vocab", 96}};
  const Sizes latent{{"d", 64},    {"h", 96},    {"heads", 2},  {"nope", 16}, {"rope", 8},
                     {"v-dim", 8}, {"rank", 32}, {"cache", 20}, {"vocab", 96}};
  Sizes both = attention;
  both.insert(
      {{"ssm-heads", 6}, {"ssm-dim", 8}, {"state-dim", 16}, {"state-groups", 2}, {"width", 4}});
  const Sizes states{{"d", 64},    {"h", 96},   {"heads", 4}, {"dim", 16},
                     {"width", 3}, {"room", 5}, {"vocab", 96}};
  return {
      {"lfm2", attention, {{"layers-b", "conv:dim=16,h=96,heads=4,width=3"}, {"pattern", "bba"}}},
      {"qwen3.5",
       attention,
       {{"layers-b",
         "gated-delta-rule:convention=gemma,dim=8,h=80,heads=2,qkv-weights=packed,v-dim=16,"
         "v-heads=4,width=4"},
        {"convention", "gemma"},
        {"output-gate", "q-rows"},
        {"choose", "sample"},
        {"lengths", "ragged"}}},
      {"gemma 4",
       attention,
       {{"layers-b",
         "attention:angles=table,dim=32,h=96,heads=2,kv-heads=1,rotary=16,positions=20"},
        {"angles", "table"},
        {"angles-for", "kinds"},
        {"pattern", "aab"}}},
      {"bamba",
       attention,
       {{"layers-b", "ssd:conv-bias=yes,dim=16,h=96,heads=4,state-dim=16,state-groups=2,width=4"},
        {"pattern", "bab"}}},
      {"kimi",
       latent,
       {{"mixer", "mla"},
        {"layers-b", "kda:dim=8,h=96,heads=2,qkv-weights=packed,v-dim=8,width=4"},
        {"layers-c", "kda:dim=8,h=64,heads=2,qkv-weights=packed,v-dim=8,width=4"},
        {"pattern", "cba"},
        {"lengths", "ragged"}}},
      {"deepseek", latent, {{"mixer", "mla"}}},
      {"states alone", states, {{"mixer", "conv"}}},
      {"qwen3-next",
       attention,
       {{"layers-b",
         "gated-delta-rule:dim=8,h=80,heads=2,qkv-weights=grouped,v-dim=16,v-heads=4,width=4"},
        {"pattern", "bba"}}},
      {"falcon-h1",
       both,
       {{"mixer", "attention-ssd"},
        {"conv-bias", "yes"},
        {"mixer-norm", "none"},
        {"residual-scale", "each"},
        {"lengths", "ragged"}}}};
}

Problem hybrid_problem(const Hybrid& hybrid, DeviceKind kind, std::int64_t batch,
                       std::int64_t layers, bool paged = false) {
  Sizes sizes = hybrid.sizes;
  Options options = hybrid.options;
  sizes["batch"] = batch;
  if (layers > 0) sizes["layers"] = layers;
  if (paged) sizes["page"] = 16;
  if (layers == 0) options.erase("pattern");
  if (layers > 0 && options.contains("layers-b") && !options.contains("pattern"))
    options["pattern"] = "bbba";
  return decode_problem(kind, kind == DeviceKind::cpu ? DType::f32 : DType::bf16, std::move(sizes),
                        std::move(options));
}

std::string hybrid_complaint(const Sizes& more, const Options& options) {
  return error_of([&] {
    Sizes sizes = more;
    sizes.insert({"batch", 2});
    const auto first = hybrids().front().sizes;
    sizes.insert(first.begin(), first.end());
    decode_problem(DeviceKind::cpu, DType::f32, sizes, options);
  });
}

}  // namespace

TEST_CASE("decode: layers of several kinds are named and repeated in the order of the pattern") {
  const Problem problem = hybrid_problem(hybrids().front(), DeviceKind::cpu, 2, 4);
  CHECK(problem.option("layers-b") == "conv:dim=16,h=96,heads=4,width=3");
  const Names names = names_of(problem);
  const Names conv{"attn_norm", "w_in",   "w_conv", "conv_state", "w_o",
                   "ffn_norm",  "w_gate", "w_up",   "w_down"};
  const Names attention{"attn_norm", "w_q",      "w_k",    "w_v",  "k_cache", "v_cache",
                        "w_o",       "ffn_norm", "w_gate", "w_up", "w_down"};
  Names expected{"ids", "lengths", "steps", "ended", "out", "limits", "embedding"};
  for (const auto& [at, own] : {std::pair{"layers.0.", conv},
                                {"layers.1.", conv},
                                {"layers.2.", attention},
                                {"layers.3.", conv}})
    for (const std::string& name : own) expected.push_back(at + name);
  for (const char* name : {"final_norm", "w_head", "chosen", "logit"}) expected.emplace_back(name);
  CHECK(names == expected);
  const auto repetition = decode_op().repetition(problem);
  REQUIRE(repetition);
  CHECK_FALSE(repetition->one.options.contains("pattern"));
  CHECK(repetition->places.size() == 4);
  // A time has the tensors of its kind alone.
  const auto one = decode_op().tensors(repetition->one), all = decode_op().tensors(problem);
  for (std::size_t layer = 0; layer < 4; ++layer) {
    CAPTURE(layer);
    const auto& places = repetition->places[layer];
    const bool attends = layer == 2;
    CHECK((places[tensor_index(one, "w_q")] == nowhere) != attends);
    CHECK((places[tensor_index(one, "b.w_in")] == nowhere) == attends);
    CHECK(places[tensor_index(one, attends ? "y" : "last_hidden")] ==
          tensor_index(all, layer == 3 ? "last_hidden" : "layers." + std::to_string(layer) + ".y"));
  }
}

TEST_CASE("decode: kinds of layers have angles of their own, or the same") {
  for (const char* of : {"all", "kinds"}) {
    CAPTURE(of);
    const bool own = of == std::string_view("kinds");
    Hybrid hybrid = hybrids()[2];
    hybrid.options["angles-for"] = of;
    if (!own) hybrid.options["layers-b"] = "attention:angles=table,dim=16,h=96,heads=4,kv-heads=2";
    const Problem problem = hybrid_problem(hybrid, DeviceKind::cpu, 2, 6, true);
    const Names names = names_of(problem);
    const auto place = [&](const char* name) {
      return std::find(names.begin(), names.end(), name) - names.begin();
    };
    CHECK(place("angles") < place("pages"));
    CHECK((place("b.angles") == place("pages") + 1) == own);
    CHECK((place("b.angles") == std::ssize(names)) != own);
    const auto repetition = decode_op().repetition(problem);
    REQUIRE(repetition);
    const auto one = decode_op().tensors(repetition->one), all = decode_op().tensors(problem);
    for (const auto& places : repetition->places)
      for (const char* name : {"angles", "b.angles"})
        if (find_tensor(one, name))
          CHECK(places[tensor_index(one, name)] == tensor_index(all, name));
  }
}

TEST_CASE("decode refuses kinds of layers that do not go together") {
  const std::string conv = "conv:dim=16,h=96,heads=4,width=3";
  const auto says = [](const std::string& text, const char* part) {
    CAPTURE(text, part);
    CHECK(text.find(part) != std::string::npos);
  };
  CHECK(hybrid_complaint({{"layers", 2}}, {{"layers-b", conv}, {"pattern", "ab"}}) == "");
  // The order of the fields is no matter.
  CHECK(hybrid_complaint({}, {{"layers-b", "conv:width=3,heads=4,h=96,dim=16"}}) == "");
  says(hybrid_complaint({{"layers", 2}}, {{"layers-b", conv}}),
       "none of the 2 layers is of kind b");
  says(hybrid_complaint({{"layers", 2}}, {{"layers-b", conv}, {"pattern", "abc"}}),
       "give letters from a to b");
  says(hybrid_complaint({{"layers", 2}}, {{"pattern", "ab"}}), "pattern=ab without layers-b");
  says(hybrid_complaint({}, {{"layers-b", conv}, {"pattern", "ab"}}), "pattern=ab without layers");
  says(hybrid_complaint({}, {{"layers-c", conv}}), "layers-c without layers-b");
  says(hybrid_complaint({{"ranks", 2}}, {{"layers-b", conv}}), "ranks=2 with layers-b");
  says(hybrid_complaint({}, {{"layers-b", "conv"}}), "is no kind of layers");
  says(hybrid_complaint({}, {{"layers-b", "conv:dim"}}), "'dim' is no field");
  says(hybrid_complaint({}, {{"layers-b", conv + ",cache=3"}}), "cache is that of all layers");
  says(hybrid_complaint({}, {{"layers-b", conv + ",s=3"}}), "no s");
  says(hybrid_complaint({}, {{"layers-b", conv + ",dim=4"}}), "dim is given twice");
  says(hybrid_complaint({}, {{"layers-b", "conv:dim=16,h=96,heads=4"}}), "width");
  says(hybrid_complaint({}, {{"layers-b", conv + ",kv-heads=2"}}), "kv-heads=2 is of");
  const std::string wide = "attention:angles=table,dim=32,h=96,heads=2";
  says(hybrid_complaint({}, {{"layers-b", wide}, {"angles", "table"}}),
       "angles of layers-b has another shape");
  CHECK(hybrid_complaint({}, {{"layers-b", wide}, {"angles", "table"}, {"angles-for", "kinds"}}) ==
        "");
  says(hybrid_complaint({}, {{"layers-b", wide}, {"angles-for", "kinds"}}),
       "angles-for=kinds: 1 of the kinds of layers has a table of angles");
  says(hybrid_complaint({}, {{"angles", "table"}, {"angles-for", "kinds"}}),
       "angles-for=kinds without layers-b");
  says(error_of([] {
         decode_problem(DeviceKind::cpu, DType::f32,
                        {{"batch", 1},
                         {"d", 8},
                         {"h", 8},
                         {"heads", 1},
                         {"dim", 8},
                         {"width", 2},
                         {"vocab", 9}},
                        {{"mixer", "conv"}});
       }),
       "room without cache");
}

TEST_CASE("decode: layers of several kinds are right on the CPU, one of each and by a pattern") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  std::mt19937_64 random(1);
  for (const Hybrid& hybrid : hybrids()) {
    CAPTURE(hybrid.name);
    CHECK(verify_variants(*backend, decode_op(), hybrid_problem(hybrid, DeviceKind::cpu, 7, 0),
                          random, 0) > 0);
    verify_plan(*backend, decode_op(), hybrid_problem(hybrid, DeviceKind::cpu, 5, 8), 1);
  }
  verify_plan(*backend, decode_op(), hybrid_problem(hybrids()[1], DeviceKind::cpu, 3, 4, true), 1);
}

TEST_CASE("decode: a sequence that has ended keeps its states") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  const Problem problem = hybrid_problem(hybrids()[3], DeviceKind::cpu, 2, 3);
  const Plan plan = plan_of(*backend, decode_op(), problem);
  Memory memory(*backend, buffers_of(plan));
  begin(memory, 2, 0);
  memory.write("ended", Ints{0, 1});
  const std::vector<std::string> states{"layers.0.states", "layers.0.conv_state",
                                        "layers.2.states"};
  std::map<std::string, std::vector<std::byte>> before;
  for (const std::string& name : states) before[name] = memory.read(name);
  memory.run(plan, own_name);
  for (const std::string& name : states) {
    CAPTURE(name);
    const auto now = memory.read(name);
    const auto half = static_cast<std::ptrdiff_t>(now.size() / 2);
    CHECK_FALSE(std::equal(now.begin(), now.begin() + half, before[name].begin()));
    CHECK(std::equal(now.begin() + half, now.end(), before[name].begin() + half));
  }
}

TEST_CASE("decode: stages of several kinds of layers have families on GPUs, but no one launch") {
  for (const Hybrid& hybrid : hybrids()) {
    CAPTURE(hybrid.name);
    const Problem problem = hybrid_problem(hybrid, DeviceKind::cuda, 2, 8);
    const auto facts = facts_of_architecture("sm_90a");
    if (hybrid.name == std::string_view("states alone")) {
      CHECK(error_of([&] { default_recipe(decode_op(), problem, facts); }).find("states alone") !=
            std::string::npos);
      continue;
    }
    const Recipe recipe = default_recipe(decode_op(), problem, facts);
    CHECK_NOTHROW(check_recipe(decode_op(), problem, facts, recipe));
    CHECK_FALSE(is_repeated_by_family(decode_op(), recipe));
  }
}

TEST_CASE("decode: layers of several kinds are right on a GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const Hybrid& hybrid : hybrids()) {
    if (hybrid.name == std::string_view("states alone")) continue;
    CAPTURE(hybrid.name);
    verify_plan(*backend, decode_op(), hybrid_problem(hybrid, DeviceKind::cuda, 2, 4), 1);
  }
}

TEST_CASE("every model that decode knows is a problem of it, on pages too") {
  for (const KnownModel& model : decode_op().known_models()) {
    CAPTURE(model.name);
    Sizes sizes = model.sizes;
    sizes.insert({{"batch", 2}, {"cache", 128}, {"page", 64}});
    const Problem problem = decode_problem(DeviceKind::cuda, DType::bf16, sizes, model.options);
    for (const char* arch : {"sm_80", "sm_90a"}) {
      const auto facts = facts_of_architecture(arch);
      const Recipe recipe = default_recipe(decode_op(), problem, facts);
      CHECK_NOTHROW(check_recipe(decode_op(), problem, facts, recipe));
      // One launch has all stages, or each of them has a family.
      CHECK((recipe.size() == 1 ? recipe.front().family.rfind("persistent", 0) == 0
                                : recipe.size() >= 4));
    }
    CHECK(decode_op().tensors(problem).size() <= most_tensors);
  }
}

TEST_CASE("decode: stages and plans of every small model are right on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const SmallModel& model : small_models()) verify_model(*backend, model, DType::f32, 0);
}

TEST_CASE("decode: n runs are n times embedding, layers, head and the host's steps, on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  compare_models_with_parts(*backend);
}

TEST_CASE("decode: the same seeds give the same ids, others give others") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  const Problem problem = small_llama(DeviceKind::cpu, {{"batch", 3}, {"cache", 40}, {"layers", 2}},
                                      {{"choose", "sample"}});
  const Plan plan = plan_of(*backend, decode_op(), problem);
  const auto ids_of = [&](std::int64_t seed) {
    Memory memory(*backend, buffers_of(plan));
    begin(memory, 3, 0);
    memory.write("limits", Ints(3, 1000));
    std::vector<std::byte> bytes(24), temperatures(12);
    const std::int64_t seeds[] = {seed, seed + 1, 77};
    const float temperature[] = {1, 2, 2};
    std::memcpy(bytes.data(), seeds, bytes.size());
    std::memcpy(temperatures.data(), temperature, temperatures.size());
    memory.write("seeds", bytes);
    memory.write("temperature", temperatures);
    run_steps(plan, memory, 20);
    return memory.ints("out");
  };
  const Ints first = ids_of(5), other = ids_of(900);
  CHECK(first == ids_of(5));
  CHECK(first != other);
  CHECK(std::equal(first.begin() + 80, first.end(), other.begin() + 80));
}

TEST_CASE("decode: an id outside of the vocabulary is a row of zeros, and a full cache ends it") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  const Problem problem = small_llama(DeviceKind::cpu, {{"batch", 3}, {"cache", 6}});
  const Plan plan = plan_of(*backend, decode_op(), problem);
  Memory memory(*backend, buffers_of(plan));
  memory.write("ids", Ints{-1, 96, 3});
  memory.write("lengths", Ints{4, 5, 6});
  memory.write("steps", Ints{0, 0, 0});
  memory.write("ended", Ints{0, 0, 0});
  memory.write("limits", Ints{100, 100, 100});
  memory.run(plan, own_name);
  CHECK(memory.ints("ended") == Ints{0, 2, 2});
  CHECK(memory.ints("lengths") == Ints{5, 6, 6});
  CHECK(memory.ints("steps") == Ints{1, 1, 0});
  CHECK(memory.ints("ids")[2] == 0);
}

TEST_CASE("decode: no kernel of the layers starts before the embedding is complete") {
  const auto facts = facts_of_architecture("sm_90a");
  for (const SmallModel& model : small_models()) {
    CAPTURE(model.name);
    const Problem problem =
        problem_of(model, DeviceKind::cuda, DType::bf16, {{"batch", 9}, {"cache", 64}});
    const Recipe recipe = default_recipe(decode_op(), problem, facts);
    const Program program = program_in(recipe, 1, decode_op(), problem, facts);
    CHECK_FALSE(std::get<KernelLaunch>(program.steps.front()).programmatic);
  }
}

TEST_CASE(
    "decode: no launch of a decode step has a slice of the head, and all parts have kernels") {
  const auto facts = facts_of_architecture("sm_90a");
  const Problem problem = small_llama(DeviceKind::cuda,
                                      {{"batch", 1},
                                       {"cache", 64},
                                       {"d", 512},
                                       {"dim", 64},
                                       {"heads", 16},
                                       {"kv-heads", 8},
                                       {"h", 1152},
                                       {"vocab", 1000},
                                       {"ranks", 2}},
                                      {{"head", "sliced"}});
  for (const Family* family : decoding::persistent_tokens()) {
    CAPTURE(family->name());
    CHECK(family->refusal(problem, facts).has_value());
  }
  const Recipe recipe = default_recipe(decode_op(), problem, facts);
  CHECK_FALSE(program_in(recipe, 1, decode_op(), problem, facts).steps.empty());
}

TEST_CASE("decode: a record of its head serves it, and every stage has a variant") {
  const DeviceFacts facts =
      open_device("cpu", *builtin_catalog().sources, read_environment())->facts();
  const Problem problem =
      small_llama(DeviceKind::cpu, {{"batch", 9}, {"cache", 64}, {"layers", 2}});
  const fftune::testing::TemporaryFolder folder;
  const auto chosen = [&] {
    return choose(builtin_catalog(), decode_op(), problem, facts,
                  PresetLibrary::load({folder.path()}));
  };
  CHECK(chosen().recipe == default_recipe(decode_op(), problem, facts));
  const Problem head = decode_op().parts(problem).back().problem;
  const PresetRecord record =
      example::record(builtin_catalog(), head_op(), head, fallback_recipe(head_op(), head, facts));
  merge_preset_records(folder.path(), preset_device(facts), "head", {record});
  const Choice choice = chosen();
  CAPTURE(choice.reason, recipe_text(choice.recipe));
  CHECK(choice.reason.find("records of head") != std::string::npos);
  CHECK_NOTHROW(check_recipe(decode_op(), problem, facts, choice.recipe));
  for (const Variant& variant : record.recipe())
    CHECK(std::count(choice.recipe.begin(), choice.recipe.end(),
                     Variant{"head." + variant.family, variant.config}) == 1);
}

namespace {

/// Decode steps in one launch: how ids are chosen, where keys are, and what layers have.
std::vector<Use> uses_in_one_launch() {
  return {
      {{{"batch", 1}, {"cache", 100}}, {}},
      {{{"batch", 7}, {"cache", 70}, {"stops", 30}, {"room", 3}},
       {{"lengths", "ragged"},
        {"choose", "sample"},
        {"logprobs", "yes"},
        {"pad", "5"},
        {"embed-scale", "8.5"},
        {"logit-softcap", "30"}}},
      {{{"batch", 5}, {"cache", 200}, {"page", 16}, {"window", 50}, {"stops", 2}},
       {{"lengths", "ragged"},
        {"logprobs", "yes"},
        {"sinks", "yes"},
        {"head-logits", "f32"},
        {"head-bias", "yes"}}},
      {{{"batch", 2}, {"cache", 40}, {"h", 160}, {"experts", 20}, {"top-k", 8}, {"shared-h", 320}},
       {{"ffn", "moe"}, {"shared-gate", "yes"}, {"choose", "sample"}}},
      {{{"batch", 2}, {"cache", 70}, {"h", 1152}, {"vocab", 1001}},
       {{"weights", "int4"}, {"head-weights", "int8"}, {"lengths", "ragged"}}},
      {{{"batch", 5}, {"cache", 40}},
       {{"head-weights", "nvfp4"}, {"logprobs", "yes"}, {"choose", "sample"}}},
      // As of gpt-oss.
      {{{"batch", 3}, {"cache", 200}, {"h", 192}, {"experts", 20}, {"top-k", 4}, {"window", 128}},
       {{"ffn", "moe"},
        {"weights", "mxfp4"},
        {"attn-weights", "dense"},
        {"act", "swiglu-oai"},
        {"order", "after"},
        {"sinks", "yes"},
        {"qkv-bias", "yes"},
        {"out-bias", "yes"},
        {"ffn-bias", "yes"},
        {"lengths", "ragged"}}},
      {{{"batch", 1}, {"cache", 40}, {"h", 192}, {"experts", 20}, {"top-k", 8}},
       {{"ffn", "moe"}, {"weights", "int4"}, {"group", "32"}, {"zeros", "yes"}}}};
}

Problem one_launch_problem(const Use& use, std::int64_t layers) {
  Sizes sizes = use.sizes;
  sizes.insert(
      {{"d", 512}, {"h", 1056}, {"heads", 16}, {"kv-heads", 8}, {"dim", 64}, {"vocab", 1000}});
  if (layers > 1) sizes["layers"] = layers;
  return decode_problem(DeviceKind::cuda, DType::bf16, sizes, use.options);
}

std::string one_launch_family(const Problem& problem) {
  if (problem.has("ffn", "moe"))
    return !problem.options.contains("weights")        ? "persistent_weighted"
           : !problem.options.contains("attn-weights") ? "persistent_packed_experts"
                                                       : "persistent_packed_ffn_experts";
  return std::string(problem.has("weights", "int4") ? "persistent_packed" : "persistent") +
         (problem.options.contains("head-weights") ? "_packed_head" : "");
}

/// Uses [first, last), each of some layers.
void verify_one_launch(std::size_t first, std::size_t last) {
  FFTUNE_FIRST_CUDA(backend);
  for (std::size_t i = first; i < last; ++i)
    for (const std::int64_t layers : {1, 3, 50}) {
      const Use use = uses_in_one_launch()[i];
      const Problem problem = one_launch_problem(use, layers);
      const Family& family = family_of(decode_op(), one_launch_family(problem));
      CAPTURE(problem.text());
      if (family.refusal(problem, backend->facts())) return;
      if (layers == 50 && i > 0) continue;
      const Plan plan(
          *backend, decode_op(), problem,
          {{std::string(family.name()), family.default_config(problem, backend->facts())}});
      CHECK(plan.executables().size() == 1);
      Verifier verifier(*backend, decode_op(), problem, 7);
      const auto result =
          verifier.verify(0, decode_op().stages(problem).size(), plan.executables());
      CAPTURE(result.failure, result.error, result.tolerance);
      CHECK(result.passed);
    }
}

}  // namespace

TEST_CASE("decode: the one launch of a decode step says what it cannot compute") {
  const auto facts = facts_of_architecture("sm_90a");
  for (const Use& use : uses_in_one_launch()) {
    const Problem problem = one_launch_problem(use, 3);
    CAPTURE(problem.text());
    const Family& family = family_of(decode_op(), one_launch_family(problem));
    CHECK(family.refusal(problem, facts) == std::nullopt);
    CHECK_NOTHROW(
        check_recipe(decode_op(), problem, facts,
                     {{std::string(family.name()), family.default_config(problem, facts)}}));
  }
  const auto refusal = [&](Sizes sizes, Options options) {
    sizes.insert({{"batch", 1}, {"cache", 100}});
    const Problem problem = one_launch_problem({std::move(sizes), std::move(options)}, 2);
    return family_of(decode_op(), "persistent").refusal(problem, facts).value_or("");
  };
  CHECK(refusal({}, {{"choose", "filtered"}}).find("a filter") != std::string::npos);
  CHECK(refusal({{"vocab", 100}}, {}).find("vocab=100") != std::string::npos);
  CHECK(refusal({{"batch", 9}}, {}).find("batch=9") != std::string::npos);
  CHECK(refusal({}, {{"head-weights", "int4"}}) == "the head has packed weights");
}

TEST_CASE("decode: one launch has the embedding, the layers, the head and the state") {
  const auto facts = facts_of_architecture("sm_90a");
  const auto launches = [&](std::int64_t layers) {
    const Problem problem = one_launch_problem(uses_in_one_launch()[1], layers);
    const Family& family = family_of(decode_op(), "persistent");
    const Program program = family.program(problem, facts, family.default_config(problem, facts));
    std::vector<std::map<std::size_t, Argument>> all;
    for (const Step& step : program.steps) {
      auto& fields = all.emplace_back();
      for (const auto& [offset, value] : std::get<KernelLaunch>(step).parameters->fields)
        CHECK(fields.emplace(offset, value).second);
    }
    return all;
  };
  constexpr std::size_t at = sizeof(persistent_common);
  const auto has = [](const std::map<std::size_t, Argument>& fields, std::size_t offset) {
    return fields.contains(at + offset);
  };
  const auto one = launches(48), two = launches(49);
  REQUIRE(one.size() == 1);
  REQUIRE(two.size() == 2);
  CHECK(has(one[0], offsetof(persistent_token, embedding)));
  CHECK(has(two[0], offsetof(persistent_token, embedding)));
  CHECK_FALSE(has(two[1], offsetof(persistent_token, embedding)));
  CHECK(has(one[0], offsetof(persistent_token, chooses)));
  CHECK_FALSE(has(two[0], offsetof(persistent_token, chooses)));
  CHECK(has(two[1], offsetof(persistent_token, chooses)));
}

TEST_CASE("decode: a decode step of one sequence in one launch", "[gpu]") {
  verify_one_launch(0, 1);
}

TEST_CASE("decode: decode steps of sequences that end, in one launch", "[gpu]") {
  verify_one_launch(1, 2);
}

TEST_CASE("decode: decode steps over pages with a window, in one launch", "[gpu]") {
  verify_one_launch(2, 3);
}

TEST_CASE("decode: decode steps with experts, in one launch", "[gpu]") {
  verify_one_launch(3, 4);
}

TEST_CASE("decode: decode steps with packed weights, in one launch", "[gpu]") {
  verify_one_launch(4, 5);
}

TEST_CASE("decode: decode steps with a packed head, in one launch", "[gpu]") {
  verify_one_launch(5, 6);
}

TEST_CASE("decode: decode steps with packed experts, in one launch", "[gpu]") {
  verify_one_launch(6, uses_in_one_launch().size());
}

TEST_CASE("decode: one launch advances the state as the parts do", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Problem problem = one_launch_problem({{{"batch", 3}, {"cache", 40}}, {}}, 2);
  const Family& family = family_of(decode_op(), "persistent");
  if (family.refusal(problem, backend->facts())) return;
  const Plan whole(*backend, decode_op(), problem,
                   {{"persistent", family.default_config(problem, backend->facts())}});
  const Plan parts = plan_of(*backend, decode_op(), problem);
  Memory own(*backend, buffers_of(whole)), other(*backend, buffers_of(whole));
  for (Memory* memory : {&own, &other}) begin(*memory, 3, 0);
  run_steps(whole, own, 9);
  run_steps(parts, other, 9);
  for (const char* name : {"lengths", "steps", "ended"}) {
    CAPTURE(name);
    CHECK(own.ints(name) == other.ints(name));
  }
  CHECK(own.ints("steps")[0] == 9);
  CHECK(own.ints("ended")[1] == 2);
}

TEST_CASE("decode: slices of a group's ranks are right on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  verify_model(*backend, small_models().front(), DType::f32, 0, uses_of_ranks());
}

TEST_CASE("decode: slices of a group's ranks are right on a GPU", "[gpu]") {
  on_first_cuda([](Backend& backend) {
    verify_model(backend, small_models().front(), DType::bf16, 0, uses_of_ranks());
  });
}

TEST_CASE("decode: stages and plans of every small model are right on a GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(1);
  for (const SmallModel& model : small_models()) {
    CAPTURE(model.name);
    std::vector<Problem> problems;
    for (const Use& use : uses())
      problems.push_back(problem_of(model, DeviceKind::cuda, DType::bf16, use.sizes, use.options));
    // The stages of layers and heads are theirs: their own tests run them for every model.
    const bool is_first = model.name == std::string_view(small_models().front().name);
    verify_families(*backend, decode_op(), problems, random, 0,
                    is_first ? every_family : is_no_part);
    verify_plans(*backend, model, DType::bf16, uses());
  }
}

TEST_CASE("decode: n runs are n times embedding, layers, head and the host's steps, on a GPU",
          "[gpu]") {
  on_first_cuda(compare_models_with_parts);
}
