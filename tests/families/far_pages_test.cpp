// Pages at the end of a cache of 60 GB, beyond 2^31 elements and 2^32 bytes, as a server hands them
// out: every family that reads or writes them gives the bits that it gives in a small cache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "measure/buffer_sets.hpp"
#include "registry/catalog.hpp"
#include "runtime/devices.hpp"
#include "support/catch.hpp"
#include "support/fields.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The bytes of the keys; the values have as many.
constexpr std::int64_t far_bytes = 30'000'000'000;
constexpr std::size_t at_front = 0, far_away = 1;  // the sets

/// A problem in a small cache and in a large one; `shift`: pages or slots between their ends.
struct Pair {
  Problem small, large;
};

/// `unit`: the size that counts the cache's pages or rows.
Pair pair_of(const Op& op, Problem problem, const std::string& unit, std::int64_t few,
             std::int64_t bytes_each) {
  problem.op = op.name();
  Pair pair{problem, problem};
  pair.small.sizes[unit] = few;
  pair.large.sizes[unit] = far_bytes / bytes_each;
  return {canonical(op, pair.small, DeviceKind::cuda), canonical(op, pair.large, DeviceKind::cuda)};
}

/// The tensors that are larger in the large cache.
std::vector<std::size_t> caches_of(const std::vector<TensorSpec>& small,
                                   const std::vector<TensorSpec>& large) {
  std::vector<std::size_t> caches;
  for (std::size_t i = 0; i < small.size(); ++i)
    if (small[i].bytes() != large[i].bytes()) caches.push_back(i);
  return caches;
}

template <typename Id>
void shift_ids(Backend& backend, const TensorSpec& tensor, void* address, std::int64_t by) {
  std::vector<Id> ids(static_cast<std::size_t>(tensor.elements()));
  backend.read(ids.data(), address, tensor.bytes());
  for (Id& id : ids)
    if (id >= 0) id = static_cast<Id>(id + by);
  backend.write(address, ids.data(), tensor.bytes());
}

/// The stages that the family covers, if they have one of the tensors.
std::vector<StageSpec> stages_with(const Op& op, const Family& family, const Problem& problem,
                                   const std::set<std::string>& names) {
  const auto own = family.stages();
  std::vector<StageSpec> stages;
  bool found = false;
  for (const StageSpec& stage : op.stages(problem)) {
    if (std::find(own.begin(), own.end(), stage.name) == own.end()) continue;
    stages.push_back(stage);
    for (const auto* all : {&stage.inputs, &stage.outputs})
      for (const std::string& name : *all) found = found || names.contains(name);
  }
  return found && stages.size() == own.size() ? stages : std::vector<StageSpec>();
}

class FarPages {
 public:
  FarPages(Backend& backend, const Op& op, Pair pair)
      : backend_(backend),
        op_(op),
        pair_(std::move(pair)),
        small_(op.tensors(pair_.small)),
        large_(op.tensors(pair_.large)),
        caches_(caches_of(small_, large_)),
        sets_(backend, small_, 2, 3) {
    REQUIRE(caches_.size() == 2);
    std::size_t bytes = 0;
    for (const std::size_t cache : caches_) {
      REQUIRE(large_[cache].elements() > std::int64_t{1} << 31);
      bytes += large_[cache].bytes();
      names_.insert(small_[cache].name);
    }
    memory_ = backend.allocate(bytes);
  }

  /// Families that were compared.
  std::set<std::string> run() {
    find_slots();
    std::set<std::string> families;
    for (const Family* family : op_.families()) {
      if (family->device_kind() != DeviceKind::cuda) continue;
      const DeviceFacts& facts = backend_.facts();
      if (family->refusal(pair_.small, facts) || family->refusal(pair_.large, facts)) continue;
      const auto stages = stages_with(op_, *family, pair_.small, names_);
      if (stages.empty()) continue;
      const Variant variant{std::string(family->name()),
                            family->default_config(pair_.small, facts)};
      CAPTURE(pair_.large.text(), variant.id());
      REQUIRE(illegality(op_, pair_.large, facts, variant).empty());
      compare(*family, variant.config, stages);
      families.insert(variant.family);
    }
    return families;
  }

 private:
  /// A decode step finds the slots of its tokens itself, from the lengths and the pages. Without
  /// them all tokens would be written to one slot, in any order.
  void find_slots() {
    for (const Family* family : op_.families()) {
      const auto stages = family->stages();
      if (family->device_kind() != DeviceKind::cuda || stages.size() != 1 || stages[0] != "embed" ||
          family->refusal(pair_.small, backend_.facts()))
        continue;
      run_one(*family, pair_.small, family->default_config(pair_.small, backend_.facts()),
              sets_.tensors(at_front));
      return;
    }
  }

  void compare(const Family& family, const Config& config, const std::vector<StageSpec>& stages) {
    // Whatever is read elsewhere is a NaN.
    backend_.fill(memory_->data(), 0xff, memory_->bytes());
    auto near = sets_.tensors(at_front);
    std::vector<std::unique_ptr<Buffer>> before;
    for (std::size_t i = 0; i < small_.size(); ++i) {
      before.push_back(backend_.allocate(std::max<std::size_t>(small_[i].bytes(), 1)));
      if (small_[i].role == Role::output) backend_.fill(near[i], 0x5a, small_[i].bytes());
      backend_.copy(before.back()->data(), near[i], small_[i].bytes());
    }
    sets_.replicate();
    auto far = sets_.tensors(far_away);
    auto* next = static_cast<std::byte*>(memory_->data());
    for (const std::size_t cache : caches_) {
      backend_.copy(next + behind(cache), near[cache], small_[cache].bytes());
      far[cache] = next;
      next += large_[cache].bytes();
    }
    shift_all_ids(far, 1);
    run_one(family, pair_.small, config, near);
    run_one(family, pair_.large, config, far);
    shift_all_ids(far, -1);  // a decode step counts slots on
    for (const StageSpec& stage : stages)
      for (const std::string& name : stage.outputs) {
        const std::size_t tensor = tensor_index(small_, name);
        if (small_[tensor].any_order) continue;
        const bool cache = names_.contains(name);
        const auto* const there =
            static_cast<const std::byte*>(far[tensor]) + (cache ? behind(tensor) : 0);
        CAPTURE(name);
        CHECK(bytes_at(near[tensor], small_[tensor].bytes()) ==
              bytes_at(there, small_[tensor].bytes()));
      }
    for (std::size_t i = 0; i < small_.size(); ++i)
      backend_.copy(near[i], before[i]->data(), small_[i].bytes());
  }

  /// Pages and slots of the small cache become those of the large one; by -1, back again.
  void shift_all_ids(const std::vector<void*>& tensors, std::int64_t direction) {
    for (std::size_t i = 0; i < small_.size(); ++i) {
      const bool pages = small_[i].name == "pages";
      if (!pages && small_[i].name != "slots") continue;
      const std::int64_t by =
          direction *
          (pages ? pair_.large.size("pages") - pair_.small.size("pages") : rows_between());
      small_[i].dtype == DType::i64 ? shift_ids<std::int64_t>(backend_, small_[i], tensors[i], by)
                                    : shift_ids<std::int32_t>(backend_, small_[i], tensors[i], by);
    }
  }

  void run_one(const Family& family, const Problem& problem, const Config& config,
               const std::vector<void*>& tensors) {
    const auto made = backend_.compile(family.program(problem, backend_.facts(), config));
    CAPTURE(made.report.failure);
    REQUIRE(made.executable);
    const auto workspace =
        backend_.allocate(std::max<std::size_t>(made.executable->workspace_bytes(), 1));
    backend_.fill(workspace->data(), 0, workspace->bytes());
    made.executable->enqueue(tensors.data(), workspace->data(), backend_.stream());
    backend_.synchronize();
  }

  std::size_t behind(std::size_t cache) const {
    return large_[cache].bytes() - small_[cache].bytes();
  }
  std::int64_t rows_between() const {
    const auto& spec = small_[caches_.front()];
    // [pages, page, heads, dim], or [rows, heads, dim].
    const std::size_t heads = spec.shape.size() - 2;
    std::int64_t row = static_cast<std::int64_t>(dtype_bytes(spec.dtype));
    for (std::size_t i = heads; i < spec.shape.size(); ++i) row *= spec.shape[i];
    return static_cast<std::int64_t>(behind(caches_.front())) / row;
  }
  std::vector<std::byte> bytes_at(const void* address, std::size_t bytes) {
    std::vector<std::byte> all(bytes);
    backend_.read(all.data(), address, bytes);
    return all;
  }

  Backend& backend_;
  const Op& op_;
  Pair pair_;
  std::vector<TensorSpec> small_, large_;
  std::vector<std::size_t> caches_;
  std::set<std::string> names_;
  BufferSets sets_;
  std::unique_ptr<Buffer> memory_;
};

/// A device with room for the cache and what is beside it; null, and the reason, where none is.
std::unique_ptr<Backend> roomy_device(std::string& missing) {
  auto backend = open_first_cuda();
  if (!backend) {
    missing = "there is no CUDA device here";
  } else if (backend->free_bytes() < std::size_t{2 * far_bytes} + (std::size_t{8} << 30)) {
    missing = backend->facts().name + " has no 68 GB free";
    backend.reset();
  }
  return backend;
}

/// Compares every family that serves one of the problems, and names those.
void compare_all(const Op& op, const std::vector<Problem>& problems, const std::string& unit,
                 std::int64_t few, std::int64_t bytes_each) {
  std::string missing;
  const auto backend = roomy_device(missing);
  if (!backend) FFTUNE_SKIP(missing);
  std::set<std::string> families;
  for (const Problem& problem : problems)
    families.merge(FarPages(*backend, op, pair_of(op, problem, unit, few, bytes_each)).run());
  std::string all;
  for (const std::string& family : families) all += " " + family;
  WARN(op.name() << " over far pages:" << all);
  CHECK_FALSE(families.empty());
}

constexpr std::int64_t page = 16, page_bytes = page * 8 * 128 * 2;
const Sizes heads{{"heads", 16}, {"kv-heads", 8}, {"dim", 128}};

Sizes with(Sizes sizes, const Sizes& more) {
  sizes.insert(more.begin(), more.end());
  return sizes;
}

/// The network's forms, which families of whole layers tell apart.
std::vector<Problem> layers_of(const Sizes& more) {
  const Sizes common = with(with(heads, more), {{"d", 2048}, {"cache", 300}, {"page", page}});
  const Sizes dense = with(common, {{"h", 4096}});
  const Sizes experts = with(common, {{"h", 768}, {"experts", 16}, {"top-k", 4}});
  std::vector<Problem> problems;
  for (const std::int64_t tokens : {1, 4, 40}) {
    for (const Options& options :
         {Options{}, Options{{"qk-norm", "yes"}}, Options{{"weights", "int4"}}})
      problems.push_back(
          {"", "fwd", DType::bf16, with(dense, {{"batch", 2}, {"s", tokens}}), options});
    problems.push_back({"",
                        "fwd",
                        DType::bf16,
                        with(experts, {{"batch", 2}, {"s", tokens}}),
                        {{"ffn", "moe"}, {"renormalise", "yes"}}});
  }
  return problems;
}

}  // namespace

TEST_CASE("attention reads pages at the end of a cache of 60 GB", "[gpu]") {
  std::vector<Problem> problems;
  const auto add = [&](const Sizes& sizes, const Options& options) {
    problems.push_back({"", "fwd", DType::bf16,
                        with(with(heads, sizes), {{"b", 3}, {"kv", 300}, {"page", page}}),
                        options});
  };
  for (const char* mask : {"none", "causal"})
    for (const std::int64_t s : {1, 5, 64, 200})
      add({{"s", s}}, {{"lengths", "yes"}, {"mask", mask}});
  for (const std::int64_t s : {3, 150})
    add({{"s", s}}, {{"layout", "thd"}, {"lengths", "yes"}, {"mask", "causal"}});
  add({{"s", 1}, {"window", 70}}, {{"lengths", "yes"}, {"mask", "causal"}});
  compare_all(builtin_catalog().op("attention"), problems, "pages", 60, page_bytes);
}

TEST_CASE("qkv writes rows at the end of a cache of 60 GB", "[gpu]") {
  std::vector<Problem> problems;
  for (const std::int64_t m : {1, 20, 200})
    for (const Options& more :
         {Options{}, Options{{"head-norm", "yes"}}, Options{{"weights", "packed"}}}) {
      Options options{{"cache", "yes"}};
      options.insert(more.begin(), more.end());
      problems.push_back({"", "fwd", DType::bf16, with(heads, {{"m", m}, {"d", 2048}}), options});
    }
  const Op& op = builtin_catalog().op("qkv");
  std::erase_if(problems, [&](Problem problem) {
    try {
      problem.op = op.name();
      problem.sizes["cache-slots"] = 960;
      canonical(op, problem, DeviceKind::cuda);
      return false;
    } catch (const Error&) {
      return true;  // an option of another name
    }
  });
  REQUIRE(problems.size() >= 3);
  compare_all(op, problems, "cache-slots", 960, page_bytes / page);
}

TEST_CASE("layers read and write pages at the end of a cache of 60 GB", "[gpu]") {
  compare_all(builtin_catalog().op("layer"), layers_of({}), "pages", 60, page_bytes);
}

TEST_CASE("a decode step reads and writes pages at the end of a cache of 60 GB", "[gpu]") {
  auto problems = layers_of({{"vocab", 4096}});
  std::erase_if(problems, [](const Problem& problem) { return problem.sizes.at("s") > 1; });
  for (Problem& problem : problems) problem.sizes.erase("s");
  compare_all(builtin_catalog().op("decode"), problems, "pages", 60, page_bytes);
}
