// Wrong input of every kind: the documented exit code, and one line that names the thing.
#include <filesystem>
#include <string>
#include <vector>

#include "sandbox.hpp"
#include "support/catch.hpp"

using namespace fftune::testing;

namespace {

struct Wrong {
  std::string words;
  int code;
  std::vector<std::string> named;  // each must be in the line
};

void require_one_line(const Sandbox& sandbox, const Wrong& wrong) {
  const Finished done = sandbox.fftune(wrong.words);
  INFO("fftune " << wrong.words << "\n" << done.err);
  CHECK(done.code == wrong.code);
  CHECK(lines_in(done.err) == 1);
  CHECK(done.err.rfind("fftune: ", 0) == 0);
  for (const std::string& name : wrong.named) CHECK(done.err.find(name) != std::string::npos);
  CHECK(done.out.empty());
}

}  // namespace

TEST_CASE("a wrong command or option is named with what was meant") {
  const Sandbox sandbox;
  const std::vector<Wrong> all{
      {"ffm --d 32", 2, {"'ffm'", "did you mean ffn?"}},
      {"zzzzzz", 2, {"'zzzzzz'", "give one of ffn"}},
      {"ffn --dd 32 --h 64", 2, {"--dd", "did you mean --d?"}},
      {"ffn --stratgy random", 2, {"--stratgy", "did you mean --strategy?"}},
      {"ffn --zzzzzz", 2, {"--zzzzzz", "fftune ffn --help"}},
      {"ffn stray --d 32 --h 64", 2, {"'stray'"}},
      {"ffn --d", 2, {"--d lacks its value", "fftune ffn --help"}},
      {"ffn --h 64 --d --", 2, {"--d lacks its value", "fftune ffn --help"}},
      // Behind "--" there are no options.
      {"rmsnorm --", 2, {"rmsnorm needs --d"}},
      {"-- rmsnorm", 2, {"rmsnorm needs --d"}},
      {"rmsnorm -- --d 32", 2, {"unexpected word '--d'", "fftune rmsnorm --help"}},
      {"-- rmsnorm --d 32", 2, {"unexpected word '--d'", "fftune rmsnorm --help"}},
      {"presets -- show -no-file", 2, {"-no-file is not there"}},
      {"ffn --bad -- word", 2, {"--bad", "fftune ffn --help"}},
      {"-- zzzzzz", 2, {"'zzzzzz'", "give one of ffn"}},
      {"ffn --d 32 --h 64 --out ''", 2, {"--out is empty", "fftune ffn --help"}},
      {"masked-ffn --d 32 --h 64 --mask ''", 2, {"--mask is empty"}},
      {"compile --op ''", 2, {"--op is empty"}},
      {"compile ffn --arch sm_80", 2, {"'ffn'", "give --op ffn"}},
      {"check layer", 2, {"give --op layer"}},
      {"presets show ''", 2, {"PATH is empty", "fftune presets show --help"}},
      {"ffn --d 32 --d 64 --h 64", 2, {"--d is given more than once", "fftune ffn --help"}},
      {"ffn --D 32 --h 64", 2, {"--D", "did you mean --d?"}},
      {"ffn --mask all", 2, {"unknown option --mask: see fftune ffn --help"}},
      {"ffn -h", 2, {"-h", "--h", "--help"}},
      {"ffn --quiet --verbose --d 32 --h 64", 2, {"--quiet", "--verbose"}},
      {"--zzzzzz", 2, {"--zzzzzz"}},
      {"list", 2, {"list needs an op", "ffn"}},
      {"list --device cpu", 2, {"list needs an op before --device", "fftune list --help"}},
      {"list ffm", 2, {"did you mean ffn?"}},
      {"bench", 2, {"bench needs an op"}},
      {"presets", 2, {"presets needs a command", "validate"}},
      {"presets shaw", 2, {"did you mean show?"}},
  };
  for (const Wrong& wrong : all) require_one_line(sandbox, wrong);
}

TEST_CASE("a wrong size is named with its range") {
  const Sandbox sandbox;
  const std::vector<Wrong> all{
      {"ffn --device cpu", 2, {"ffn needs --d"}},
      {"ffn --d 32 --device cpu", 2, {"ffn needs --h"}},
      {"ffn --d 0 --h 64 --device cpu", 2, {"--d 0", "from 1 to 2147483647"}},
      {"ffn --d -5 --h 64 --device cpu", 2, {"--d -5", "from 1"}},
      {"ffn --d 32 --h 2147483648 --device cpu", 2, {"--h 2147483648", "2147483647"}},
      {"ffn --d 99999999999999999999 --h 64 --device cpu", 2, {"--d 99999999999999999999"}},
      {"ffn --d wide --h 64 --device cpu", 2, {"--d 'wide'", "whole number"}},
      {"ffn --d 1.5 --h 64 --device cpu", 2, {"--d '1.5'", "whole number"}},
      {"ffn --d 1e3 --h 64 --device cpu", 2, {"--d '1e3'"}},
      {"ffn --d 32,64 --h 64 --device cpu", 2, {"--d '32,64'"}},
      {"ffn --d 32 --h 64 --m 0 --device cpu", 2, {"--m 0"}},
      {"ffn --d 32 --h 64 --m 1,,4 --device cpu", 2, {"--m '1,,4'", "empty part"}},
      {"ffn --d 32 --h 64 --m 1,x --device cpu", 2, {"--m 'x'"}},
      {"bench ffn --d 0 --h 64 --device cpu", 2, {"--d 0"}},
      {"list ffn --d 0 --device cpu", 2, {"--d 0"}},
  };
  for (const Wrong& wrong : all) require_one_line(sandbox, wrong);
}

TEST_CASE("a wrong word is named with the choices there are") {
  const Sandbox sandbox;
  const std::string ffn = "ffn --d 32 --h 64 --device cpu ";
  const std::vector<Wrong> all{
      {ffn + "--dtype fp9", 2, {"--dtype on the CPU 'fp9'", "f32, bf16, fp8"}},
      {ffn + "--dtype fp16", 2, {"--dtype on the CPU 'fp16'"}},
      {ffn + "--dtype fp8 --pass bwd", 2, {"--dtype of pass bwd on the CPU 'fp8'", "f32, bf16"}},
      {ffn + "--act swish", 2, {"--act 'swish'", "silu"}},
      {ffn + "--act slu", 2, {"did you mean silu?"}},
      {ffn + "--pass sideways", 2, {"--pass 'sideways'", "fwd"}},
      {ffn + "--strategy best", 2, {"--strategy 'best'", "halving"}},
      {ffn + "--budget 10", 2, {"--budget '10'", "60s"}},
      {ffn + "--budget 0s", 2, {"--budget '0s'"}},
      {ffn + "--budget -3s", 2, {"--budget '-3s'"}},
      {ffn + "--seed x", 2, {"--seed 'x'"}},
      {ffn + "--max-variants -1", 2, {"--max-variants -1"}},
      {ffn + "--progress loud", 2, {"--progress 'loud'", "plain"}},
      {"ffn --d 32 --h 64 --device gpu", 2, {"--device 'gpu'", "cuda:0"}},
      {"ffn --d 32 --h 64 --device cuda:x", 2, {"--device 'cuda:x'"}},
      {"ffn --d 32 --h 64 --device cuda:99", 3, {"cuda:99"}},
      {"list ffn --device cuda:99", 3, {"cuda:99"}},
      {"ffn --d 32 --h 64 --device cpu,cuda:99", 3, {"cuda:99"}},
      {"ffn --d 32 --h 64 --device cuda:0,cuda", 2, {"--device cuda:0,cuda has cuda:0 twice"}},
      {"list ffn --device cpu,cpu", 2, {"--device 'cpu,cpu'"}},
      {"list ffn --device all", 2, {"--device 'all'"}},
      {"refresh --device cpu,cpu --out .", 2, {"--device 'cpu,cpu'"}},
      {ffn + "--strategy halving --min-gain 5%", 2, {"--min-gain", "--strategy guided", "halving"}},
      {ffn + "--strategy guided --min-gain 5", 2, {"--min-gain '5'", "0.5%"}},
      {"list ffn --arch sm_99", 2, {"--arch 'sm_99'", "sm_80"}},
      {"list ffn --arch sm_90", 2, {"did you mean sm_90a?"}},
      {"list ffn --arch sm_80 --device cpu", 2, {"--arch and --device"}},
      {"check --seeds 0", 2, {"--seeds 0"}},
      {"check --device cpu --max-flops -1", 2, {"--max-flops '-1'"}},
      {"compile --arch sm_99", 2, {"--arch 'sm_99'", "sm_90a"}},
      {"compile --op lineal", 2, {"--op 'lineal'", "did you mean linear?"}},
      {"compile --family gate_up_sm8", 2, {"did you mean gate_up_sm80?", "fftune list OP"}},
      {"compile --dtype fp9", 2, {"--dtype 'fp9'", "fp8"}},
      {"compile --option save", 2, {"--option save", "NAME=VALUE"}},
      {"compile --op ffn --option keep=all", 2, {"keep", "save"}},
      {"compile --option scales=block", 2, {"--option scales is of ffn, moe-ffn alone", "--op"}},
      {"compile --op ffn --option act=", 2, {"--option act=", "NAME=VALUE"}},
      {"compile --op ffn --option =silu", 2, {"--option =silu", "NAME=VALUE"}},
      {"compile --op ffn --option act=silu,act=gelu", 2, {"--option act=gelu", "already"}},
      {"compile --arch sm_80 --op ffn --family gate_up_sm90",
       2,
       {"no family has a program", "--arch", "--family"}},
      {"compile --op ffn --option save=all", 2, {"--save 'all'", "preact"}},
      {"compile --jobs 0", 2, {"--jobs 0"}},
      {"compile --sample x", 2, {"--sample 'x'"}},
  };
  for (const Wrong& wrong : all) require_one_line(sandbox, wrong);
}

TEST_CASE("a wrong file or folder is named") {
  const Sandbox sandbox;
  fftune::testing::write_text(sandbox.folder() / "file", "not a preset");
  fftune::testing::write_text(sandbox.folder() / "empty" / "device" / "ffn.json", "");
  std::filesystem::create_directory(sandbox.folder() / "bare");
  fftune::testing::write_text(sandbox.folder() / "ids", "0 1\n2 9\n");
  const std::string ffn = "ffn --d 32 --h 64 --m 1 --device cpu ";
  const std::string experts =
      "moe-ffn --d 32 --h 64 --m 1 --experts 8 --top-k 2 --device cpu --routing file:";
  const std::vector<Wrong> all{
      {experts + "none/ids", 2, {"none/ids", "No such file"}},
      {experts + "file", 2, {"file: 'not' is not an id"}},
      {experts + "ids", 2, {"ids: there is no expert 9", "0 to 7"}},
      {"bench " + experts + "ids", 2, {"ids: there is no expert 9"}},
      {"ffn --d --h 16 --wait 0s", 2, {"--d lacks its value", "--h"}},
      {ffn + "--out --json", 2, {"--out lacks its value", "--json"}},
      {"compile --op act-mul --sample 0", 2, {"--sample", "0"}},
      {ffn + "--out file", 2, {"--out file", "cannot be written"}},
      {ffn + "--out /dev/null/presets", 2, {"--out /dev/null/presets", "cannot be written"}},
      {"check --device cpu", 2, {"no presets to check", "--presets"}},
      {"check --device cpu --presets nowhere", 2, {"--presets nowhere"}},
      {"check --device cpu --presets file", 2, {"--presets file"}},
      {"check --device cpu --report nowhere/report.xml", 2, {"--report nowhere/report.xml"}},
      {"devices --presets nowhere", 2, {"--presets nowhere"}},
      {"presets show nowhere.json", 2, {"nowhere.json"}},
      {"presets show file", 2, {"file: not JSON", "nothing else"}},
      {"presets validate", 2, {"presets is not there"}},
      {"presets validate bare", 2, {"bare holds no <device>/<op>.json"}},
      {"presets show bare", 2, {"bare holds no <device>/<op>.json"}},
      {"presets show empty/device", 2, {"empty/device holds no <device>/<op>.json"}},
      {"check --device cpu --presets bare", 2, {"--presets bare holds no <device>/<op>.json"}},
      {"bench ffn --d 32 --h 64 --device cpu --presets bare", 2, {"--presets bare holds no"}},
      {"worker --device cpu", 2, {"started by its supervisor alone", "fftune ffn"}},
      {"refresh --device cpu", 2, {"--out presets is not a folder"}},
      {"refresh --device cpu --out nowhere", 2, {"--out nowhere is not a folder"}},
      {"presets diff one", 2, {"one was given"}},
      {"presets diff", 2, {"0 were given"}},
      {"presets diff one two", 2, {"one is not there"}},
      {"presets diff file file", 2, {"file: not JSON", "nothing was compared"}},
      {"presets merge", 2, {"nothing to merge"}},
      {"presets merge empty", 2, {"empty/device/ffn.json", "nothing was merged"}},
      {"presets merge empty --out file", 2, {"empty/device/ffn.json"}},
  };
  for (const Wrong& wrong : all) require_one_line(sandbox, wrong);
}

TEST_CASE("a problem that does not fit is refused with what it needs, and the others go on") {
  const Sandbox sandbox;
  const Finished done =
      sandbox.fftune("ffn --d 2147483647 --h 2147483647 --m 1 --device cpu --progress none");
  INFO(done.err << done.out);
  CHECK(done.code == 3);
  CHECK(lines_in(done.err) == 1);
  CHECK(done.err.find("m=1: it needs") != std::string::npos);
  CHECK(done.err.find(" TiB of memory") != std::string::npos);
  CHECK(sandbox.preset_file().empty());

  const Finished both = sandbox.fftune(
      "ffn --d 32 --h 64 --m 1,2147483647 --device cpu --budget 4s --max-variants 4 "
      "--progress none");
  INFO(both.err << both.out);
  CHECK(both.code == 3);
  CHECK(both.err.find("m=2147483647") != std::string::npos);
  CHECK_FALSE(sandbox.preset_file().empty());
}

TEST_CASE("a damaged preset file is found before the search, and left as it is") {
  const Sandbox sandbox;
  const auto path = sandbox.tuned("1");
  const std::string whole = fftune::testing::text_of(path);
  for (const std::string& damaged : {std::string(), whole.substr(0, whole.size() / 2),
                                     std::string("[1, 2]"), std::string("no JSON")}) {
    fftune::testing::write_text(path, damaged);
    require_one_line(sandbox, {"ffn --d 32 --h 64 --m 1 --device cpu", 2, {"ffn.json", "repair"}});
    CHECK(fftune::testing::text_of(path) == damaged);
  }
}
