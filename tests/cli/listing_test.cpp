// Listings: ops, devices, variants, and compiling them for devices that are not here.
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "registry/catalog.hpp"
#include "sandbox.hpp"
#include "store/example.hpp"
#include "support/catch.hpp"
#include "support/json.hpp"

using namespace fftune;
using namespace fftune::testing;
using nlohmann::json;
namespace fs = std::filesystem;

TEST_CASE("ops names every op's fields and buffers in order") {
  const Finished done = Sandbox().fftune("ops --json");
  REQUIRE(done.code == 0);
  const json ops = json_of(done.out);
  REQUIRE(ops.at(0).at("op") == "ffn");
  std::vector<std::string> buffers;
  for (const json& buffer : ops.at(0).at("passes").at(0).at("buffers"))
    buffers.push_back(buffer.at("name").get<std::string>() + buffer.at("shape").dump());
  CHECK(buffers == std::vector<std::string>{R"(x["m","d"])", R"(w_gate["h","d"])",
                                            R"(w_up["h","d"])", R"(w_down["d","h"])",
                                            R"(y["m","d"])"});
  const json& with = ops.at(0).at("passes").at(0).at("buffers_with");
  CHECK(with.at("save=preact").back().at("name") == "up");
  CHECK(with.contains("dtype=fp8"));
  CHECK_FALSE(with.contains("save=none"));
  const std::string text = Sandbox().fftune("ops").out;
  CHECK(text.find("w_gate  input") != std::string::npos);
  CHECK(text.find("with residual=yes: x, w_gate, w_up, w_down, residual, y") != std::string::npos);
}

TEST_CASE("devices has the CPU, and says what is missing") {
  const Finished done = Sandbox().fftune("devices --json");
  REQUIRE(done.code == 0);
  const json document = json_of(done.out);
  const json& cpu = document.at("devices").back();
  CHECK(cpu.at("device") == "cpu");
  CHECK(cpu.at("multiprocessors").get<int>() >= 1);
  CHECK(Sandbox().fftune("devices").code == 0);
}

TEST_CASE("list tells the feasible variants of a device that is not here, and why others are out") {
  const Finished done =
      Sandbox().fftune("list ffn --d 1024 --h 2048 --m 256 --arch sm_80 --explain --json");
  REQUIRE(done.code == 0);
  const json document = json_of(done.out);
  bool explained = false;
  for (const json& family : document.at("problems").at(0).at("families")) {
    CHECK(family.at("feasible") == family.at("variants").size());
    if (family.at("family") != "gate_up_sm80") continue;
    CHECK(family.at("feasible").get<int>() >= 150);
    for (const json& constraint : family.at("constraints"))
      explained = explained || constraint.at("alone_rules_out").get<int>() > 0;
  }
  CHECK(explained);
}

TEST_CASE("list names the architectures that each CUDA family serves") {
  const Finished done =
      Sandbox().fftune("list ffn --d 1024 --h 2048 --m 256 --dtype bf16 --arch sm_80 --json");
  REQUIRE(done.code == 0);
  std::map<std::string, std::vector<std::string>> served;
  const json document = json_of(done.out);
  for (const json& family : document.at("problems").at(0).at("families"))
    served[family.at("family")] = family.at("architectures").get<std::vector<std::string>>();
  CHECK(served.at("gate_up_sm90") == std::vector<std::string>{"sm_90a"});
  for (const std::string arch : {"sm_80", "sm_89", "sm_100a", "sm_120a"}) {
    const auto& sm80 = served.at("gate_up_sm80");
    CHECK(std::find(sm80.begin(), sm80.end(), arch) != sm80.end());
  }
  const std::string text =
      Sandbox().fftune("list ffn --d 1024 --h 2048 --m 256 --dtype bf16 --arch sm_80").out;
  CHECK(text.find("architectures") != std::string::npos);
  CHECK(text.find("gate_up_sm90  ") != std::string::npos);
  // A CPU has none.
  const std::string cpu = Sandbox().fftune("list ffn --d 32 --h 64 --m 4 --device cpu").out;
  CHECK(cpu.find("architectures") == std::string::npos);
}

TEST_CASE("list names why a family refuses") {
  const Finished done =
      Sandbox().fftune("list ffn --d 1001 --h 2048 --m 16 --arch sm_80 --explain");
  REQUIRE(done.code == 0);
  CHECK(done.out.find("refused: ") != std::string::npos);
  CHECK(done.out.find("1001") != std::string::npos);
}

TEST_CASE("a reason is listed once, with its families, and where it holds") {
  const Finished done = Sandbox().fftune("list ffn --d 32 --h 64 --m 1,16 --device cpu --explain");
  REQUIRE(done.code == 0);
  const auto places = [&](const std::string& text) {
    std::size_t found = 0;
    for (std::size_t at = done.out.find(text); at != done.out.npos;
         at = done.out.find(text, at + 1))
      ++found;
    return found;
  };
  CHECK(places("it is for packed weights") == 1);
  CHECK(places("refused: cpu_tiles (f32 m=1): ") == 1);
  CHECK(places("refused: cpu_stream (f32 m=16): ") == 1);
  // Families of the other pass are one line.
  CHECK(places("of other passes or options: ") == 1);
  CHECK(places("cpu_d_hidden_blas") == 1);
}

TEST_CASE("list names every variant") {
  const Finished done = Sandbox().fftune("list ffn --d 32 --h 64 --m 4 --device cpu --variants");
  REQUIRE(done.code == 0);
  CHECK(done.out.find("\ncpu_blas/") != std::string::npos);
}

TEST_CASE("compile gives the same sample twice, from the cache the second time") {
  const Sandbox sandbox;
  // One op: .ci/run compiles the kernels of all.
  const std::string words = "compile --arch sm_80 --op rmsnorm --sample 1 --json";
  const Finished first = sandbox.fftune(words);
  if (first.code == 3) FFTUNE_SKIP("no NVRTC: " + first.err);
  INFO(first.err);
  REQUIRE(first.code == 0);
  const Finished second = sandbox.fftune(words);
  const json before = json_of(first.out);
  const json after = json_of(second.out);
  CHECK(before.at("failed") == 0);
  REQUIRE(before.at("programs").size() == after.at("programs").size());
  for (std::size_t i = 0; i < before.at("programs").size(); ++i) {
    CHECK(before.at("programs")[i].at("variant") == after.at("programs")[i].at("variant"));
    CHECK(before.at("programs")[i].at("kernels") == after.at("programs")[i].at("kernels"));
    CHECK(after.at("programs")[i].at("cached") == true);
  }
}

namespace {

/// A copy of the device sources, which may be changed.
fs::path copied_kernels(const Sandbox& sandbox) {
  const fs::path kernels = sandbox.folder() / "kernels";
  fs::copy(fs::path(FFTUNE_SOURCE_DIR) / "kernels", kernels, fs::copy_options::recursive);
  return kernels;
}

Finished with_kernels(const Sandbox& sandbox, const fs::path& kernels, const std::string& words) {
  return sandbox.start_by({}, words, {"FFTUNE_DEVICE_SOURCES=" + kernels.string()})->wait();
}

}  // namespace

TEST_CASE("device sources of a folder are compiled without a build, and cached by their text") {
  const Sandbox sandbox;
  const fs::path kernels = copied_kernels(sandbox);
  const fs::path source = kernels / "act_mul/forward_columns.cu";
  const std::string text = text_of(source);
  const auto with_folder = [&](const std::string& words) {
    return with_kernels(sandbox, kernels, words);
  };
  const std::string compile =
      "compile --arch sm_80 --op act-mul --family forward_columns --dtype f32 --sample 1 --json";
  const Finished built_in = sandbox.fftune(compile);
  if (built_in.code == 3) FFTUNE_SKIP("no NVRTC: " + built_in.err);
  REQUIRE(built_in.code == 0);
  const auto cached = [](const Finished& done) {
    INFO(done.err);
    REQUIRE(done.code == 0);
    return json_of(done.out).at("programs").at(0).at("cached").get<bool>();
  };
  CHECK_FALSE(cached(built_in));
  CHECK(cached(with_folder(compile)));  // the same text

  write_text(source, text + "\n__device__ int edited;\n");
  CHECK_FALSE(cached(with_folder(compile)));
  CHECK(cached(with_folder(compile)));
  const json devices = json_of(with_folder("devices --json").out);
  CHECK(devices.at("device_sources").at("folder") == kernels.string());
  CHECK(devices.at("device_sources").at("changed") == json::array({"act_mul/forward_columns.cu"}));
  CHECK(with_folder("devices").out.find("not as built in: act_mul/forward_columns.cu\n") !=
        std::string::npos);

  write_text(source, text + "\n#error edited\n");
  const Finished wrong = with_folder(compile);
  CHECK(wrong.code == 1);
  CHECK(wrong.out.find("edited") != std::string::npos);
  write_text(source, text);
  CHECK(cached(with_folder(compile)));
  CHECK(with_folder("devices").out.find("all as built in") != std::string::npos);
  CHECK_FALSE(json_of(sandbox.fftune("devices --json").out).contains("device_sources"));

  fs::remove_all(kernels);
  const Finished absent = with_folder("devices");
  CHECK(absent.code == 2);
  CHECK(absent.err.find("FFTUNE_DEVICE_SOURCES: '" + kernels.string() + "' has no") !=
        std::string::npos);
}

TEST_CASE("compile tells the PTX of each kernel apart, whatever else its source says") {
  const Sandbox sandbox;
  const fs::path kernels = copied_kernels(sandbox);
  const fs::path source = kernels / "common/numerics.cuh";
  const std::string text = text_of(source);
  const std::string compile =
      "compile --arch sm_80 --op act-mul --family forward_columns --dtype bf16 --sample 1 --json";
  if (const Finished done = sandbox.fftune(compile); done.code == 3)
    FFTUNE_SKIP("no NVRTC: " + done.err);
  const auto hash_with = [&](const std::string& sources) {
    write_text(source, sources);
    const auto done = with_kernels(sandbox, kernels, compile);
    INFO(done.err);
    REQUIRE(done.code == 0);
    const json kernel = json_of(done.out).at("programs").at(0).at("kernels").at(0);
    return kernel.at("ptx_hash").get<std::string>();
  };
  const std::string hash = hash_with(text);
  CHECK(hash.size() == 16);
  CHECK(hash_with("// a comment\n" + text + "\n__device__ int unused;\n") == hash);
  const std::string instruction = "rcp.approx.ftz.f32";
  const std::size_t at = text.find(instruction);
  REQUIRE(at != text.npos);
  std::string other = text;
  CHECK(hash_with(other.replace(at, instruction.size(), "rcp.rn.f32")) != hash);
}

TEST_CASE("compile takes a family that serves nothing but rare sizes, or models, too") {
  for (const char* family : {"--arch sm_80 --op ngram-block --family groups --dtype f32",
                             "--arch sm_90a --op layer --family persistent_experts --dtype bf16"}) {
    const Finished done = Sandbox().fftune(std::string("compile --sample 1 --json ") + family);
    if (done.code == 3) FFTUNE_SKIP("no NVRTC: " + done.err);
    INFO(done.err);
    REQUIRE(done.code == 0);
    CHECK(json_of(done.out).at("programs").size() == 1);
  }
}

TEST_CASE("compile leaves out ops that have no element type of those that it is for") {
  const std::string words = "compile --arch sm_80 --dtype bf16 --sample 1 --json --op ";
  const Finished both = Sandbox().fftune(words + "all-argmax,scale");
  if (both.code == 3) FFTUNE_SKIP("no NVRTC: " + both.err);
  INFO(both.err);
  REQUIRE(both.code == 0);
  const json found = json_of(both.out);
  CHECK_FALSE(found.at("programs").empty());
  for (const json& program : found.at("programs"))
    CHECK(program.at("problem").get<std::string>().starts_with("scale"));
  const Finished none = Sandbox().fftune(words + "all-argmax");
  CHECK(none.code == 2);
  CHECK(none.err.find("--dtype 'bf16' is unknown: give one of f32") != std::string::npos);
}

TEST_CASE("a bundle for an architecture without presets has the defaults of the others' problems") {
  const Sandbox sandbox;
  Problem problem{"rmsnorm", "fwd", DType::bf16, {{"m", 8}, {"d", 1024}}, {}};
  problem = canonical(builtin_catalog().op("rmsnorm"), problem, DeviceKind::cuda);
  auto record = fftune::example::record(problem);
  record.stages.resize(1);
  record.stages.front().stages = {"forward"};
  record.stages.front().variant = {"forward_fallback", {}};
  merge_preset_records(sandbox.folder() / "presets", fftune::example::device(), "rmsnorm",
                       {record});
  const Finished both = sandbox.fftune("bundle --arch sm_90a,sm_80 -o both.bundle --json");
  if (both.code == 3) FFTUNE_SKIP("no NVRTC: " + both.err);
  INFO(both.err);
  REQUIRE(both.code == 0);
  CHECK(json_of(both.out).at("programs").at("sm_80") == 1);
  CHECK(both.err.find("no preset is of sm_80") != std::string::npos);
  CHECK(sandbox.fftune("bundle --arch sm_80 --op rope -o none.bundle").code == 2);
}
