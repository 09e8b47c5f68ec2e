// A part's program within the whole: places of tensors, scratch memory and kernels are moved.
#include "registry/part_family.hpp"

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

namespace {

/// Two kernels of one file, with scratch memory of their own.
Program program_of(const std::string& first, const std::string& second) {
  Program program;
  program.kernels = {{"part.cu", first}, {"part.cu", second}};
  program.scratch = {{64}};
  for (std::size_t kernel = 0; kernel < 2; ++kernel) {
    KernelLaunch launch;
    launch.kernel = kernel;
    launch.programmatic = true;
    launch.arguments = {TensorArgument{kernel, 16}, ScratchArgument{0, 8}, std::int32_t{7}};
    program.steps.emplace_back(launch);
  }
  return program;
}

const KernelLaunch& launch_of(const Program& program, std::size_t step) {
  return std::get<KernelLaunch>(program.steps.at(step));
}

std::string kernel_of(const Program& program, std::size_t step) {
  return program.kernels.at(launch_of(program, step).kernel).expression;
}

}  // namespace

TEST_CASE("kernels that a program has already are not compiled again, and others are its own") {
  Program whole = program_of("a", "b");
  append_moved(whole, program_of("b", "c"), {0, 1}, 2);
  REQUIRE(whole.kernels.size() == 3);
  std::string kernels;
  for (std::size_t step = 0; step < 4; ++step) kernels += kernel_of(whole, step);
  CHECK(kernels == "abbc");
  Program from_other_file = program_of("a", "b");
  for (KernelSource& kernel : from_other_file.kernels) kernel.file = "other.cu";
  append_moved(whole, from_other_file, {0, 1}, 2);
  CHECK(whole.kernels.size() == 5);
}

TEST_CASE("tensors and scratch memory of a part have their places in the whole") {
  Program whole = program_of("a", "b");
  // The part's second tensor lies in scratch memory of the whole.
  append_moved(whole, program_of("c", "d"), {TensorArgument{5, 32}, ScratchArgument{0, 4}}, 6);
  CHECK(whole.scratch.size() == 2);
  const auto& first = launch_of(whole, 2).arguments;
  const auto& tensor = std::get<TensorArgument>(first.at(0));
  CHECK(std::pair(tensor.tensor, tensor.offset) == std::pair<std::size_t, std::size_t>(5, 48));
  const auto& scratch = std::get<ScratchArgument>(first.at(1));
  CHECK(std::pair(scratch.scratch, scratch.offset) == std::pair<std::size_t, std::size_t>(1, 8));
  const auto& moved = std::get<ScratchArgument>(launch_of(whole, 3).arguments.at(0));
  CHECK(std::pair(moved.scratch, moved.offset) == std::pair<std::size_t, std::size_t>(0, 20));
  // An equal program takes the same scratch memory.
  append_moved(whole, program_of("c", "d"), {TensorArgument{5}, TensorArgument{6}}, 7, 1);
  CHECK(whole.scratch.size() == 2);
  CHECK(std::get<ScratchArgument>(launch_of(whole, 4).arguments.at(1)).scratch == 1);
}

TEST_CASE("a kernel waits before it reads what another part of the program writes") {
  const auto programmatic = [](const Pointer& place) {
    Program part = program_of("a", "b");
    std::get<KernelLaunch>(part.steps.front()).read_early = {{0, 8}};
    Program whole;
    append_moved(whole, part, {place, TensorArgument{1}}, 2);
    const KernelLaunch& launch = launch_of(whole, 0);
    CHECK(launch_of(whole, 1).programmatic);
    return std::pair(launch.programmatic, launch.read_early.size());
  };
  CHECK(programmatic(TensorArgument{3}) == std::pair<bool, std::size_t>(true, 1));
  CHECK(programmatic(ScratchArgument{0}) == std::pair<bool, std::size_t>(false, 0));
}
