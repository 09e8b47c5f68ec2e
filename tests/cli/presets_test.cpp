// Preset files: shown, compared, merged; and damaged ones named and skipped.
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "registry/catalog.hpp"
#include "sandbox.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune::testing;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t place = text.find(from);
  REQUIRE(place != std::string::npos);
  return text.replace(place, from.size(), to);
}

/// The same value with the fields of every object in the opposite order.
ordered_json reversed(const ordered_json& value) {
  ordered_json other = value;
  if (value.is_object()) {
    other = ordered_json::object();
    for (auto field = value.rbegin(); field != value.rend(); ++field)
      other[field.key()] = reversed(field.value());
  } else if (value.is_array()) {
    for (ordered_json& each : other) each = reversed(each);
  }
  return other;
}

}  // namespace

TEST_CASE("records are shown, merged and compared") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1,4");
  CHECK(sandbox.fftune("presets show").out.find("m=4") != std::string::npos);

  CHECK(sandbox.fftune("presets merge presets --out copy").code == 0);
  CHECK(text_of(sandbox.preset_file("copy")) == text_of(path));
  CHECK(sandbox.fftune("presets diff presets copy").out == "no differences\n");

  sandbox.tuned("2");
  const Finished diff = sandbox.fftune("presets diff copy presets --json");
  REQUIRE(diff.code == 0);
  const json changes = json_of(diff.out);
  REQUIRE(changes.size() == 1);
  CHECK(changes.at(0).at("change") == "added");
  CHECK(changes.at(0).at("problem").get<std::string>().find("m=2") != std::string::npos);
  // With --exit-code a record that was removed is a failure, and one that was added is none.
  CHECK(sandbox.fftune("presets diff copy presets --exit-code").code == 0);
  CHECK(sandbox.fftune("presets diff presets copy").code == 0);
  CHECK(sandbox.fftune("presets diff presets copy --exit-code").code == 1);
}

TEST_CASE("the order of the fields of a preset file means nothing") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1,4");
  REQUIRE(sandbox.fftune("presets merge presets --out other").code == 0);
  const auto other = sandbox.preset_file("other");
  write_text(other, reversed(ordered_json::parse(text_of(path))).dump());
  CHECK(sandbox.fftune("presets validate other").code == 0);
  CHECK(sandbox.fftune("check --device cpu --seeds 1 --presets other").code == 0);
  CHECK(sandbox.fftune("presets diff presets other").out == "no differences\n");
}

TEST_CASE("every command that takes a folder of presets takes one of its devices' folders") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  const std::string device = "presets/" + path.parent_path().filename().string();
  const auto good = [&](const std::string& words, const std::string& prints) {
    const Finished done = sandbox.fftune(words);
    INFO(words << "\n" << done.err);
    CHECK(done.code == 0);
    CHECK(done.out.find(prints) != std::string::npos);
    CHECK(done.err.find("move it there") == std::string::npos);
  };
  good("presets show " + device, "m=1");
  good("presets validate " + device + "/", "1 file, 1 readable record, 0 faults");
  good("presets diff presets " + device, "no differences");
  good("presets install " + device, "ffn.json");
  good("check --quick --device cpu --presets " + device, "1 record: 1 passed");
  good("report --out page.html " + device, "");
  CHECK(text_of(sandbox.folder() / "page.html").find("m=1") != std::string::npos);
  good("tune-presets --list --again --device cpu " + device, "m=1");
  good("devices --presets " + device, device + "/ffn.json");
  // Those that write put records into the folder's files, and make no folder in it.
  good("refresh --all --device cpu --out " + device, device + "/ffn.json");
  good("presets merge presets --out " + device, "");
  for (const auto& entry : std::filesystem::directory_iterator(path.parent_path()))
    CHECK(entry.path() == path);
}

TEST_CASE(
    "records that state what leaving a size out means are as good as those that leave it out") {
  const Sandbox sandbox;
  REQUIRE(sandbox
              .fftune("attention --b 1 --s 4 --heads 2 --dim 8 --dtype f32 --pass fwd --device cpu "
                      "--budget 1s --max-variants 2")
              .code == 0);
  std::filesystem::path path;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(sandbox.folder() / "presets"))
    if (entry.path().filename() == "attention.json") path = entry.path();
  json file = json_of(text_of(path));
  json& problem = file.at("records").at(0).at("problem");
  REQUIRE_FALSE(problem.contains("kv-heads"));
  problem["kv-heads"] = 2;
  write_text(path, file.dump());
  const Finished validated = sandbox.fftune("presets validate presets");
  CAPTURE(validated.out, validated.err);
  CHECK(validated.code == 0);
  CHECK(sandbox.fftune("presets merge presets --out elsewhere").out.find("1 record") !=
        std::string::npos);
  const Finished timed = sandbox.fftune(
      "bench attention --b 1 --s 4 --heads 2 --dim 8 --dtype f32 --pass fwd --device cpu --presets "
      "presets --samples 2 --budget 1s --json");
  CAPTURE(timed.out, timed.err);
  CHECK(timed.out.find("exact device, exact shape") != std::string::npos);
}

TEST_CASE("presets show says of records that are not decided why") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1,4");
  json file = json_of(text_of(path));
  file["records"][0]["verdict"]["decided"] = true;
  json& record = file["records"][1];
  record["verdict"]["decided"] = record["verdict"]["complete"] = false;
  for (json& stage : record["stages"])
    stage["measured"] = 3, stage["failed"] = 0, stage["feasible"] = 50;
  write_text(path, file.dump());
  CHECK(sandbox.fftune("presets show").out.find("1 of 2 records undecided: -v says why") !=
        std::string::npos);
  const Finished all = sandbox.fftune("presets show -v");
  CHECK(all.out.find("undecided: ") != std::string::npos);
  CHECK(all.out.find("m=4: only 3 of 50 variants of ") != std::string::npos);
  CHECK(all.out.find("undecided: -v") == std::string::npos);
}

TEST_CASE("a record is no longer stale once its kernel is known to compile to the same PTX") {
  const Sandbox sandbox;
  const std::string kernels = FFTUNE_SOURCE_DIR "/kernels";
  const auto edited = sandbox.folder() / "kernels";
  std::filesystem::copy(kernels, edited, std::filesystem::copy_options::recursive);
  const auto source = edited / "act_mul/forward_columns.cu";
  const std::string text = text_of(source);
  // A record that was made with the sources of this build.
  const auto path = sandbox.folder() / "presets/nvidia-h100-80gb-hbm3/act-mul.json";
  std::filesystem::create_directories(path.parent_path());
  std::filesystem::copy(FFTUNE_SOURCE_DIR "/presets/nvidia-h100-80gb-hbm3/act-mul.json", path);
  json file = json_of(text_of(path));
  const auto hash = [&file]() -> json& {
    return file.at("records").at(0).at("stages").at(0).at("source_hash");
  };
  hash() = fftune::builtin_catalog().sources->hash({"act_mul/forward_columns.cu"});
  write_text(path, file.dump());
  REQUIRE(sandbox.fftune("presets merge presets").code == 0);
  const std::string before = text_of(path);
  const auto restamp = [&](const std::string& code) {
    write_text(source, code);
    return sandbox
        .start_by({}, "presets restamp --since " + kernels,
                  {"FFTUNE_DEVICE_SOURCES=" + edited.string()})
        ->wait();
  };

  const Finished other =
      restamp(replaced(text, "Activation::value(value[e]) *", "Activation::value(value[e]) +"));
  if (other.code == 3) FFTUNE_SKIP("no NVRTC: " + other.err);
  INFO(other.err);
  REQUIRE(other.code == 0);
  CHECK(other.out.find("1 stale winner; the same PTX as before, so no longer stale: 0") == 0);
  CHECK(other.out.find("1: the PTX is another: fftune refresh times it again") !=
        std::string::npos);
  CHECK(text_of(path) == before);

  const Finished same = restamp(
      replaced(text, "constexpr int count", "constexpr int counted = 1;\n  constexpr int count"));
  CHECK(same.out.find("1 stale winner; the same PTX as before, so no longer stale: 1") == 0);
  CHECK(same.out.find("wrote presets/nvidia-h100-80gb-hbm3/act-mul.json") != std::string::npos);
  const std::string old_hash = hash().get<std::string>();
  file = json_of(text_of(path));
  const std::string new_hash = hash().get<std::string>();
  CHECK(new_hash != old_hash);
  CHECK(text_of(path) == replaced(before, old_hash, new_hash));

  // The build's own sources are not those of the record now, and none of the older ones are.
  const Finished unknown = sandbox.fftune("presets restamp --since " + kernels + " --json");
  REQUIRE(unknown.code == 0);
  CHECK(json_of(unknown.out).at("winners").at(0).at("obstacle") ==
        "made with other sources than those of --since");
  CHECK(json_of(unknown.out).at("files").empty());
  const Finished lacking = sandbox.fftune("presets restamp");
  CHECK(lacking.code == 2);
  CHECK(lacking.err.find("--since: give the kernels folder") != std::string::npos);
}

TEST_CASE("files of schema 2 are rewritten in place by merging them, as the same records") {
  const Sandbox sandbox;
  std::filesystem::copy(FFTUNE_SOURCE_DIR "/tests/data/presets-schema-2", sandbox.folder() / "old",
                        std::filesystem::copy_options::recursive);
  REQUIRE(sandbox.fftune("presets merge old --out new").code == 0);
  REQUIRE(sandbox.fftune("presets merge old --out old").code == 0);
  for (const auto& entry :
       std::filesystem::directory_iterator(sandbox.folder() / "new/nvidia-h200")) {
    const auto text = text_of(entry.path());
    INFO(entry.path());
    CHECK(text.find("\"schema\": 3,") != std::string::npos);
    CHECK(text_of(sandbox.folder() / "old/nvidia-h200" / entry.path().filename()) == text);
  }
  CHECK(sandbox.fftune("presets diff old new").out == "no differences\n");
  const auto shown = sandbox.fftune("presets show new --json");
  CHECK(shown.out.find("\"schedule\": \"pingpong\"") != std::string::npos);
  CHECK(shown.out.find("consumers") == std::string::npos);
}

TEST_CASE("a search replaces the record that differs in what is performance-neutral alone") {
  const Sandbox sandbox;
  const auto tune = [&](const std::string& more) {
    const Finished done = sandbox.fftune(
        "rope --s 4 --b 1 --heads 2 --dim 32 --device cpu --budget 2s --max-variants 2 "
        "--positions " +
        more);
    INFO(done.err);
    REQUIRE(done.code == 0);
  };
  const auto records = [&](const std::string& folder) {
    return json_of(sandbox.fftune("presets show " + folder + " --json").out).at(0).at("records");
  };
  tune("8");
  REQUIRE(sandbox.fftune("presets merge presets --out before").code == 0);
  tune("16 --same-bits");
  REQUIRE(records("presets").size() == 1);
  CHECK(records("presets").at(0).at("problem").at("positions") == 16);

  // The problem is the same one: its time may have changed, or nothing.
  const json changes = json_of(sandbox.fftune("presets diff before presets --json").out);
  for (const json& change : changes)
    CHECK((change.at("change") == "time" || change.at("change") == "winner"));

  REQUIRE(sandbox.fftune("presets merge before --out presets").code == 0);
  REQUIRE(records("presets").size() == 1);
  CHECK(records("presets").at(0).at("problem").at("positions") == 8);
  CHECK(sandbox.fftune("presets validate presets").code == 0);
  CHECK(sandbox.fftune("check --device cpu").code == 0);
  CHECK(sandbox.fftune("refresh --device cpu --all").code == 0);
  CHECK(records("presets").size() == 1);
}

TEST_CASE("tables of vLLM become searches") {
  const Sandbox sandbox;
  const std::string entry = "{\"BLOCK_SIZE_M\": 16, \"num_warps\": 4}";
  const auto folder = sandbox.folder() / "tables";
  write_text(folder / "E=128,N=384,device_name=NVIDIA_H200.json",
             "{\"triton_version\": \"3.4.0\", \"64\": " + entry + ", \"1\": " + entry + "}");
  write_text(folder / "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json",
             "{\"1\": " + entry + "}");
  for (const char* kind : {"", ",dtype=fp8_w8a8"})
    write_text(folder / ("E=32,N=1440,device_name=NVIDIA_H200" + std::string(kind) + ".json"),
               "{\"4\": " + entry + "}");
  for (const char* kind : {"dtype=fp8_w8a8,block_shape=[128,128]",
                           "dtype=fp8_w8a8,block_shape=[64, 128]", "dtype=int8_w8a16"})
    write_text(folder / ("E=256,N=256,device_name=NVIDIA_H200," + std::string(kind) + ".json"),
               "{\"16\": " + entry + "}");
  const Finished all = sandbox.fftune("presets import-vllm tables");
  CHECK(all.code == 0);
  CHECK(all.out.find("fftune moe-ffn --d 2048 --h 384 --experts 128 --top-k 8 --m 1,64  # "
                     "qwen3-30b-a3b, 2 devices\n") != std::string::npos);
  CHECK(all.out.find("--d 4096 --h 7168 --experts 8 --top-k 2 --m 1 --dtype fp8  # "
                     "mixtral-8x7b, 2 devices\n") != std::string::npos);
  CHECK(
      all.out.find("--d 7168 --h 256 --experts 256 --top-k 8 --m 16 --dtype fp8 --scales block  # "
                   "deepseek-v3, 8 devices\n") != std::string::npos);
  const std::string gpt_oss = "--d 2880 --h 1440 --experts 32 --top-k 4 --m 4 ";
  CHECK(
      all.out.find(gpt_oss + "--act swiglu-oai --bias all --gate-up interleaved  # gpt-oss-20b") !=
      std::string::npos);
  CHECK(all.out.find(gpt_oss + "--dtype fp8 --act swiglu-oai --bias all  # gpt-oss-20b") !=
        std::string::npos);
  for (const char* other : {"not fp8_w8a8 in [64, 128]", "not int8_w8a16"})
    CHECK(all.out.find(other) != std::string::npos);
  const Finished given = sandbox.fftune(
      "presets import-vllm tables/E=128,N=384,device_name=NVIDIA_H200.json --d 512 --top-k 4 "
      "--json");
  REQUIRE(given.code == 0);
  const json searches = json_of(given.out);
  REQUIRE(searches.size() == 1);
  CHECK(searches.at(0).at("d") == 512);
  CHECK(searches.at(0).at("m") == json::array({1, 64}));
  write_text(folder / "E=7,N=5.json", "[]");
  CHECK(sandbox.fftune("presets import-vllm tables/E=7,N=5.json").code == 2);
  CHECK(sandbox.fftune("presets import-vllm nowhere").code == 2);
  write_text(folder / "E=4000,N=5.json", "{\"1\": " + entry + "}");
  const Finished many =
      sandbox.fftune("presets import-vllm tables/E=4000,N=5.json --d 64 --top-k 2");
  CHECK(many.code == 2);
  CHECK(many.out.find("4000 experts: moe-ffn takes up to 1024") != std::string::npos);
  std::filesystem::create_directory(sandbox.folder() / "bare");
  const Finished bare = sandbox.fftune("presets import-vllm bare");
  CHECK(bare.code == 2);
  CHECK(bare.err.find("bare: there is no vLLM table") != std::string::npos);
}

TEST_CASE("of many files the good ones are taken, the others named, and the exit code tells") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  const auto& folder = sandbox.folder();
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((folder / name).parent_path());
    write_text(folder / name, text);
  };
  write("presets/broken/ffn.json", "{\"schema\": 3,");
  const std::string entry = "{\"BLOCK_SIZE_M\": 16}";
  write("tables/E=128,N=384,device_name=A.json", "{\"1\": " + entry + "}");
  write("tables/E=128,N=768,device_name=B.json", "[]");
  write("tables/E=8,N=7168,device_name=C.json", "{\"1\": " + entry + "}");
  REQUIRE(mkfifo((folder / "tables/E=9,N=9.json").c_str(), 0600) == 0);
  std::filesystem::path journal;
  for (const auto& entry_of :
       std::filesystem::recursive_directory_iterator(folder / ".local/state/fftune"))
    if (entry_of.path().extension() == ".jsonl") journal = entry_of.path();
  REQUIRE(!journal.empty());
  std::filesystem::create_directories(folder / "journals");
  std::filesystem::copy_file(journal, folder / "journals/ffn-20260101T000000Z-1.jsonl");
  write("journals/moe-ffn-20260101T000000Z-1.jsonl", "no journal\n");
  struct Case {
    const char* words;
    const char* broken;
    const char* good;  // in the output
  };
  for (const Case& each :
       {Case{"presets import-vllm tables", "E=128,N=768,device_name=B.json", "--experts 8"},
        {"presets import-vllm tables", "E=9,N=9.json", "--h 384"},
        {"presets merge presets --out other", "broken/ffn.json", "1 record from"},
        {"presets install presets", "broken/ffn.json", "1 record from"},
        {"presets show presets", "broken/ffn.json", "m=1"},
        {"presets validate presets", "broken/ffn.json", "1 readable record"},
        {"report -o a.html presets", "broken/ffn.json", "1 record"},
        {"report -o b.html journals", "moe-ffn-20260101T000000Z-1.jsonl", "1 searched problem"}}) {
    CAPTURE(each.words);
    const Finished done = sandbox.fftune(each.words);
    INFO(done.err << done.out);
    CHECK(done.code == 1);
    CHECK((done.err + done.out).find(each.broken) != std::string::npos);
    CHECK(done.out.find(each.good) != std::string::npos);
  }
}

TEST_CASE("records of problems that this version does not know are named in one line") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1,4");
  json file = json_of(text_of(path));
  json& problem = file.at("records").at(0).at("problem");
  problem["unheard-of"] = "yes";
  write_text(path, file.dump());
  const auto warned = [&](const std::string& words, const char* said) {
    CAPTURE(words);
    const Finished done = sandbox.fftune(words);
    INFO(done.err << done.out);
    CHECK(done.code == 0);
    std::size_t lines = 0;
    for (std::size_t at = 0;
         (at = done.err.find("there is no option 'unheard-of'", at)) != std::string::npos; ++at)
      ++lines;
    CHECK(lines == 1);
    CHECK(done.err.find(said) != std::string::npos);
  };
  const auto every = [&](const char* said) {
    warned("presets show presets", said);
    warned("check --device cpu --seeds 1 --presets presets", said);
    warned("check --device cpu --quick --presets presets", said);
    warned("devices --presets presets", said);
    warned("devices", said);
    warned("bench ffn --device cpu --d 8 --h 8 --m 1 --presets presets", said);
  };
  every("the library skips the record\n");
  file.at("records").at(1).at("problem")["unheard-of"] = "yes";
  write_text(path, file.dump());
  every("the library skips the record, and 1 more: fftune presets validate names all\n");
}

TEST_CASE("a damaged file is named and skipped, and the others serve") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  const std::string whole = text_of(path);
  const auto other = sandbox.folder() / "presets" / "another-device" / "ffn.json";
  for (const std::string& damaged :
       {std::string(), whole.substr(0, whole.size() / 2), std::string("no JSON"),
        std::string("{\"schema\": 999}"), std::string("null")}) {
    write_text(other, damaged);
    const Finished checked =
        sandbox.fftune("check --device cpu --seeds 1 --progress none --presets presets");
    INFO(checked.err << checked.out);
    CHECK(checked.code == 1);  // not all that is there was checked
    CHECK(checked.err.find("another-device/ffn.json") != std::string::npos);
    CHECK(fftune::testing::lines_in(checked.err) == 1);
    CHECK(checked.out.find("1 passed") != std::string::npos);

    const Finished valid = sandbox.fftune("presets validate");
    CHECK(valid.code == 1);
    CHECK(valid.out.find("another-device/ffn.json") != std::string::npos);
    CHECK(sandbox.fftune("devices").code == 0);
  }
}

TEST_CASE("a file of another kind of device is not validated as this one's") {
  const Sandbox sandbox;
  const auto file = sandbox.tuned("1");
  write_text(file, replaced(text_of(file), "\"kind\": \"cpu\"", "\"kind\": \"cuda\""));
  const Finished done = sandbox.fftune("presets validate presets");
  INFO(done.out);
  CHECK(done.out.find("its device is unknown here: only its form was checked") !=
        std::string::npos);
}

TEST_CASE("a variant that does not exist or is illegal is named, and the fallback serves") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  const std::string whole = text_of(path);
  const json record = json_of(sandbox.fftune("presets show --json").out).at(0).at("records").at(0);
  const std::string family = record.at("stages").at(0).at("family").get<std::string>();
  write_text(path, replaced(whole, "\"" + family + "\"", "\"no_such_family\""));

  const Finished valid = sandbox.fftune("presets validate");
  INFO(valid.out);
  CHECK(valid.code == 1);
  CHECK(valid.out.find("no_such_family") != std::string::npos);
  const Finished checked = sandbox.fftune("check --device cpu --seeds 1");
  INFO(checked.out << checked.err);
  CHECK(checked.code == 0);
}

TEST_CASE("a record that the library would skip replaces none that it uses") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1,2");
  REQUIRE(sandbox.fftune("presets merge presets --out kept").code == 0);
  const auto kept = sandbox.folder() / "kept" / path.parent_path().filename() / "ffn.json";
  const std::string before = text_of(kept);
  auto document = ordered_json::parse(text_of(path));
  document.at("records").at(0).at("stages").at(0)["family"] = "no_such_family";
  for (const int code : {1, 2}) {  // one record of two, then the only one
    if (code == 2) document.at("records").erase(1);
    write_text(path, document.dump());
    const Finished merged = sandbox.fftune("presets merge presets --out kept");
    INFO(merged.err << merged.out);
    CHECK(merged.code == code);
    CHECK(merged.err.find("no_such_family") != std::string::npos);
    CHECK(fftune::testing::lines_in(merged.err) == 1);
    CHECK(text_of(kept) == before);
  }
}

TEST_CASE("a record of a dtype that this device has not is skipped with the reason") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  write_text(path, replaced(text_of(path), "\"f32\"", "\"fp16\""));
  const Finished checked = sandbox.fftune("check --device cpu --seeds 1");
  INFO(checked.out << checked.err);
  CHECK(checked.code == 0);
  CHECK(checked.out.find("ffn has no fp16 on the CPU") != std::string::npos);
  CHECK(checked.out.find("1 skipped") != std::string::npos);
}

TEST_CASE("a record that lacks a field of its op is named and skipped, and ends no command") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  std::string text = text_of(path);
  const auto act = text.find("\"act\""), comma = text.rfind(',', act);
  text.erase(comma, text.find_first_of(",}\n", act) - comma);
  write_text(path, text);
  const std::string why = "its problem lacks fields of its op: search anew";
  const Finished valid = sandbox.fftune("presets validate");
  CHECK(valid.code == 1);
  CHECK(valid.out.find(why) != std::string::npos);
  const Finished checked = sandbox.fftune("check --device cpu --seeds 1");
  INFO(checked.out << checked.err);
  CHECK(checked.code == 0);
  CHECK(checked.out.find(why) != std::string::npos);
  const Finished devices = sandbox.fftune("devices --presets presets");
  INFO(devices.out << devices.err);
  CHECK(devices.code == 0);
}

TEST_CASE("a search says how the library comes to its result, and install makes it so") {
  const Sandbox sandbox;
  const std::string sweep = "ffn --d 32 --h 64 --m 2 --device cpu --budget 4s --max-variants 3";
  const Finished swept = sandbox.fftune(sweep);
  REQUIRE(swept.code == 0);
  CHECK(swept.out.find("fftune presets install presets") != std::string::npos);
  // ./presets is not where the library looks, and devices says nothing else.
  const Finished before = sandbox.fftune("devices");
  CHECK(before.out.find("would load presets/") == std::string::npos);
  CHECK(before.out.find("fftune presets install presets") != std::string::npos);
  const Finished installed = sandbox.fftune("presets install");
  INFO(installed.err);
  REQUIRE(installed.code == 0);
  CHECK_FALSE(sandbox.preset_file(".local/share/fftune/presets").empty());
  const Finished after = sandbox.fftune("devices");
  CHECK(after.out.find("would load " + sandbox.folder().string() +
                       "/.local/share/fftune/presets") != std::string::npos);
  CHECK(after.out.find(": 1 problem, ") != std::string::npos);
  CHECK(after.out.find("presets install") == std::string::npos);
  CHECK(after.out.find("would not load") == std::string::npos);
  // Until there is something else to install.
  REQUIRE(sandbox.fftune(replaced(sweep, "--m 2", "--m 5")).code == 0);
  CHECK(sandbox.fftune("devices").out.find("fftune presets install presets") != std::string::npos);
  const Finished direct = sandbox.fftune(sweep + " --out .local/share/fftune/presets");
  CHECK(direct.out.find("presets install") == std::string::npos);
}

TEST_CASE("many notes of validate are a line for each kind, and -v has them all") {
  const Sandbox sandbox;
  const std::string words = "presets validate " FFTUNE_SOURCE_DIR "/presets";
  const Finished brief = sandbox.fftune(words), full = sandbox.fftune(words + " -v");
  REQUIRE(brief.code == 0);
  const auto notes = json_of(sandbox.fftune(words + " --json").out).at("notes");
  REQUIRE(notes.size() > 8);
  CHECK(lines_in(brief.out) <= 5);
  CHECK(brief.out.find("-v names the records") != std::string::npos);
  CHECK(brief.out.find("measured while the device was disturbed") != std::string::npos);
  CHECK(static_cast<std::size_t>(lines_in(full.out)) == notes.size() + 1);
}
