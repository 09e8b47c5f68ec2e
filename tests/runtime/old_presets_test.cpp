// Records of schema 2 serve as they did before parameters were renamed.
#include <algorithm>
#include <filesystem>
#include <string>

#include "cpu/open.hpp"
#include "registry/catalog.hpp"
#include "runtime/choice.hpp"
#include "store/renamed_parameters.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;

namespace {

const std::filesystem::path old_presets = FFTUNE_SOURCE_DIR "/tests/data/presets-schema-2";

DeviceFacts h200() {
  auto facts = facts_of_architecture("sm_90a");
  facts.name = "NVIDIA H200";
  return facts;
}

}  // namespace

TEST_CASE("a record of schema 2 and its form of schema 3 choose the same variants") {
  const auto facts = h200();
  const Catalog& catalog = builtin_catalog();
  const testing::TemporaryFolder folder;
  for (const auto& file : read_preset_folder(old_presets))
    merge_preset_records(folder.path(), file.device, file.op, file.records);
  const auto old = PresetLibrary::load({old_presets});
  const auto now = PresetLibrary::load({folder.path()});
  REQUIRE(old.complaints().empty());
  REQUIRE(now.complaints().empty());
  std::size_t chosen = 0;
  for (const auto& file : old.files())
    for (const auto& record : file.records) {
      const Op& op = catalog.op(file.op);
      const auto before = choose(catalog, op, record.problem, facts, old);
      const auto after = choose(catalog, op, record.problem, facts, now);
      INFO(record.problem.text() << ": " << before.reason);
      // Legal here: each parameter has a name and a value that its family knows.
      CHECK(record_illegality(op, record.problem, facts, record).empty());
      REQUIRE(before.preset);
      REQUIRE(after.preset);
      CHECK(before.recipe == record.recipe());
      CHECK(before.recipe == after.recipe);
      ++chosen;
    }
  CHECK(chosen >= 25);
}

TEST_CASE("a parameter that a family does not know and a bad word are one line that names them") {
  const auto facts = h200();
  const Op& op = builtin_catalog().op("ffn");
  const auto file = read_preset_file(old_presets / "nvidia-h200" / "ffn.json");
  const auto found = std::find_if(file.records.begin(), file.records.end(), [](const auto& record) {
    return record.stages[0].variant.family == "gate_up_sm90";
  });
  REQUIRE(found != file.records.end());
  const auto reason = [&](const std::string& name, const ParameterValue& value) {
    auto record = *found;
    record.stages[0].variant.config.set(name, value);
    return record_illegality(op, record.problem, facts, record);
  };
  CHECK(reason("consumers", 2).find("there is no parameter 'consumers'") != std::string::npos);
  CHECK(reason("schedule", "ping-pong")
            .find("schedule=ping-pong is not one of cooperative, pingpong, swap_ab") !=
        std::string::npos);
  CHECK(reason("schedule", 1).find("schedule=1 is not one of cooperative") != std::string::npos);
  CHECK(reason("bm", "large").find("bm=large is not one of 8, 16") != std::string::npos);
  for (const auto& value : {ParameterValue("ping-pong"), ParameterValue(1)})
    CHECK(reason("schedule", value).find('\n') == std::string::npos);
}

TEST_CASE("variants of the CPU with old names are legal once they are renamed") {
  const auto facts = cpu_facts();
  const Catalog& catalog = builtin_catalog();
  const auto [op_name, pass, id] = GENERATE(table<std::string, std::string, std::string>({
      {"ffn", "fwd", "cpu_blas/token_block=32,inter_block=64,threads=1,fused=0"},
      {"ffn", "bwd", "cpu_d_x_blas/rows=32,columns=64,threads=1"},
      {"linear", "fwd", "cpu_blas/rows=32,columns=64,threads=1"},
      {"masked-linear", "fwd", "cpu_blas/token_block=32,feature_block=64,threads=1"},
      {"masked-linear", "bwd", "cpu_dw_blas/rows=32,columns=64,threads=1"},
      {"act-mul", "fwd", "cpu_rows/rows=1,threads=1,streams=0"},
      {"rmsnorm", "fwd", "cpu_forward/rows=1,threads=1,streams=1"},
      {"bias-gelu", "bwd", "cpu_backward/threads=1,parts=1,streams=0"},
  }));
  const Op& op = catalog.op(op_name);
  Problem problem;
  problem.op = op_name;
  problem.pass = pass;
  problem.dtype = DType::f32;
  for (const auto& size : op.sizes())
    if (!size.rare) problem.sizes[size.name] = 256;
  problem = canonical(op, problem, DeviceKind::cpu);
  Variant variant = Variant::parse(id);
  const Config usual = family_of(op, variant.family).default_config(problem, facts);
  variant.config.set("threads", usual.at("threads"));  // which there are depends on the processor
  CHECK_FALSE(illegality(op, problem, facts, variant).empty());
  const auto reason =
      illegality(op, problem, facts, completed(op, problem, facts, renamed(variant)));
  INFO(problem.text() << ": " << id << ": " << reason);
  CHECK(reason.empty());
}
