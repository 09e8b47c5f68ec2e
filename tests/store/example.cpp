#include "store/example.hpp"

namespace fftune::example {

Problem ffn(std::int64_t m, DType dtype) {
  return {"ffn", "fwd", dtype, {{"m", m}, {"d", 1024}, {"h", 2048}}, {{"act", "silu"}}};
}

PresetRecord record(const Problem& problem, double median_us) {
  PresetRecord record;
  record.problem = problem;
  StageRecord gate_up;
  gate_up.stages = {"gate_up"};
  gate_up.variant = {"gate_up_sm90",
                     {{"bm", 128}, {"bn", 64}, {"schedule", "pingpong"}, {"stages", 4}}};
  gate_up.source_hash = "0123456789abcdef";
  gate_up.median_us = 12.345678;
  gate_up.ties = {{"gate_up_sm90/bm=64,schedule=pingpong,stages=4", 12.4, "00000000000000b1"}};
  gate_up.bits = "00000000000000b1";
  gate_up.runners_up = {{"gate_up_sm90/bm=64,schedule=cooperative,stages=3", 13},
                        {"gate_up_simple", 99.999}};
  gate_up.feasible = 187;
  gate_up.measured = 140;
  gate_up.failed = 2;
  StageRecord down;
  down.stages = {"down"};
  down.variant = {"down_simple", {}};
  down.source_hash = "fedcba9876543210";
  down.median_us = 7.5;
  down.feasible = 1;
  down.measured = 1;
  record.stages = {gate_up, down};
  record.verdict = {median_us, median_us - 0.05, median_us + 0.1, 0.00812, 0.61234,
                    "memory",  1.2345,           "halving",       true};
  record.verdict.decided = true;
  record.verdict.untuned_ratio = 1.0499;
  record.verdict.disturbances = {"2 other processes run on the device"};
  record.error = 2.0871e-3;
  record.tolerance = 3.5e-3;
  record.provenance = {"0.1.0", "NVIDIA H200",          "580.159",          "13.0",
                       1980,    "2026-11-21T14:03:22Z", 0xfedcba9876543210u};
  return record;
}

PresetRecord record(const Catalog& catalog, const Op& op, const Problem& problem,
                    const Recipe& recipe) {
  PresetRecord all = record(problem);
  const StageRecord any_stage = all.stages.front();
  all.stages.clear();
  for (const Variant& variant : recipe) {
    const Family& family = family_of(op, variant.family);
    StageRecord& stage = all.stages.emplace_back(any_stage);
    stage.stages = family.stages();
    stage.variant = variant;
    stage.source_hash = catalog.sources->hash(family.sources());
  }
  return all;
}

PresetDevice device() {
  return {"nvidia-h200", "NVIDIA H200", DeviceKind::cuda, "sm_90a", 132, {"NVIDIA H200 NVL"}};
}

std::string text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace fftune::example
