// Every family of qkv against the float64 reference: ragged sizes, every form.
#include <random>

#include "qkv/problems.hpp"
#include "support/op_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Every epilogue that a model has, and those that they do not.
std::vector<Options> every_form() {
  std::vector<Options> forms;
  for (const char* weights : {"separate", "packed"})
    for (const char* bias : {"no", "yes"}) {
      forms.push_back({{"weights", weights}, {"bias", bias}});
      for (const char* rotation : {"halves", "interleaved"})
        for (const char* cache : {"no", "yes"})
          forms.push_back({{"weights", weights},
                           {"bias", bias},
                           {"norm", bias},
                           {"rotation", rotation},
                           {"angles", cache[0] == 'y' ? "llama3" : "table"},
                           {"cache", cache},
                           {"slots", bias[0] == 'y' ? "i64" : "i32"}});
    }
  for (const char* weights : {"separate", "packed", "grouped"})
    for (const char* norm : {"no", "yes", "rows", "layer"})
      for (const char* order : {"before", "after"}) {
        const bool can = norm[0] == 'y' || norm[0] == 'l';
        if (!can && order[0] == 'a') continue;
        const bool even = forms.size() % 2 == 0;
        forms.push_back({{"weights", weights},
                         {"bias", even ? "yes" : "no"},
                         {"norm", norm},
                         {"norm-order", order},
                         {"rotation", norm[0] == 'l' ? "interleaved" : "halves"},
                         {"angles", even ? "base" : "table"},
                         {"cache", even ? "no" : "yes"},
                         {"slots", even || order[0] == 'a' ? "i32" : "i64"}});
      }
  forms.push_back({{"weights", "grouped"}, {"norm", "rows"}, {"cache", "yes"}});
  forms.push_back({{"gates", "yes"}, {"bias", "yes"}});
  for (const char* norm : {"yes", "rows"})
    forms.push_back({{"gates", "yes"},
                     {"norm", norm},
                     {"rotation", "halves"},
                     {"angles", "base"},
                     {"cache", "yes"},
                     {"cache-format", norm[0] == 'y' ? "same" : "e4m3"}});
  for (const char* weights : {"separate", "packed", "grouped"})
    for (const char* norm : {"no", "yes"})
      forms.push_back({{"weights", weights},
                       {"norm", norm},
                       {"v-norm", "yes"},
                       {"eps", "1e-2"},
                       {"rotation", "halves"},
                       {"cache", weights[0] == 's' ? "yes" : "no"}});
  return forms;
}

}  // namespace

TEST_CASE("qkv is right on the CPU in every form and dtype, at ragged sizes") {
  const auto backend = open_cpu();
  std::mt19937_64 random(1);
  for (const DType dtype : qkv_op().dtypes(DeviceKind::cpu))
    for (const Options& options : every_form())
      for (const auto& of :
           {qkv_sizes(1, 1, 1, 1, 2), qkv_sizes(33, 70, 3, 1, 24), qkv_sizes(45, 65, 6, 2, 96),
            qkv_sizes(5, 600, 2, 2, 256), qkv_sizes(3, 40, 2, 1, 512)})
        verify_families(*backend, qkv_op(), {qkv_problem(DeviceKind::cpu, dtype, of, options)},
                        random, 2);
}

TEST_CASE("qkv is right on a GPU in every form, where tiles have whole heads", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(2);
  for (const Options& options : every_form()) {
    const Problem problem =
        qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(333, 136, 4, 2, 64), options);
    REQUIRE(verify_variants(*backend, qkv_op(), problem, random, 1) >= 2);
  }
}

TEST_CASE("qkv is right on a GPU with heads of every size that tiles take", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(3);
  int at = 0;
  for (const std::int64_t dim : {16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256})
    for (const std::int64_t m : {at % 2 == 0 ? 13 : 1, at % 2 == 0 ? 1001 : 40}) {
      ++at;
      auto of = qkv_sizes(m, 264, 16, 4, dim);
      if (dim % 32 == 0 && at % 3 != 0) of["rotary"] = dim / 2;
      of["cache-slots"] = 1500;
      const bool even = at % 4 < 2;
      const Problem problem = qkv_problem(DeviceKind::cuda, even ? DType::fp16 : DType::bf16, of,
                                          {{"weights", even ? "packed" : "separate"},
                                           {"bias", "yes"},
                                           {"norm", at % 5 < 3 ? "yes" : "no"},
                                           {"rotation", at % 3 < 2 ? "halves" : "interleaved"},
                                           {"angles", "yarn"},
                                           {"factor", "8"},
                                           {"cache", "yes"}});
      REQUIRE(verify_variants(*backend, qkv_op(), problem, random, 2) >= 2);
    }
}

TEST_CASE("qkv is right on a GPU with heads of any even number of features", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(5);
  for (const std::int64_t dim : {2, 4, 6, 10, 12, 20, 100, 254, 264, 512})
    for (const std::int64_t m : {1, 70}) {
      const Problem problem =
          qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(m, 264, 4, 2, dim),
                      {{"norm", m == 1 ? "yes" : "no"},
                       {"rotation", "halves"},
                       {"angles", "base"},
                       {"cache", "yes"}});
      REQUIRE(verify_variants(*backend, qkv_op(), problem, random, 1) > 0);
    }
}

TEST_CASE("a cluster of which a part is past the last head writes nothing there", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(4);
  const Problem problem = qkv_problem(
      DeviceKind::cuda, DType::fp16, qkv_sizes(13, 16, 2, 2, 96),
      {{"rotation", "halves"}, {"angles", "base"}, {"cache", "yes"}, {"weights", "packed"}});
  REQUIRE(verify_variants(*backend, qkv_op(), problem, random, 12) >= 12);
}

TEST_CASE("on the CPU a slot beyond the cache is none, as a negative one is") {
  const auto backend = open_cpu();
  const Problem problem = qkv_problem(
      DeviceKind::cpu, DType::f32,
      {{"m", 3}, {"d", 16}, {"heads", 2}, {"dim", 8}, {"cache-slots", 4}}, {{"cache", "yes"}});
  const auto caches = [&](const std::vector<float>& slots) {
    OpRun run(*backend, qkv_op(), problem);
    run.set("slots", slots);
    run.run(qkv_op(), problem, default_recipe(qkv_op(), problem, backend->facts()));
    return std::pair(run.values("k_cache"), run.values("v_cache"));
  };
  CHECK(caches({1, 1000000, 4}) == caches({1, -1, -1}));
  CHECK(caches({1, 3, 0}) != caches({1, -1, -1}));
}

TEST_CASE("qkv's baselines write the same") {
  const auto backend = open_cpu();
  check_baselines(*backend, qkv_op(),
                  qkv_problem(DeviceKind::cpu, DType::bf16, qkv_sizes(33, 72, 4, 2, 24)), 2e-2);
}

TEST_CASE("on a GPU too, qkv's baselines write the same", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const Options& options :
       {Options{}, Options{{"rotation", "halves"}, {"angles", "base"}},
        Options{{"rotation", "interleaved"}, {"angles", "llama3"}, {"factor", "8"}}})
    check_baselines(
        *backend, qkv_op(),
        qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(333, 136, 8, 2, 64), options), 3e-2);
}

TEST_CASE("q alone is right on a GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(5);
  const Problem problem =
      qkv_problem(DeviceKind::cuda, DType::bf16, {{"m", 5}, {"d", 40}, {"heads", 4}, {"dim", 72}},
                  {{"keys", "no"}, {"norm", "yes"}, {"bias", "yes"}, {"rotation", "halves"}});
  REQUIRE(verify_variants(*backend, qkv_op(), problem, random, 2) > 0);
}

TEST_CASE("norms of values are right on a GPU", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937_64 random(5);
  for (const char* weights : {"separate", "grouped"}) {
    const Problem problem = qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(5, 40, 4, 2, 72),
                                        {{"weights", weights},
                                         {"norm", "yes"},
                                         {"v-norm", "yes"},
                                         {"eps", "1e-2"},
                                         {"rotation", "halves"},
                                         {"cache", "yes"}});
    REQUIRE(verify_variants(*backend, qkv_op(), problem, random, 2) > 0);
  }
}
