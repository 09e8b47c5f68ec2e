// Chunks of rows: the GEMMs of an engine around the kernel of cross-entropy, in one program.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/linear_cross_entropy/linear_cross_entropy.hpp"
#include "registry/part_family.hpp"

namespace fftune::linear_cross_entropy {
namespace {

constexpr const char* d_bias_file = "linear/d_bias.cu";
constexpr std::int64_t parts_of_chunk = 4;  // of a chunk's rows in the sums of dbias

/// The GEMMs of a chunk, in the order in which they run.
std::vector<GemmProblem> gemms_of(const Problem& problem, std::int64_t rows, bool is_first) {
  const Form form = form_of(problem);
  const std::int64_t d = problem.size("d"), vocab = problem.size("vocab");
  const DType dtype = problem.dtype;
  const auto gemm = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return GemmProblem{
        .m = m, .n = n, .k = k, .dtype = dtype, .c_dtype = dtype, .wide_dtype = dtype};
  };
  GemmProblem product = gemm(rows, vocab, d);
  product.a = {{"x"}};
  product.b = {{"w"}};
  product.c = {{"logits"}};
  if (form.bias) product.epilogue.row(row_broadcast::bias) = "bias";
  product.follows = !is_first;
  std::vector<GemmProblem> gemms{std::move(product)};
  if (form.gradients) {
    GemmProblem d_x = gemm(rows, d, vocab);
    d_x.b_major = Major::mn;
    d_x.a = {{"dlogits"}};
    d_x.b = {{"w"}};
    d_x.c = {{"dx"}};
    d_x.follows = true;
    gemms.push_back(std::move(d_x));
  }
  if (form.d_w()) {
    GemmProblem d_w = gemm(vocab, d, rows);
    d_w.a_major = d_w.b_major = Major::mn;
    d_w.a = {{"dlogits"}};
    d_w.b = {{"x"}};
    d_w.c = {{"dw"}};
    if (!is_first)
      d_w.epilogue.source = {{"dw"}};
    else if (form.accumulates)
      d_w.epilogue.source = {{"dw_before"}};
    d_w.follows = true;
    gemms.push_back(std::move(d_w));
  }
  return gemms;
}

/// The configuration of a GEMM of a chunk: the engine's default, or for many tiles on sm90 the one
/// that was fastest on an H100 for chunks of 4096 rows, 128,256 and 131,072 ids, d 2048 and 4096.
Config config_of(const Engine& engine, const GemmProblem& gemm, const DeviceFacts& facts) {
  if (engine.is_fallback) return {};
  Config config = engine.search.default_config({gemm}, facts);
  const std::int64_t tiles = ceil_div(gemm.m, 128) * ceil_div(gemm.n, 256);
  if (&engine != &sm90_engine || tiles < std::int64_t{4} * facts.multiprocessors) return config;
  const auto tile = [](int bm, int bn, const char* schedule, int cluster_n, int epilogue_stages) {
    return Config{{"bm", bm},
                  {"bn", bn},
                  {"schedule", schedule},
                  {"mma_warpgroups", 2},
                  {"cluster_m", 1},
                  {"cluster_n", cluster_n},
                  {"split_k", 1},
                  {"stages", 4},
                  {"epilogue_stages", epilogue_stages},
                  {"group_m", 8}};
  };
  // Three products: logits, dw, and dw that is added to. wgmma reads an MN-major A at a lower rate,
  // so that narrow tiles of dw wait for shared memory.
  Config measured = config;
  if (gemm.a_major == Major::k && gemm.b_major == Major::k)
    measured = tile(128, 192, "pingpong", 1, 1);
  else if (gemm.a_major == Major::mn)
    measured = gemm.epilogue.source.empty() ? tile(256, 128, "cooperative", 2, 1)
                                            : tile(128, 256, "cooperative", 1, 2);
  return engine.search.space({gemm}, facts).violations(measured).empty() ? measured : config;
}

/// Builds the program of all chunks.
class Chunks {
 public:
  Chunks(const Problem& problem, const DeviceFacts& facts, const Engine& engine,
         const cross_entropy::RowBlocks& row_blocks)
      : problem_(problem),
        facts_(facts),
        engine_(engine),
        row_blocks_(row_blocks),
        form_(form_of(problem)),
        tensors_(linear_cross_entropy_op().tensors(problem)),
        places_(tensors_),
        m_(problem.size("m")),
        d_(problem.size("d")),
        vocab_(problem.size("vocab")),
        bytes_(static_cast<std::int64_t>(dtype_bytes(problem.dtype))) {
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      if (tensors_[i].role != Role::intermediate) host_tensors_ = i + 1;
  }

  Program make() {
    const std::int64_t rows = chunk_rows(problem_);
    const std::int64_t chunks = ceil_div(m_, rows);
    logits_ = scratch(rows * vocab_ * bytes_);
    if (reduces()) losses_ = scratch(m_ * 4);
    if (form_.d_w() && form_.bias)
      sums_ = scratch((is_cpu() ? 1 : chunks * parts_of_chunk) * vocab_ * 4);
    if (is_cpu()) program_.host_tensors = host_tensors_;
    for (std::int64_t first = 0; first < m_; first += rows)
      append_chunk(first, std::min(rows, m_ - first));
    if (reduces())
      cross_entropy::append_total(program_, form_.loss, losses_, *given("loss"), given("items"), m_,
                                  facts_);
    if (form_.d_w() && form_.bias) append_d_bias();
    return std::move(program_);
  }

 private:
  bool is_cpu() const { return facts_.kind == DeviceKind::cpu; }
  bool reduces() const {
    return !form_.backward && form_.loss.reduction != cross_entropy::Reduction::none;
  }
  ScratchArgument scratch(std::int64_t bytes) {
    program_.scratch.push_back({static_cast<std::size_t>(bytes), false});
    return {program_.scratch.size() - 1};
  }
  /// A tensor from an element on.
  std::optional<Pointer> given(const char* name, std::int64_t element = 0) const {
    const std::size_t place = places_.at(name);
    if (place == absent) return std::nullopt;
    return TensorArgument{place,
                          static_cast<std::size_t>(element) * dtype_bytes(tensors_[place].dtype)};
  }

  void append_chunk(std::int64_t first, std::int64_t rows) {
    auto gemms = gemms_of(problem_, rows, first == 0);
    append_gemm(gemms[0], first);
    const bool by_row = form_.loss.reduction == cross_entropy::Reduction::none;
    cross_entropy::Rows of_loss{.rows = rows,
                                .vocab = vocab_,
                                .dtype = problem_.dtype,
                                .logits = logits_,
                                .labels = *given("labels", first),
                                .lse = *given("lse", first),
                                .class_weights = given("class_weights"),
                                .items = given("items"),
                                .dloss = given("dloss", by_row ? first : 0),
                                .loss = given("loss", by_row ? first : 0),
                                .logprob = given("logprob", first),
                                .entropy = given("entropy", first)};
    if (reduces())
      of_loss.loss = ScratchArgument{losses_.scratch, static_cast<std::size_t>(first) * 4};
    if (form_.gradients) of_loss.dlogits = logits_;
    if (is_cpu())
      cross_entropy::append_cpu_rows(program_, form_.loss, of_loss, facts_, 1,
                                     facts_.multiprocessors);
    else
      cross_entropy::append_rows(program_, form_.loss, of_loss, facts_, row_blocks_);
    for (std::size_t i = 1; i < gemms.size(); ++i) append_gemm(gemms[i], first);
    if (form_.d_w() && form_.bias) append_bias_sums(first, rows);
  }

  /// A GEMM whose tensors are those of the rows from `first` on.
  void append_gemm(const GemmProblem& gemm, std::int64_t first) {
    std::vector<TensorSpec> names;
    std::vector<Pointer> pointers;
    const auto add = [&](const char* name, const std::optional<Pointer>& pointer) {
      if (!pointer) return;
      names.push_back({name, problem_.dtype, {}});
      pointers.push_back(*pointer);
    };
    add("logits", logits_);
    add("dlogits", logits_);
    for (const char* name : {"x", "dx"}) add(name, given(name, first * d_));
    for (const char* name : {"w", "bias", "dw", "dw_before"}) add(name, given(name));
    Program own;
    if (is_cpu()) own.host_tensors = names.size();
    engine_.append(own, {gemm}, TensorPlaces(names), facts_, config_of(engine_, gemm, facts_));
    if (facts_.compute_capability >= 90 && !program_.steps.empty())
      for (Step& step : own.steps)
        if (auto* launch = std::get_if<KernelLaunch>(&step))
          launch_behind(*launch, own.kernels[launch->kernel]);
    // Chunks of as many rows take the same scratch memory, which no program leaves in use.
    const bool is_left =
        std::all_of(own.scratch.begin(), own.scratch.end(),
                    [](const Scratch& one) { return !one.zeroed || one.left_zero; });
    const auto key = std::pair(std::string(gemm.c[0][0]), gemm.tokens());
    std::optional<std::size_t> known;
    if (const auto found = scratch_of_.find(key); is_left && found != scratch_of_.end())
      known = found->second;
    else
      scratch_of_[key] = program_.scratch.size();
    append_moved(program_, std::move(own), pointers, host_tensors_, known);
  }

  void append_bias_sums(std::int64_t first, std::int64_t rows) {
    if (is_cpu()) {
      program_.steps.emplace_back(
          HostFunction([=, logits = Pointer(logits_), sums = Pointer(sums_), vocab = vocab_,
                        dtype = problem_.dtype](const HostCall& call) {
            auto* const sum = reinterpret_cast<float*>(address_of(call, sums));
            std::vector<float> row(static_cast<std::size_t>(vocab));
            if (first == 0) std::fill_n(sum, row.size(), 0.0f);
            for (std::int64_t i = 0; i < rows; ++i) {
              decode(dtype,
                     address_of(call, logits) +
                         static_cast<std::size_t>(i) * row.size() * dtype_bytes(dtype),
                     std::span<float>(row));
              for (std::size_t id = 0; id < row.size(); ++id) sum[id] += row[id];
            }
          }));
      return;
    }
    const std::int64_t of_part = ceil_div(rows, parts_of_chunk);
    const std::int64_t parts = ceil_div(rows, of_part);
    append_kernel(
        program_, d_bias_file, fmt::format("d_bias_partial<{}>", element_type(problem_.dtype)),
        {static_cast<std::uint32_t>(ceil_div(vocab_, 32)), static_cast<std::uint32_t>(parts), 1},
        512,
        {logits_,
         ScratchArgument{sums_.scratch, static_cast<std::size_t>(bias_parts_ * vocab_) * 4}, rows,
         vocab_, of_part});
    bias_parts_ += parts;
  }

  void append_d_bias() {
    if (is_cpu()) {
      program_.steps.emplace_back(HostFunction(
          [sums = Pointer(sums_), before = given("dbias_before"), out = *given("dbias"),
           count = static_cast<std::size_t>(vocab_), dtype = problem_.dtype](const HostCall& call) {
            auto* const sum = reinterpret_cast<float*>(address_of(call, sums));
            if (before) {
              std::vector<float> other(count);
              decode(dtype, address_of(call, *before), std::span<float>(other));
              for (std::size_t id = 0; id < count; ++id) sum[id] += other[id];
            }
            encode(dtype, std::span<const float>(sum, count), address_of(call, out));
          }));
      return;
    }
    const auto before = given("dbias_before");
    append_kernel(program_, d_bias_file,
                  fmt::format("d_bias_total<{}>", element_type(problem_.dtype)),
                  {static_cast<std::uint32_t>(ceil_div(vocab_, 256))}, 256,
                  {sums_, before ? argument_of(*before) : Argument{std::int64_t{0}},
                   argument_of(*given("dbias")), static_cast<std::int32_t>(bias_parts_), vocab_});
  }

  const Problem& problem_;
  const DeviceFacts& facts_;
  const Engine& engine_;
  cross_entropy::RowBlocks row_blocks_;
  Form form_;
  std::vector<TensorSpec> tensors_;
  TensorPlaces places_;
  std::int64_t m_, d_, vocab_, bytes_;
  std::size_t host_tensors_ = 0;
  Program program_;
  ScratchArgument logits_, losses_, sums_;
  std::int64_t bias_parts_ = 0;
  std::map<std::pair<std::string, std::int64_t>, std::size_t> scratch_of_;
};

/// All stages, by the GEMMs of one engine.
class ChunkFamily final : public Family {
 public:
  ChunkFamily(const Engine& engine, bool gradients, std::string_view name, std::string_view summary)
      : engine_(engine), gradients_(gradients), name_(name), summary_(summary) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return engine_.device_kind; }
  bool is_fallback() const override { return engine_.is_fallback; }
  std::vector<std::string> stages() const override {
    if (gradients_) return {stage_product, stage_loss, stage_gradients};
    return {stage_product, stage_loss};
  }
  std::vector<std::string> sources() const override {
    std::vector<std::string> sources = sources_of(engine_);
    if (device_kind() == DeviceKind::cpu)
      sources.emplace_back(cross_entropy::cpu_file);
    else
      sources.emplace_back(cross_entropy::kernel_file);
    if (gradients_ && device_kind() == DeviceKind::cuda) sources.emplace_back(d_bias_file);
    return sources;
  }
  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (facts.kind != engine_.device_kind)
      return engine_.device_kind == DeviceKind::cuda ? "the kernels need a CUDA device"
                                                     : "it runs on the CPU";
    if (form_of(problem).gradients != gradients_)
      return gradients_ ? "it computes gradients too" : "it computes no gradients";
    if (facts.kind == DeviceKind::cuda)
      if (auto refusal = refuse_cuda(problem, problem.pass, facts)) return refusal;
    const std::int64_t m = problem.size("m"), rows = chunk_rows(problem);
    for (const std::int64_t count : {rows, m - (m - 1) / rows * rows})
      for (const GemmProblem& gemm : gemms_of(problem, count, count == m))
        if (auto refusal = engine_.can_implement({gemm}, facts)) return refusal;
    return std::nullopt;
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    if (device_kind() == DeviceKind::cpu || is_fallback()) return {};
    Space space = Space()
                      .parameter("threads", "threads of a block of the loss", {256, 512, 1024})
                      .parameter("cluster",
                                 "blocks that share a row in their registers, or 1 that reads it "
                                 "twice if it does not fit",
                                 {1, 2, 4, 8})
                      .when_absent(1);
    space.constraint("a block's part of the next row must fit in shared memory",
                     [row = problem.size("vocab") * dtype_bytes(problem.dtype),
                      most = facts.shared_bytes_per_block - 1024,
                      reads_twice = reads_twice(problem, facts)](const Config& c) {
                       const std::int64_t part = static_cast<std::int64_t>(row) / c.at("cluster");
                       return !reads_twice || part > c.at("threads") * 128 || part <= most;
                     },
                     {"threads", "cluster"});
    space.constraint(
        "a cluster needs a row that half as many blocks could not hold in registers",
        [vocab = problem.size("vocab"), dtype = problem.dtype,
         reads_twice = reads_twice(problem, facts)](const Config& c) {
          const auto held = [&](std::int64_t cluster) {
            return cross_entropy::held_vectors(vocab, dtype, {c.at("threads"), cluster});
          };
          const std::int64_t cluster = c.at("cluster");
          return cluster == 1 || (reads_twice && held(cluster) > 0 && held(cluster / 2) == 0);
        },
        {"threads", "cluster"});
    return space;
  }
  // Blocks of 512 threads: two of them are on an SM.
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    if (device_kind() == DeviceKind::cpu || is_fallback()) return {};
    cross_entropy::RowBlocks blocks;
    const auto held = [&] {
      return cross_entropy::held_vectors(problem.size("vocab"), problem.dtype, blocks);
    };
    if (reads_twice(problem, facts))
      while (blocks.cluster < 8 && held() == 0) blocks.cluster *= 2;
    if (held() == 0) blocks.cluster = 1;
    return {{"threads", blocks.threads}, {"cluster", blocks.cluster}};
  }
  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    cross_entropy::RowBlocks blocks;
    if (config.contains("threads")) blocks = {config.at("threads"), config.at("cluster")};
    return Chunks(problem, facts, engine_, blocks).make();
  }

 private:
  /// Whether the loss and its gradient come from one kernel, and clusters could share a row in it.
  static bool reads_twice(const Problem& problem, const DeviceFacts& facts) {
    const Form form = form_of(problem);
    return form.gradients && !form.backward && facts.compute_capability >= 90;
  }

  const Engine& engine_;
  bool gradients_;
  std::string_view name_, summary_;
};

}  // namespace

std::vector<const Family*> families() {
  static constexpr const char* wgmma = "chunks of rows: TMA, wgmma and clusters";
  static constexpr const char* mma_sync = "chunks of rows: mma.sync and cp.async";
  static constexpr const char* fallback = "chunks of rows, any sizes and alignment: the fallback";
  static constexpr const char* blas = "chunks of rows over OpenBLAS";
  static constexpr const char* plain = "chunks of rows, plain loops: the fallback";
  static const std::vector<ChunkFamily> families{
      {sm90_engine, false, "loss_sm90", wgmma},
      {sm90_engine, true, "gradients_sm90", wgmma},
      {sm80_engine, false, "loss_sm80", mma_sync},
      {sm80_engine, true, "gradients_sm80", mma_sync},
      {simt_engine, false, "loss_fallback", fallback},
      {simt_engine, true, "gradients_fallback", fallback},
      {cpu_blas_engine, false, "cpu_loss_blas", blas},
      {cpu_blas_engine, true, "cpu_gradients_blas", blas},
      {cpu_plain_engine, false, "cpu_loss_plain", plain},
      {cpu_plain_engine, true, "cpu_gradients_plain", plain}};
  std::vector<const Family*> addresses;
  for (const ChunkFamily& family : families) addresses.push_back(&family);
  return addresses;
}

}  // namespace fftune::linear_cross_entropy
