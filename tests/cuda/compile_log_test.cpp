#include "cuda/compile_log.hpp"

#include <iterator>
#include <random>
#include <string>

#include "support/catch.hpp"

namespace fftune::cuda {

TEST_CASE("the assembler's log gives registers, spills and shared memory") {
  const auto report = read_assembler_log(
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function '_Z5otherv' for 'sm_90a'\n"
      "ptxas info    : Function properties for _Z5otherv\n"
      "ptxas         .     0 bytes stack frame, 999 bytes spill stores, 999 bytes spill loads\n"
      "ptxas info    : Used 255 registers, used 1 barriers, 9999 bytes smem\n"
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
      "serialized due to ...\n"
      "ptxas info    : Compiling entry function '_Z5scaleILi128EEvPff' for 'sm_90a'\n"
      "ptxas info    : Function properties for _Z5scaleILi128EEvPff\n"
      "ptxas         .     64 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 2 barriers, 512 bytes smem, 364 bytes cmem[0]\n"
      "ptxas info    : Compile time = 14.712 ms\n",
      "_Z5scaleILi128EEvPff");
  CHECK(report.registers == 168);
  CHECK(report.spill_bytes == 32);
  CHECK(report.static_shared_bytes == 512);
  REQUIRE(report.warnings.size() == 1);
  CHECK(report.warnings[0].rfind("(C7510) Potential Performance Loss", 0) == 0);
}

TEST_CASE("functions that a kernel calls count towards its spills") {
  const auto report = read_assembler_log(
      "ptxas info    : Function properties for helper\n"
      "    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
      "ptxas info    : Compiling entry function 'main' for 'sm_80'\n"
      "ptxas info    : Function properties for main\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 40 registers\n",
      "main");
  CHECK(report.spill_bytes == 12);
  CHECK(report.registers == 40);
}

TEST_CASE("a failed compilation is told in one line") {
  CHECK(first_error("ffn/k.cu(3): warning #177-D: unused\n"
                    "ffn/k.cu(12): error: identifier \"tt\" is undefined\n  code\n  ^\n\n"
                    "1 error detected in the compilation of \"ffn/k.cu\".\n") ==
        "ffn/k.cu:12: identifier \"tt\" is undefined");
  CHECK(first_error("nvrtc: error: invalid value for --gpu-architecture (-arch)\n") ==
        "nvrtc: error: invalid value for --gpu-architecture (-arch)");
  CHECK(first_error("ptxas info : x\nptxas fatal   : Unresolved extern function 'f'\n") ==
        "ptxas fatal   : Unresolved extern function 'f'");

  CHECK(first_error("") == "the compiler gave no reason");
  CHECK(first_error("\n \n something\n") == "something");
}

TEST_CASE("any text can be read as a log") {
  const char* pieces[] = {"ptxas info    : ",
                          "Used ",
                          "4294967296",
                          " registers",
                          "Compiling ",
                          "entry function '",
                          "f",
                          "'",
                          "\n",
                          "2147483647",
                          " bytes spill stores",
                          ", ",
                          " bytes smem",
                          "(C75",
                          "): error: ",
                          "k.cu(",
                          "12",
                          "\r\n",
                          "ptxas error",
                          " "};
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    std::string log;
    for (auto count = random() % 30; count > 0; --count) {
      if (random() % 8 == 0)
        log += static_cast<char>(random());
      else
        log += pieces[random() % std::size(pieces)];
    }
    const auto report = read_assembler_log(log, "f");
    REQUIRE(report.registers >= 0);
    REQUIRE(report.spill_bytes >= 0);
    const auto line = first_error(log);
    REQUIRE_FALSE(line.empty());
    REQUIRE(line.find('\n') == std::string::npos);
  }
}

}  // namespace fftune::cuda
