// pack-weight: every family against the reference, and the way back.
#include <random>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/pack_weight/pack_weight.hpp"
#include "support/op_reference.hpp"
#include "support/op_run.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem problem_of(std::int64_t n, std::int64_t k, DType dtype, const std::string& group,
                   const std::string& zeros, const std::string& direction) {
  return {
      "pack-weight",
      "fwd",
      dtype,
      {{"n", n}, {"k", k}},
      group == "mxfp4" || group == "nvfp4" || group == "fp8" || group == "int8"
          ? std::map<std::string, std::string>{{"weights", group},
                                               {"group", group.ends_with("fp4") ? "128" : "32"},
                                               {"direction", direction}}
          : std::map<std::string, std::string>{
                {"weights", "int4"}, {"group", group}, {"zeros", zeros}, {"direction", direction}}};
}

void verify_both_ways(Backend& backend) {
  std::mt19937_64 random(1);
  for (const DType dtype : pack_weight_op().dtypes(backend.facts().kind))
    for (const auto& [n, k] : {std::pair{1, 1}, {5, 7}, {37, 48}, {40, 96}, {130, 416}})
      for (const char* group : {"row", "32", "mxfp4", "nvfp4", "fp8", "int8"})
        for (const char* zeros : {"no", "yes"})
          for (const char* direction : {"pack", "unpack"}) {
            const int divisor = group == std::string("row")     ? 1
                                : group == std::string("nvfp4") ? 16
                                                                : 32;
            if (k % divisor != 0) continue;
            const Problem problem =
                canonical(pack_weight_op(), problem_of(n, k, dtype, group, zeros, direction),
                          backend.facts().kind);
            REQUIRE(verify_variants(backend, pack_weight_op(), problem, random, 0) == 1);
          }
}

/// Packing and unpacking gives the same bytes, in every tensor.
void check_round_trip(Backend& backend) {
  for (const auto& [n, k, group] : {std::tuple{1, 2, "row"},
                                    {37, 96, "32"},
                                    {64, 1024, "32"},
                                    {37, 48, "nvfp4"},
                                    {64, 1024, "nvfp4"}})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const bool zeros = group != std::string("nvfp4");
      const auto form = [&, n = n, k = k, group = group](const char* direction) {
        return canonical(pack_weight_op(), problem_of(n, k, dtype, group, "yes", direction),
                         backend.facts().kind);
      };
      const Problem there = form("pack"), back = form("unpack");
      OpRun pack(backend, pack_weight_op(), there), unpack(backend, pack_weight_op(), back);
      pack.run(pack_weight_op(), there, default_recipe(pack_weight_op(), there, backend.facts()));
      for (const char* name : {"w", "w_scale"}) unpack.write(name, pack.bytes(name));
      if (zeros) unpack.write("w_zero", pack.bytes("w_zero"));
      unpack.run(pack_weight_op(), back, default_recipe(pack_weight_op(), back, backend.facts()));
      const pack_weight::PlainNames given = pack_weight::plain_names(there),
                                    got = pack_weight::plain_names(back);
      CHECK(unpack.bytes(got.codes) == pack.bytes(given.codes));
      CHECK(unpack.bytes(got.scale) == pack.bytes(given.scale));
      if (zeros)
        CHECK(unpack.bytes(got.zero) == pack.bytes(given.zero));
      else
        CHECK(unpack.bytes(got.row_scale) == pack.bytes(given.row_scale));
    }
}

}  // namespace

TEST_CASE("pack-weight is in the catalog, and packs by hand") {
  check_registration(pack_weight_op());
  const Problem problem = canonical(
      pack_weight_op(), problem_of(2, 3, DType::f32, "row", "yes", "pack"), DeviceKind::cpu);
  // Codes 1 2 3 and 15 0 8, as linear's reference reads them.
  const auto tensors = run_reference(
      problem, {{"codes", {1 + 2 * 16, 3, 15, 8}}, {"scale", {2, 0.5}}, {"zero", {1, 8}}});
  CHECK(tensors.at("w")[512] == 1 + 15 * 16);
  CHECK(tensors.at("w")[514] == 2);
  CHECK(tensors.at("w")[512 + 16] == 3 + 8 * 16);
  CHECK(tensors.at("w_scale")[0] == 2);
  CHECK(tensors.at("w_zero")[1] == 8);
  CHECK(tensors.at("w")[0] == 'f');
  CHECK(tensors.at("w")[8] == 2);
  CHECK(tensors.at("w")[12] == 3);
}

TEST_CASE("pack-weight is right on the CPU in both directions, and comes back") {
  const auto backend = open_cpu();
  verify_both_ways(*backend);
  check_round_trip(*backend);
}

TEST_CASE("pack-weight is right on a GPU in both directions, and comes back", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  verify_both_ways(*backend);
  check_round_trip(*backend);
}

TEST_CASE("a packed weight of other sizes is not unpacked") {
  const auto backend = open_cpu();
  const auto form = [&](std::int64_t k, const char* direction) {
    return canonical(pack_weight_op(), problem_of(16, k, DType::f32, "row", "no", direction),
                     DeviceKind::cpu);
  };
  const Problem there = form(100, "pack"), back = form(128, "unpack");
  OpRun pack(*backend, pack_weight_op(), there), unpack(*backend, pack_weight_op(), back);
  pack.run(pack_weight_op(), there, default_recipe(pack_weight_op(), there, backend->facts()));
  unpack.write("w", pack.bytes("w"));
  std::string reason;
  try {
    unpack.run(pack_weight_op(), back, default_recipe(pack_weight_op(), back, backend->facts()));
  } catch (const Error& error) {
    reason = error.what();
  }
  CHECK(reason == "the packed weight is [16, 100], not [16, 128]");
}
