// Layers of every small model against the float64 reference: families one by one, recipes, and
// several layers in one plan.
#include <algorithm>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "layer/problems.hpp"
#include "runtime/plan.hpp"
#include "support/op_reference.hpp"
#include "support/verify_plan.hpp"
#include "support/verify_variants.hpp"
#include "verify/distinct_rows.hpp"
#include "verify/host_threads.hpp"
#include "verify/references.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// A model's problem in decode or prefill.
Problem model_problem(const SmallModel& model, DeviceKind kind, DType dtype, Sizes more,
                      Options options = {}) {
  Sizes sizes = model.sizes;
  for (const auto& [name, value] : more) sizes[name] = value;
  for (const auto& [name, value] : model.options) options[name] = value;
  return layer_problem(kind, dtype, std::move(sizes), std::move(options));
}

/// Decoding and prefill, with sequences of one length and of several.
struct Tokens {
  Sizes sizes;
  const char* lengths;
};
std::vector<Tokens> decoding_and_prefill() {
  return {{{{"batch", 1}, {"cache", 33}}, "full"},
          {{{"batch", 5}, {"cache", 40}}, "ragged"},
          {{{"batch", 2}, {"s", 13}, {"cache", 13}}, "full"},
          {{{"batch", 3}, {"s", 7}, {"cache", 29}}, "ragged"},
          {{{"batch", 4}, {"cache", 70}, {"page", 16}}, "ragged"},
          {{{"batch", 3}, {"s", 19}, {"cache", 60}, {"page", 32}, {"pages", 9}}, "ragged"}};
}

void verify_model(Backend& backend, const SmallModel& model, DType dtype, int more) {
  const DeviceKind kind = backend.facts().kind;
  std::mt19937_64 random(1);
  for (const Tokens& tokens : decoding_and_prefill()) {
    const Problem problem =
        model_problem(model, kind, dtype, tokens.sizes, {{"lengths", tokens.lengths}});
    CHECK(verify_variants(backend, layer_op(), problem, random, more) > 0);
    verify_plan(backend, layer_op(), problem, 1);
    Sizes several = tokens.sizes;
    several["layers"] = 3;
    verify_plan(backend, layer_op(),
                model_problem(model, kind, dtype, several, {{"lengths", tokens.lengths}}), 2);
  }
}

/// Caches whose heads have gaps between them, such as vLLM's with keys and values side by side.
void verify_gaps(Backend& backend, DType dtype, std::int64_t dim, int more) {
  std::mt19937_64 random(1);
  const SmallModel model{
      "llama", {{"d", 72}, {"h", 136}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}}, {}};
  for (const std::int64_t s : {1, 7}) {
    const Problem problem =
        model_problem(model, backend.facts().kind, dtype,
                      {{"batch", 3}, {"s", s}, {"cache", 60}, {"page", 16}, {"kv-head", 3 * dim}},
                      {{"lengths", "ragged"}});
    CHECK(verify_variants(backend, layer_op(), problem, random, more) > 0);
    verify_plan(backend, layer_op(), problem, 1);
  }
}

/// Slices of a group of two or three, in decoding and prefill.
void verify_slices(Backend& backend, const SmallModel& model, DType dtype) {
  // A norm of all heads is no slice's.
  if (model.options.contains("qk-norm") && model.options.at("qk-norm") == "rows") return;
  std::mt19937_64 random(2);
  for (const Tokens& tokens : {decoding_and_prefill()[0], decoding_and_prefill()[3]}) {
    Sizes sizes = tokens.sizes;
    sizes["ranks"] = sizes.at("batch") == 1 ? 2 : 3;
    // Whole experts in prefill, some features of all in decoding.
    const bool whole =
        sizes["ranks"] == 3 && model.sizes.contains("experts") && !model.sizes.contains("shared");
    if (whole) sizes["own-experts"] = std::max<std::int64_t>(model.sizes.at("experts") / 3, 1);
    const auto problem = [&] {
      return model_problem(model, backend.facts().kind, dtype, sizes,
                           {{"lengths", tokens.lengths}});
    };
    CHECK(verify_variants(backend, layer_op(), problem(), random, 0) > 0);
    verify_plan(backend, layer_op(), problem(), 1);
    sizes["layers"] = 3;
    verify_plan(backend, layer_op(), problem(), 2);
  }
}

/// A small Llama with heads of 4, 6, 10, 12, 20, 100 and 264 features.
std::vector<SmallModel> models_of_head_dims() {
  std::vector<SmallModel> models;
  for (const std::int64_t dim : {4, 6, 10, 12, 20, 100, 264})
    models.push_back({"llama",
                      {{"d", 72}, {"h", 136}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}},
                      {{"qk-norm", dim % 4 == 0 ? "yes" : "no"}}});
  return models;
}

/// Device memory for the first `count` of the tensors, with the test data of each.
class DeviceBuffers {
 public:
  DeviceBuffers(Backend& backend, const std::vector<TensorSpec>& tensors, std::size_t count)
      : backend_(backend) {
    std::mt19937_64 random(3);
    for (std::size_t i = 0; i < count; ++i) {
      const TensorSpec& spec = tensors[i];
      const std::vector<std::byte> bytes = drawn_bytes(spec, random);
      buffers_.push_back(backend.allocate(bytes.size()));
      backend.write(buffers_.back()->data(), bytes.data(), bytes.size());
      addresses_.push_back(buffers_.back()->data());
    }
  }

  std::vector<void*> addresses() const { return addresses_; }
  void* at(std::size_t i) const { return addresses_[i]; }
  std::vector<std::byte> bytes(std::size_t i) const {
    std::vector<std::byte> bytes(buffers_[i]->bytes());
    backend_.read(bytes.data(), buffers_[i]->data(), bytes.size());
    return bytes;
  }

 private:
  Backend& backend_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<void*> addresses_;
};

void run_plan(Backend& backend, const Plan& plan, const std::vector<void*>& buffers) {
  const auto workspace = backend.allocate(std::max<std::size_t>(plan.workspace_bytes(), 256));
  backend.fill(workspace->data(), 0xff, workspace->bytes());
  plan.run(buffers.data(), workspace->data(), backend.stream());
  backend.synchronize();
}

/// A plan of several layers writes, bit by bit, what as many plans of one layer do.
void compare_with_single_layers(Backend& backend, const Problem& problem) {
  CAPTURE(problem.text());
  const Recipe recipe = default_recipe(layer_op(), problem, backend.facts());
  const Plan all(backend, layer_op(), problem, recipe);
  const auto repetition = layer_op().repetition(problem);
  REQUIRE(repetition);
  const Plan one(backend, layer_op(), repetition->one, recipe);
  const DeviceBuffers together(backend, all.tensors(), all.buffer_count());
  const DeviceBuffers apart(backend, all.tensors(), all.buffer_count());
  run_plan(backend, all, together.addresses());

  const std::size_t x = tensor_index(one.tensors(), "x"), y = tensor_index(one.tensors(), "y");
  const std::size_t last = all.buffer_count() - 1;
  const std::size_t bytes = all.tensors()[last].bytes();
  const auto input = backend.allocate(bytes), output = backend.allocate(bytes);
  backend.copy(input->data(), apart.at(0), bytes);
  for (const auto& places : repetition->places) {
    std::vector<void*> buffers;
    for (std::size_t i = 0; i < one.buffer_count(); ++i)
      buffers.push_back(i == x ? input->data() : i == y ? output->data() : apart.at(places[i]));
    run_plan(backend, one, buffers);
    backend.copy(input->data(), output->data(), bytes);
  }
  std::vector<std::byte> expected(bytes);
  backend.read(expected.data(), output->data(), bytes);
  CHECK(together.bytes(last) == expected);
  for (std::size_t i = 0; i < last; ++i) CHECK(together.bytes(i) == apart.bytes(i));
}

/// Every fourth model from number `first` on, in decode and prefill.
void verify_models_on_gpu(std::size_t first) {
  FFTUNE_FIRST_CUDA(backend);
  const auto models = small_models();
  REQUIRE(models.size() > first);
  for (std::size_t i = first; i < models.size(); i += 4) DYNAMIC_SECTION(models[i].name) {
      for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
        verify_model(*backend, models[i], dtype, dtype == DType::bf16 ? 1 : 0);
    }
}

}  // namespace

TEST_CASE("a plan of several layers is as many plans of one") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const SmallModel& model : small_models())
    for (const std::int64_t layers : {1, 2, 5})
      compare_with_single_layers(
          *backend, model_problem(model, DeviceKind::cpu, DType::bf16,
                                  {{"batch", 3}, {"s", 2}, {"cache", 17}, {"layers", layers}},
                                  {{"lengths", "ragged"}}));
}

TEST_CASE("on a GPU too, a plan of several layers is as many plans of one", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const auto models = small_models();
  for (const std::int64_t s : {1, 40})
    for (const std::int64_t layers : {1, 6})
      compare_with_single_layers(
          *backend, model_problem(models.front(), DeviceKind::cuda, DType::bf16,
                                  {{"batch", 3}, {"s", s}, {"cache", 70}, {"layers", layers}},
                                  {{"lengths", "ragged"}}));
}

TEST_CASE("test data keep the logits of a token's experts apart from the others") {
  HostThreads threads;
  for (const SmallModel& model : small_models()) {
    const auto has = [&](const char* option) { return model.options.contains(option); };
    // A choice by more than logits has no such gap.
    if (!has("ffn") || model.options.at("ffn") != "moe" || has("choice-bias") || has("router-bias"))
      continue;
    for (const std::uint64_t seed : {0, 1, 2}) {
      const Problem problem =
          model_problem(model, DeviceKind::cpu, DType::bf16,
                        {{"batch", 2}, {"s", 13}, {"cache", 13}, {"layers", 2}}, {});
      const DistinctRows rows(layer_op(), problem, InputData{seed}, threads);
      References references(rows, threads, nullptr);
      const auto experts = static_cast<std::size_t>(problem.size("experts"));
      const auto choices = static_cast<std::size_t>(problem.size("top-k"));
      for (std::size_t i = 0; i < rows.tensors().size(); ++i) {
        if (!rows.tensors()[i].name.ends_with("router_logits")) continue;
        for (const double* row : references.rows(0, i)) {
          std::vector<double> logits(row, row + experts);
          std::sort(logits.rbegin(), logits.rend());
          INFO(problem.text() << ", seed " << seed << ", " << rows.tensors()[i].name);
          CHECK(logits[choices - 1] - logits[choices] > 0.04);  // a few roundings of bf16
        }
      }
    }
  }
}

TEST_CASE("layers of every model are right on the CPU, in decode and prefill") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const SmallModel& model : small_models()) DYNAMIC_SECTION(model.name) {
      for (const DType dtype : layer_op().dtypes(DeviceKind::cpu))
        verify_model(*backend, model, dtype, 1);
    }
}

TEST_CASE("layers with inputs and norms of their own are right on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const SmallModel& model : models_with_more_inputs()) DYNAMIC_SECTION(model.name) {
      for (const DType dtype : {DType::f32, DType::bf16}) verify_model(*backend, model, dtype, 1);
    }
}

TEST_CASE("layers with inputs and norms of their own are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const SmallModel& model : models_with_more_inputs())
    for (const std::int64_t s : {1, 3})
      verify_plan(*backend, layer_op(),
                  model_problem(model, DeviceKind::cuda, DType::bf16,
                                {{"batch", 2}, {"s", s}, {"cache", 20}}, {{"lengths", "ragged"}}),
                  1);
}

// In parts, each of a minute or so: a run on a device may be limited in time.
TEST_CASE("layers of every model are right on the GPU, first part", "[gpu][models1]") {
  verify_models_on_gpu(0);
}
TEST_CASE("layers of every model are right on the GPU, second part", "[gpu][models2]") {
  verify_models_on_gpu(1);
}
TEST_CASE("layers of every model are right on the GPU, third part", "[gpu][models3]") {
  verify_models_on_gpu(2);
}
TEST_CASE("layers of every model are right on the GPU, fourth part", "[gpu][models4]") {
  verify_models_on_gpu(3);
}

TEST_CASE("slices of layers, with sums over ranks that one plays, are right on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const SmallModel& model : small_models()) verify_slices(*backend, model, DType::f32);
}

TEST_CASE("slices of layers, with sums over ranks that one plays, are right on the GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const SmallModel& model : small_models())
    for (const char* name : {"llama", "phi2", "gemma3", "qwen2moe", "falcon"})
      if (model.name == std::string_view(name)) DYNAMIC_SECTION(name) {
          verify_slices(*backend, model, DType::bf16);
        }
}

TEST_CASE("layers with heads of any even number of features are right on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const SmallModel& model : models_of_head_dims())
    for (const DType dtype : layer_op().dtypes(DeviceKind::cpu))
      verify_model(*backend, model, dtype, 0);
}

TEST_CASE("layers with heads of any even number of features are right on the GPU", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const SmallModel& model : models_of_head_dims())
    verify_model(*backend, model, DType::bf16, 0);
}

TEST_CASE("layers with gaps between the heads of caches are right on the CPU") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const DType dtype : layer_op().dtypes(DeviceKind::cpu)) verify_gaps(*backend, dtype, 12, 1);
}

TEST_CASE("layers with gaps between the heads of caches are right on the GPU", "[gpu][gaps]") {
  on_first_cuda([](Backend& backend) { verify_gaps(backend, DType::bf16, 64, 0); });
}

TEST_CASE("norms of values and scalars of layers are right on the GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const auto models = small_models();
  for (const char* name : {"gemma4's windows", "gemma4's wide heads"})
    for (const std::int64_t s : {1, 3})
      for (const SmallModel& model : models)
        if (model.name == std::string_view(name))
          verify_plan(
              *backend, layer_op(),
              model_problem(model, DeviceKind::cuda, DType::bf16,
                            {{"batch", 2}, {"s", s}, {"cache", 20}}, {{"lengths", "ragged"}}),
              1);
}
