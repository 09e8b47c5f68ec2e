#include "device/facts.hpp"

#include <random>
#include <string>

#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("a device's folder is named after it") {
  REQUIRE(slug_of("NVIDIA H200") == "nvidia-h200");
  REQUIRE(slug_of("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb");
  REQUIRE(slug_of("Intel(R) Xeon(R) CPU @ 2.20GHz") == "intel-r-xeon-r-cpu-2-20ghz");
  REQUIRE(slug_of("") == "unknown");
  REQUIRE(slug_of("../..") == "unknown");
}

TEST_CASE("a CPU's presets have a folder for each number of cores, a GPU's one") {
  DeviceFacts facts;
  facts.name = "AMD EPYC 7763";
  facts.multiprocessors = 8;
  REQUIRE(facts.slug() == "amd-epyc-7763-on-8-cores");
  facts.multiprocessors = 1;
  REQUIRE(facts.slug() == "amd-epyc-7763-on-1-core");
  facts.kind = DeviceKind::cuda;
  REQUIRE(facts.slug() == "amd-epyc-7763");
}

TEST_CASE("any name becomes a safe folder name, and a slug stays as it is") {
  std::mt19937 random(3);
  for (int i = 0; i < 5000; ++i) {
    std::string name(random() % 40, ' ');
    for (char& c : name) c = static_cast<char>(random());
    const std::string slug = slug_of(name);
    REQUIRE_FALSE(slug.empty());
    REQUIRE(slug.front() != '-');
    REQUIRE(slug.back() != '-');
    REQUIRE(slug.find("--") == slug.npos);
    for (const char c : slug)
      REQUIRE(((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'));
    REQUIRE(slug_of(slug) == slug);
  }
}

TEST_CASE("every known architecture has plausible facts") {
  const auto known = known_architectures();
  REQUIRE(known.size() == 6);
  for (const auto& arch : known) {
    CAPTURE(arch);
    const DeviceFacts facts = facts_of_architecture(arch);
    REQUIRE(facts.kind == DeviceKind::cuda);
    REQUIRE(facts.arch == arch);
    REQUIRE(arch.rfind("sm_" + std::to_string(facts.compute_capability), 0) == 0);
    REQUIRE(facts.multiprocessors > 0);
    // The hardware keeps 1 KiB of shared memory for each block.
    REQUIRE(facts.shared_bytes_per_multiprocessor - facts.shared_bytes_per_block == 1024);
    REQUIRE(facts.shared_bytes_per_block >= 99 << 10);
    REQUIRE(facts.l2_bytes < facts.memory_bytes);
    REQUIRE(facts.memory_bandwidth > 5e11);
    REQUIRE(facts.clock_hz > 1e9);
    REQUIRE_FALSE(facts.slug().empty());
  }
}

TEST_CASE("an unknown architecture is refused with the known ones") {
  for (const char* arch : {"", "sm_90", "sm_80 ", "90a"})
    REQUIRE_THROWS_WITH(facts_of_architecture(arch),
                        "unknown architecture '" + std::string(arch) +
                            "': use one of sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120a");
}
