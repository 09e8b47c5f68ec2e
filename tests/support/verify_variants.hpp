// Verifying variants of an op on a device.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "runtime/devices.hpp"
#include "runtime/environment.hpp"
#include "support/catch.hpp"
#include "verify/host_threads.hpp"
#include "verify/verifier.hpp"

namespace fftune::test {

/// The first CUDA device, or null where there is none.
std::unique_ptr<Backend> open_first_cuda();

/// Defines `name`, a pointer to it; the test case is skipped where there is none.
#define FFTUNE_FIRST_CUDA(name)                      \
  const auto name = fftune::test::open_first_cuda(); \
  if (!name) FFTUNE_SKIP("there is no CUDA device here")

/// test(backend) on it.
template <class Test>
void on_first_cuda(const Test& test) {
  FFTUNE_FIRST_CUDA(backend);
  test(*backend);
}

/// Whether a test is for a family.
using Chosen = bool (*)(const Family&);
bool every_family(const Family&);
bool reads_packed_weights(const Family& family);

/// A variant to verify.
struct DrawnVariant {
  const Family* family;
  Config config;
  std::size_t first_stage, stage_count;
};

/// The place of the family's first stage, which has to be there, among a problem's.
std::size_t first_stage_of(const Family& family, const std::vector<StageSpec>& stages);

/// The default and `more` feasible configurations of every chosen family that serves the problem on
/// the stages that it covers.
std::vector<DrawnVariant> draw_variants(const DeviceFacts& facts, const Op& op,
                                        const Problem& problem, std::mt19937_64& random, int more,
                                        Chosen chosen = every_family);

/// Variants one after the other: poisoned outputs, guards, the same bits twice, the error. A
/// failure does not end the test, so that one run on a device shows all.
void verify_run(Verifier& verifier, const std::vector<DrawnVariant>& variants,
                const std::vector<CompileResult>& compiled);

void verify_variant(Verifier& verifier, const DrawnVariant& variant, const CompileResult& compiled);

/// Draws, compiles and verifies; returns how many variants there were.
int verify_variants(Backend& backend, const Op& op, const Problem& problem, std::mt19937_64& random,
                    int more);

/// The recipe on all of the op's stages: what one stage writes is what the next one reads.
void verify_recipe(Backend& backend, const Op& op, const Problem& problem, const Recipe& recipe,
                   std::uint64_t seed);

/// On each problem: the default and `more` feasible configurations of every chosen family on the
/// stages that it covers; the default recipe and the fallback on all stages. Those of several
/// problems are compiled together, on all cores: one after the other, that is nearly all of the
/// time that small problems take on a GPU.
void verify_families(Backend& backend, const Op& op, const std::vector<Problem>& problems,
                     std::mt19937_64& random, int more, Chosen chosen = every_family);

}  // namespace fftune::test
