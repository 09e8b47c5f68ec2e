// Names of before schema 3: records that have them are read as if they had today's.
#include "store/renamed_parameters.hpp"

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>

#include "store/example.hpp"
#include "store/json.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;

namespace {

const std::filesystem::path old_presets = FFTUNE_SOURCE_DIR "/tests/data/presets-schema-2";

/// Every name that the format had before schema 3 and has no more, of families where it was in use.
const std::set<std::string> old_names{
    "consumers", "output_boxes", "turns", "gatherers", "sorts",       "patient",    "late",
    "early",     "ahead",        "asked", "streams",   "token_block", "inter_block"};

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  const auto place = text.find(what);
  REQUIRE(place != std::string::npos);
  return text.replace(place, what.size(), by);
}

/// The file with one record of gate_up_sm90 whose parameters are the JSON members `parameters`.
PresetFile file_with(int schema, const std::string& parameters) {
  auto text = preset_text(example::device(), "ffn", {example::record(example::ffn(16))});
  text = replaced(text, "\"schema\": 3", "\"schema\": " + std::to_string(schema));
  text = replaced(text, R"("bm": 128, "bn": 64, "schedule": "pingpong", "stages": 4)", parameters);
  return parse_preset_text(text, "a.json");
}

}  // namespace

TEST_CASE("each old name is read as today's, and a number of a schedule as its word") {
  const auto [was, is] = GENERATE(table<std::string, std::string>({
      {"gate_up_sm90/bm=128,bn=96,schedule=1,consumers=2,cluster_m=1,stages=4,output_boxes=1",
       "gate_up_sm90/bm=128,bn=96,schedule=pingpong,mma_warpgroups=2,cluster_m=1,stages=4,"
       "epilogue_stages=1"},
      {"product_sm90/schedule=0,group_m=8", "product_sm90/schedule=cooperative,group_m=8"},
      {"d_w_sm90/schedule=2,group_m=8", "d_w_sm90/schedule=swap_ab,group_m=8"},
      {"dx_sm90/schedule=0,turns=4", "dx_sm90/schedule=cooperative,a_reuse=4"},
      {"dw_sm90/sorts=1,gatherers=2", "dw_sm90/pre_permute=1,gather_warps=2"},
      {"ffn_decode/rows=16,warps=8,patient=1,late=0",
       "ffn_decode/rows=16,warps=8,poll_first=1,late_down=0"},
      {"cpu_blas/token_block=128,inter_block=256,threads=8,fused=1",
       "cpu_blas/block_m=128,block_n=256,threads=8,fused=1"},
      {"cpu_gate_up_blas/token_block=32,inter_block=64,threads=1,fused=0",
       "cpu_gate_up_blas/block_m=32,block_n=64,threads=1,fused=0"},
      {"cpu_dx_blas/token_block=128,feature_block=1024,threads=8",
       "cpu_dx_blas/block_m=128,block_n=1024,threads=8"},
      {"cpu_dw_blas/rows=512,columns=64,threads=8", "cpu_dw_blas/block_m=512,block_n=64,threads=8"},
      {"norm_rows/vector=16,streams=0,keep=1,early=1",
       "norm_rows/vector=16,evict_first=0,keep=1,l2_prefetch=1"},
      {"rows/threads=128,early=0", "rows/threads=128,l2_prefetch=0"},
      {"backward_rows/keep=0,ahead=1,asked=2,streams=1",
       "backward_rows/keep=0,prefetch=1,l2_prefetch_rows=2,evict_first=1"},
      {"forward_columns/columns=64,rows=2,streams=1",
       "forward_columns/columns=64,rows=2,evict_first=1"},
      {"cpu_gradient_rows/rows=16,threads=4,streams=1",
       "cpu_gradient_rows/rows=16,threads=4,nontemporal=1"},
      {"cpu_backward/threads=4,parts=2,streams=0", "cpu_backward/threads=4,parts=2,nontemporal=0"},
      {"gate_up_decode/rows=16,warps=2,unroll=2,split_k=1 + down_sm90/schedule=2,consumers=1",
       "gate_up_decode/rows=16,warps=2,unroll=2,split_k=1 + "
       "down_sm90/schedule=swap_ab,mma_warpgroups=1"},
  }));
  CHECK(renamed_id(was) == is);
  CHECK(renamed_id(is) == is);
  if (was.find(" + ") == std::string::npos)
    CHECK(renamed(Variant::parse(was)) == Variant::parse(is));
}

TEST_CASE("names without a new form stay as they are") {
  for (const char* id :
       {"gate_up_sm80/bm=16,bn=64,bk=64,warps_m=1,warps_n=4,stages=4,split_k=1,group_m=1",
        "gate_up_decode/rows=8,warps=4,unroll=1,split_k=2", "down_fallback",
        "cpu_tiles/token_block=48,row_block=24,depth_block=512,pack=1,threads=8",
        "forward_rows/heads=2,tokens=4,passes=1", "other_family/schedule=1,consumers=2,early=1",
        // No word stands for 7, and a name that is there twice over is for people to repair.
        "down_sm90/schedule=7", "down_sm90/schedule=-1", "down_sm90/consumers=1,mma_warpgroups=2",
        "no id", "", " + ", "a/b"})
    CHECK(renamed_id(id) == id);
}

TEST_CASE("a record with old names and the same one with new names read alike, in any schema") {
  const auto now = file_with(3, R"("bm": 128, "schedule": "pingpong", "mma_warpgroups": 2)");
  REQUIRE(now.complaints.empty());
  for (const int schema : {1, 2, 3}) {
    const auto old = file_with(schema, R"("bm": 128, "schedule": 1, "consumers": 2)");
    CAPTURE(old.complaints);
    REQUIRE(old.complaints.empty());
    CHECK(old.records[0].recipe() == now.records[0].recipe());
    CHECK(preset_text(old.device, old.op, old.records) ==
          preset_text(now.device, now.op, now.records));
  }
}

TEST_CASE("files of schema 2 are merged into files of schema 3 and lose nothing but old names") {
  const testing::TemporaryFolder folder;
  std::size_t records = 0;
  for (const auto& old : read_preset_folder(old_presets)) {
    CAPTURE(old.path, old.complaints);
    REQUIRE(old.complaints.empty());
    const auto text = example::text(old.path);
    REQUIRE(text.find("\"schema\": 2,") != std::string::npos);
    const auto path = merge_preset_records(folder.path(), old.device, old.op, old.records);
    const auto written = example::text(path);
    REQUIRE(written.find("\"schema\": 3,") != std::string::npos);
    const auto merged = read_preset_file(path);
    REQUIRE(merged.complaints.empty());
    REQUIRE(merged.records.size() == old.records.size());
    REQUIRE(preset_text(merged.device, merged.op, merged.records) == written);
    // As many parameters as there were, each of a value that it had or of its word, and the rest of
    // the file as it was.
    auto before = parse_json(text), after = parse_json(written);
    const auto& were = std::get<JsonValue::Array>(before.find("records")->data);
    const auto& are = std::get<JsonValue::Array>(after.find("records")->data);
    for (std::size_t i = 0; i < were.size(); ++i) {
      ++records;
      for (const char* field : {"problem", "verdict", "error", "tolerance", "provenance"})
        CHECK(json_line(*were[i].find(field)) == json_line(*are[i].find(field)));
      const auto& stages_were = std::get<JsonValue::Array>(were[i].find("stages")->data);
      const auto& stages_are = std::get<JsonValue::Array>(are[i].find("stages")->data);
      REQUIRE(stages_were.size() == stages_are.size());
      for (std::size_t s = 0; s < stages_were.size(); ++s) {
        for (const char* field : {"stages", "family", "source_hash", "median_us", "feasible"})
          CHECK(json_line(*stages_were[s].find(field)) == json_line(*stages_are[s].find(field)));
        const auto& p_were = std::get<JsonValue::Object>(stages_were[s].find("parameters")->data);
        const auto& p_are = std::get<JsonValue::Object>(stages_are[s].find("parameters")->data);
        REQUIRE(p_were.size() == p_are.size());
        for (std::size_t p = 0; p < p_were.size(); ++p) {
          INFO(p_were[p].first << " and " << p_are[p].first);
          CHECK_FALSE(old_names.contains(p_are[p].first));
          if (p_are[p].first == "schedule")
            CHECK(p_are[p].second.get_if<std::string>());
          else
            CHECK(json_line(p_were[p].second) == json_line(p_are[p].second));
        }
      }
    }
    for (const auto& name : old_names) {
      CAPTURE(name);
      CHECK(written.find(name + "=") == std::string::npos);
    }
  }
  CHECK(records >= 25);
}

TEST_CASE("a pattern of families has one star, and fits the families of parts") {
  CHECK(fits_family("*_sm90", "gate_up_sm90"));
  CHECK(fits_family("*_sm90", "ffn.gate_up_sm90"));
  CHECK(fits_family("ffn_decode", "part.ffn_decode"));
  CHECK(!fits_family("*_sm90", "gate_up_sm80"));
  CHECK(!fits_family("a*a", "a"));
}
