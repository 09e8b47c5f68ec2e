// How near the cost models come to the fastest of what was timed. Tiles of wgmma, attention and
// products of few tokens in layers are of an H200, fp8 and the decode kernels of experts of an
// H100.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "landscapes/landscape.hpp"
#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Whether the engine's cost model ranks it.
bool is_of_the_engine(const Variant& variant) {
  return variant.family == "gate_up_sm90" || variant.family == "down_sm90";
}

/// Microseconds that the cost model expects of a variant by its id.
double expected_us(const Problem& problem, const DeviceFacts& facts, const std::string& id) {
  const Op& op = builtin_catalog().op(problem.op);
  const auto slash = id.find('/');
  const Variant variant =
      completed(op, problem, facts, {id.substr(0, slash), Config::parse(id.substr(slash + 1))});
  return 1e6 * family_of(op, variant.family).estimate(problem, facts, variant.config).value();
}

/// Those of an H200's layers that a file has.
std::vector<Landscape> landscapes_of_layers(const char* file) {
  return read_landscapes(
      std::filesystem::path(FFTUNE_SOURCE_DIR "/tests/data/landscapes-h200") / file,
      builtin_catalog(), h200());
}

}  // namespace

TEST_CASE("the cost model's choice is within 7% of the fastest, and 1.25% in the mean") {
  std::size_t landscapes = 0;
  double slower = 0;  // in all
  for (const auto& folder : landscape_folders()) {
    for (const auto& landscape : recorded_landscapes(folder)) {
      double best = infinity, chosen = best, least = best;
      for (std::size_t i = 0; i < landscape.variants.size(); ++i) {
        if (!is_of_the_engine(landscape.variants[i])) continue;
        best = std::min(best, landscape.us[i]);
        if (landscape.estimates[i] >= least) continue;
        least = landscape.estimates[i];
        chosen = landscape.us[i];
      }
      if (best == infinity) continue;
      ++landscapes;
      INFO(landscape.problem.text() << ": " << landscape.stages);
      // Landscapes of experts are closer if a search went on until little was left to gain
      // (chosen); those that were timed for a few seconds (searched) are noisier.
      const bool closer = landscape.problem.op == "moe-ffn" && folder == "chosen";
      CHECK(chosen <= (closer ? 1.03 : 1.07) * best);
      slower += chosen / best - 1;
    }
  }
  CHECK(landscapes >= 100);
  CHECK(slower <= 0.015 * static_cast<double>(landscapes));
}

TEST_CASE("what the cost models prefer on an H100 is near the fastest") {
  struct Recorded {
    const char* file;
    int least;           // landscapes
    double worst, mean;  // relative time above the fastest
    bool of_fastest_family = false;
  };
  // Products of hundreds of tokens: the worst is k=8192, m=572, n=2048, whose tiles of 80 columns
  // take half as long again with 8 stages as with 6, which the model does not know. The others are
  // within 23%. The times of packed weights are older than the order of loads of packed_sm90, so
  // variants are compared with those of the same family.
  const auto recorded = GENERATE(
      Recorded{"moe-ffn-fp8.txt", 14, 0.1, 0.02}, Recorded{"moe-ffn-one-token.txt", 4, 0.1, 0.02},
      Recorded{"hundreds-of-tokens.txt", 50, 0.55, 0.05},
      Recorded{"packed.txt", 8, 0.05, 0.01, true}, Recorded{"head.txt", 3, 0.01, 0.005});
  const auto h100 = facts_of_architecture("sm_90a");
  int landscapes = 0;
  double slower = 0;  // in all
  const auto file =
      std::filesystem::path(FFTUNE_SOURCE_DIR "/tests/data/landscapes-h100") / recorded.file;
  for (const Landscape& landscape : read_landscapes(file, builtin_catalog(), h100)) {
    INFO(landscape.problem.text() << ": " << landscape.stages);
    // Those that were dropped, as their kernels spill registers, have no time.
    std::size_t preferred = 0;
    double least = infinity;
    const auto fastest = static_cast<std::size_t>(
        std::min_element(landscape.us.begin(), landscape.us.end()) - landscape.us.begin());
    for (std::size_t i = 0; i < landscape.us.size(); ++i) {
      if (recorded.of_fastest_family &&
          landscape.variants[i].family != landscape.variants[fastest].family)
        continue;
      if (std::isfinite(landscape.us[i]) && landscape.estimates[i] < least) {
        least = landscape.estimates[i];
        preferred = i;
      }
    }
    if (!std::isfinite(least)) continue;
    CHECK(landscape.us[preferred] <= (1 + recorded.worst) * landscape.best());
    slower += landscape.us[preferred] / landscape.best() - 1;
    ++landscapes;
  }
  REQUIRE(landscapes >= recorded.least);
  CHECK(slower <= recorded.mean * landscapes);
}

TEST_CASE(
    "decode kernels take a configuration within 4% of the fastest on an H100, 1% in the mean") {
  const auto h100 = facts_of_architecture("sm_90a");
  int landscapes = 0;
  double slower = 0;  // in all
  for (const char* name : {"linear-decode.txt", "ffn-decode.txt"}) {
    const auto file = std::filesystem::path(FFTUNE_SOURCE_DIR "/tests/data/landscapes-h100") / name;
    for (const Landscape& landscape : read_landscapes(file, builtin_catalog(), h100)) {
      const std::string& family = landscape.variants.front().family;
      const Config chosen = family_of(builtin_catalog().op(landscape.problem.op), family)
                                .default_config(landscape.problem, h100);
      INFO(landscape.problem.text() << ": " << family << "/" << chosen.text());
      const auto place =
          std::find(landscape.variants.begin(), landscape.variants.end(), Variant{family, chosen});
      if (place == landscape.variants.end()) continue;  // the search had no time for it
      const double us = landscape.us[static_cast<std::size_t>(place - landscape.variants.begin())];
      CHECK(us <= 1.04 * landscape.best());
      slower += us / landscape.best() - 1;
      ++landscapes;
    }
  }
  REQUIRE(landscapes >= 40);
  CHECK(slower <= 0.01 * landscapes);
}

TEST_CASE("what the cost models prefer in an H200's layers is near the fastest") {
  struct Recorded {
    const char* file;
    int least;           // landscapes
    double worst, mean;  // relative time above the fastest
  };
  const auto recorded = GENERATE(Recorded{"attention-decode.txt", 55, 0.1, 0.02},
                                 Recorded{"attention-heads.txt", 15, 0.02, 0.005},
                                 Recorded{"experts-of-one-token.txt", 10, 0.05, 0.01});
  int landscapes = 0;
  double slower = 0;  // in all
  for (const Landscape& landscape : landscapes_of_layers(recorded.file)) {
    const auto preferred = static_cast<std::size_t>(
        std::min_element(landscape.estimates.begin(), landscape.estimates.end()) -
        landscape.estimates.begin());
    INFO(landscape.problem.text());
    CHECK(landscape.us[preferred] <= (1 + recorded.worst) * landscape.best());
    slower += landscape.us[preferred] / landscape.best() - 1;
    ++landscapes;
  }
  REQUIRE(landscapes >= recorded.least);
  CHECK(slower <= recorded.mean * landscapes);
}

TEST_CASE("gate and up of experts have more than one load of each weight in flight") {
  const Problem problem = canonical(
      builtin_catalog().op("moe-ffn"),
      {"moe-ffn",
       "fwd",
       DType::bf16,
       {{"d", 2880}, {"experts", 32}, {"h", 2880}, {"m", 16}, {"top-k", 4}},
       {{"act", "swiglu-oai"}, {"bias", "all"}, {"routing", "uniform"}, {"weights", "mxfp4"}}},
      DeviceKind::cuda);
  // An H200 took 110.1 and 96.6 us.
  const std::string rest = ",k_warps=1,unroll=", whole = ",split_k=1";
  CHECK(expected_us(problem, h200(), "gate_up_packed/tiles=4,row_warps=2" + rest + "1" + whole) >
        1.05 * expected_us(problem, h200(),
                           "gate_up_packed/tiles=1,row_warps=4" + rest + "2" + whole));
  // Its layer took 166 us with both products by packed_sm90, and 178 with `down` by the other.
  for (const char* family : {"gate_up_packed_sm90", "down_packed_sm90"})
    CHECK(family_of(builtin_catalog().op("moe-ffn"), family).is_preferred(problem, h200()));
}

TEST_CASE("products of 16 tokens take the faster of two kernels in an H200's layers, within 3%") {
  int products = 0;
  double slower = 0;  // in all
  for (const Landscape& landscape : landscapes_of_layers("products-of-16-tokens.txt")) {
    const auto is = [&](std::size_t i, const char* ending) {
      return landscape.variants[i].family.ends_with(ending);
    };
    double decode = infinity, sm90 = infinity;
    bool prefers_decode = false;
    for (std::size_t i = 0; i < landscape.us.size(); ++i) {
      if (is(i, "_sm90")) sm90 = landscape.us[i];
      if (!is(i, "_decode")) continue;
      decode = landscape.us[i];
      prefers_decode =
          family_of(builtin_catalog().op(landscape.problem.op), landscape.variants[i].family)
              .is_preferred(landscape.problem, h200());
    }
    if (decode == infinity || sm90 == infinity) continue;
    INFO(landscape.problem.text() << ": " << landscape.stages << ", " << decode << " and " << sm90);
    const double chosen = prefers_decode ? decode : sm90;
    CHECK(chosen <= 1.03 * std::min(decode, sm90));
    slower += chosen / std::min(decode, sm90) - 1;
    ++products;
  }
  REQUIRE(products >= 60);
  CHECK(slower <= 0.01 * products);
}

TEST_CASE("one token with packed weights takes the faster kernel, and about the time expected") {
  struct Timed {
    const char* weights;
    std::int64_t k, n, m;
    double sm90_us, decode_us;  // on an H100
    double epsilon = 0.1;
  };
  const auto timed = GENERATE(
      Timed{"int4", 4096, 4096, 1, 6.4, 7.1}, Timed{"int4", 4096, 6144, 1, 8.1, 8.8},
      Timed{"int4", 2048, 16384, 1, 9.4, 10.4}, Timed{"int4", 14336, 4096, 1, 13.8, 14.6},
      Timed{"int4", 2048, 8192, 1, 5.73, 7.30}, Timed{"int4", 8192, 2048, 8, 6.31, 8.58, 0.12},
      Timed{"int4", 512, 4096, 1, 2.95, 3.10}, Timed{"int4", 1024, 1024, 1, 3.21, 2.97},
      Timed{"mxfp4", 4096, 4096, 1, 7.11, 8.35, 0.16}, Timed{"fp8", 2048, 2048, 1, 5.00, 4.35},
      Timed{"nvfp4", 4096, 6144, 1, 10.20, 9.49});
  const auto facts = facts_of_architecture("sm_90a");
  const Op& op = builtin_catalog().op("linear");
  const Problem problem = canonical(op,
                                    {"linear",
                                     "fwd",
                                     DType::bf16,
                                     {{"k", timed.k}, {"m", timed.m}, {"n", timed.n}},
                                     {{"weights", timed.weights}}},
                                    DeviceKind::cuda);
  INFO(problem.text());
  CHECK(default_recipe(op, problem, facts).front().family ==
        (timed.sm90_us < timed.decode_us ? "packed_sm90" : "packed_decode"));
  const auto untuned = [&](const char* family) {
    return expected_us(problem, facts,
                       Variant{family, family_of(op, family).default_config(problem, facts)}.id());
  };
  CHECK(untuned("packed_sm90") == Approx(timed.sm90_us).epsilon(timed.epsilon));
  CHECK(untuned("packed_decode") == Approx(timed.decode_us).epsilon(timed.epsilon));
}

TEST_CASE("a head of 1 and 16 tokens takes the configuration that was fastest on an H100") {
  const auto tokens = GENERATE(1, 16);
  const Op& op = builtin_catalog().op("head");
  const Problem problem = canonical(
      op, {"head", "fwd", DType::bf16, {{"d", 2048}, {"m", tokens}, {"vocab", 128256}}, {}},
      DeviceKind::cuda);
  CHECK(family_of(op, "choose_decode")
            .default_config(problem, facts_of_architecture("sm_90a"))
            .text() == "rows=16,warps=4,unroll=8,blocks=2");
}

TEST_CASE("promoting narrow tiles of fp8 costs little beside loads, and scales of K blocks more") {
  const auto facts = facts_of_architecture("sm_90a");
  Problem problem = canonical(
      builtin_catalog().op("ffn"),
      {"ffn", "fwd", DType::fp8, {{"d", 4096}, {"h", 14336}, {"m", 64}}, {}}, DeviceKind::cuda);
  const std::string shared = ",cluster_m=1,cluster_n=1", one = ",epilogue_stages=1,group_m=8";
  const auto down = [&](const std::string& tile, const std::string& rest) {
    return expected_us(problem, facts, "down_sm90/" + tile + shared + rest + one);
  };
  // Times of an H100: 23.63 and 24.07.
  CHECK(down("bm=32,bn=64,schedule=swap_ab,mma_warpgroups=1", ",split_k=1,stages=12") ==
        Approx(down("bm=64,bn=64,schedule=swap_ab,mma_warpgroups=1", ",split_k=2,stages=12"))
            .epsilon(0.04));
  // 350.6 and 364 with one scale, and 403.8 and 496 with scales of blocks.
  const std::string high = "bm=256,bn=128,schedule=cooperative,mma_warpgroups=2";
  const std::string low = "bm=128,bn=128,schedule=cooperative,mma_warpgroups=2";
  problem.sizes["m"] = 4096;
  CHECK(down(low, ",split_k=1,stages=6") < 1.05 * down(high, ",split_k=1,stages=4"));
  problem.options["scales"] = "block";
  CHECK(down(low, ",split_k=1,stages=6") > 1.1 * down(high, ",split_k=1,stages=3"));
}

TEST_CASE("a last band of one row of tiles counts the weights that it reads again") {
  const auto facts = facts_of_architecture("sm_90a");
  const Problem problem = canonical(builtin_catalog().op("masked-ffn"),
                                    {"masked-ffn",
                                     "fwd",
                                     DType::bf16,
                                     {{"d", 4096}, {"h", 14336}, {"m", 1024}},
                                     {{"mask", "block:0.33"}}},
                                    DeviceKind::cuda);
  const auto bands = [&](std::int64_t rows, const char* group_m) {
    return expected_us(problem, facts,
                       "gate_up_sm90/bm=" + std::to_string(rows) +
                           ",bn=128,schedule=swap_ab,mma_warpgroups=2,cluster_m=1,cluster_n=1,"
                           "split_k=1,stages=4,epilogue_stages=1,group_m=" +
                           group_m);
  };
  // Nine rows of tiles took 370 us on an H100, and 343 in one band.
  CHECK(bands(120, "8") == Approx(370.0 / 343 * bands(120, "16")).epsilon(0.03));
  CHECK(bands(128, "8") > 1.05 * bands(128, "16"));  // three and six
  CHECK(bands(144, "8") == bands(144, "16"));        // three and five
}

TEST_CASE("winners of other shapes serve where they are as fast as what the cost model prefers") {
  std::vector<Landscape> all;
  for (const auto& folder : landscape_folders())
    for (auto& landscape : recorded_landscapes(folder)) all.push_back(std::move(landscape));
  struct Mean {
    double sum = 0;
    int count = 0;
    double value() const { return sum / count; }
  };
  Mean served, refused;  // times of winners over those of the variants that the model prefers
  for (const auto& own : all) {
    const auto preferred = static_cast<std::size_t>(
        std::min_element(own.estimates.begin(), own.estimates.end()) - own.estimates.begin());
    for (const auto& other : all) {
      if (other.problem == own.problem || other.problem.op != own.problem.op ||
          other.problem.options != own.problem.options || other.stages != own.stages)
        continue;
      const auto winner = static_cast<std::size_t>(
          std::min_element(other.us.begin(), other.us.end()) - other.us.begin());
      const auto here = static_cast<std::size_t>(
          std::find(own.variants.begin(), own.variants.end(), other.variants[winner]) -
          own.variants.begin());
      if (here == own.variants.size() || here == preferred || !is_of_the_engine(own.variants[here]))
        continue;
      const double ratio = own.us[here] / own.us[preferred];
      if (!std::isfinite(ratio)) continue;
      const bool is_far =
          !far_words(builtin_catalog().op(own.problem.op), own.problem, other.problem).empty();
      const double misfit = own.estimates[here] / own.estimates[preferred];
      if (misfit > 1.05) continue;  // no rule served these
      Mean& mean = misfit <= most_misfit(is_far) ? served : refused;
      mean.sum += ratio;
      ++mean.count;
    }
  }
  CAPTURE(served.count, refused.count);
  REQUIRE(served.count >= 5);
  REQUIRE(refused.count >= 20);
  CHECK(served.value() < 1.01);
  CHECK(refused.value() > 1.01);
}

TEST_CASE(
    "a tile that just holds the expected tokens of a random mask counts what more would cost") {
  const auto facts = h200();
  const auto estimate = [&](const std::string& mask, std::int64_t bm) {
    Problem problem;
    problem.op = "masked-ffn";
    problem.pass = "fwd";
    problem.dtype = DType::bf16;
    problem.sizes = {{"d", 2048}, {"h", 5632}, {"m", 333}};
    problem.options = {{"act", "silu"}, {"mask", mask}};
    for (const Family* family : builtin_catalog().op(problem.op).families())
      if (family->name() == "gate_up_sm90") {
        Config config = family->default_config(problem, facts);
        for (const auto& [name, value] :
             std::initializer_list<std::pair<const char*, ParameterValue>>{{"bm", bm},
                                                                           {"bn", 128},
                                                                           {"schedule", "swap_ab"},
                                                                           {"mma_warpgroups", 2},
                                                                           {"cluster_m", 1},
                                                                           {"cluster_n", 1},
                                                                           {"split_k", 1},
                                                                           {"stages", 3},
                                                                           {"epilogue_stages", 1},
                                                                           {"group_m", 8},
                                                                           {"a_reuse", 1}})
          config.set(name, value);
        return family->estimate(problem, facts, config).value();
      }
    return 0.0;
  };
  // Both gather 300 of the tokens for one expert and 33 for the other: evenly spread ones exactly,
  // and so in two tiles of 152 and a wave of 132 tiles; of random ones, often in three.
  CHECK(estimate("random:0.9", 152) > 1.1 * estimate("even:0.9", 152));
  // Tiles of 80 hold 320 and 80.
  CHECK(estimate("random:0.9", 80) == Approx(estimate("even:0.9", 80)));
  CHECK(estimate("random:0.9", 152) == Approx(estimate("random:0.1", 152)));
}

TEST_CASE("untuned choices are near the winners on record of an H100") {
  const auto facts = facts_of_architecture("sm_90a");
  constexpr int least_measured = 8;
  int stages = 0, known = 0;
  double slower = 0;  // in all that are known
  for (const auto& entry :
       std::filesystem::directory_iterator(FFTUNE_SOURCE_DIR "/presets/nvidia-h100-80gb-hbm3")) {
    const PresetFile file = read_preset_file(entry.path());
    REQUIRE(file.complaints.empty());
    for (const PresetRecord& record : file.records) {
      const Op& op = builtin_catalog().op(record.problem.op);
      const Problem problem = canonical(op, record.problem, DeviceKind::cuda);
      for (const Variant& untuned : default_recipe(op, problem, facts))
        for (const StageRecord& stage : record.stages) {
          const auto own = family_of(op, untuned.family).stages();
          if (own != stage.stages || stage.measured < least_measured) continue;
          ++stages;
          double us = untuned == stage.variant ? stage.median_us : 0;
          for (const auto* others : {&stage.ties, &stage.runners_up})
            for (const Timed& other : *others)
              if (other.id == untuned.id()) us = other.median_us;
          if (us == 0) continue;  // behind the runners-up, or of another family
          ++known;
          INFO(record.problem.text() << ": " << untuned.id());
          CHECK(us <= 1.1 * stage.median_us);
          slower += us / stage.median_us - 1;
        }
    }
  }
  CAPTURE(stages, known, slower);
  CHECK(known >= 20);
  CHECK(known >= 0.8 * stages);
  CHECK(slower <= 0.02 * known);
}
