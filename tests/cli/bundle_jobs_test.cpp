// Which programs a bundle holds: those of every device that its architecture has.
#include "apps/fftune/compile/bundle_jobs.hpp"

#include <set>
#include <string>

#include "runtime/token_segments.hpp"
#include "support/catch.hpp"

using namespace fftune;
using fftune::tool::BundleJobs;

namespace {

/// As an H200's driver has them.
DeviceFacts h200() {
  DeviceFacts facts = facts_of_architecture("sm_90a");
  facts.name = "NVIDIA H200";
  facts.l2_bytes = 62914560;
  facts.memory_bytes = 150109880320;
  facts.memory_bandwidth = 4.814304e12;
  facts.clock_hz = 1.98e9;
  return facts;
}

}  // namespace

TEST_CASE("a bundle has the kernels that each device of its architecture chooses") {
  const Catalog& catalog = builtin_catalog();
  const PresetLibrary none;
  for (const char* name : {"ffn", "linear"}) {
    const Op& op = catalog.op(name);
    Problem most{name, "fwd", DType::bf16, {}, {}};
    for (const auto& size : op.sizes())
      if (!size.rare) most.sizes[size.name] = size.example;
    most.sizes["m"] = 4096;
    most = canonical(op, most, DeviceKind::cuda);

    BundleJobs jobs(catalog, none, "sm_90a");
    jobs.add_any_tokens(op, most);
    CHECK(jobs.skipped().empty());
    std::set<std::string> bundled;
    for (const auto& job : jobs.take())
      for (const auto& kernel : family_of(op, job.variant.family)
                                    .program(job.problem, job.facts, job.variant.config)
                                    .kernels)
        bundled.insert(kernel.file + kernel.expression);

    auto devices = products_of_architecture("sm_90a");
    devices.push_back(h200());
    for (const DeviceFacts& facts : devices)
      for (const auto& segment : token_segments(catalog, op, most, facts, none))
        for (const auto tokens : scanned_tokens(segment))
          for (const Variant& variant : segment.choice.recipe)
            for (const auto& kernel :
                 family_of(op, variant.family)
                     .program(most.with_size("m", tokens), facts, variant.config)
                     .kernels)
              if (!bundled.contains(kernel.file + kernel.expression))
                FAIL(facts.name << ", m=" << tokens << ": " << kernel.expression);
  }
}
