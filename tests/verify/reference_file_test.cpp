// References that go from one verifier to the next through a file.
#include "verify/references.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/catch.hpp"
#include "verify/host_threads.hpp"
#include "verify/toy_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

struct File {
  int descriptor = ::memfd_create("references", 0);
  ReferenceFile kept{descriptor};
  HostThreads threads;

  ~File() { ::close(descriptor); }
  off_t size() const {
    struct stat status {};
    ::fstat(descriptor, &status);
    return status.st_size;
  }
};

/// How often the op was asked for a stage's reference in verifying both stages together and apart.
int computed(File& file, const Problem& problem, std::uint64_t seed) {
  HostBackend backend;
  const ToyOp op;
  Verifier verifier(backend, op, problem, seed, &file.kept);
  const auto first = toy_stage(problem, 0);
  const auto second = toy_stage(problem, 1);
  CHECK(verifier.verify(0, 2, {first, second}).passed);
  CHECK(verifier.verify(1, 1, {second}).passed);
  CHECK(verifier.verify(0, 1, {first}).passed);
  return op.reference_runs;
}

}  // namespace

TEST_CASE("a reference that one process computed is not computed by the next") {
  File file;
  const auto problem = ToyOp::problem(DType::bf16, 100, 40, 24);
  CHECK(computed(file, problem, 7) > 0);
  CHECK(computed(file, problem, 7) == 0);
  // As many distinct rows: the same references.
  CHECK(computed(file, problem.with_size("m", 300), 7) == 0);
  CHECK(computed(file, problem, 8) > 0);
  CHECK(computed(file, problem.with_size("m", 5), 7) > 0);
  CHECK(computed(file, problem.with_size("d", 32), 7) > 0);
  CHECK(computed(file, problem, 7) == 0);
}

TEST_CASE("a torn or overwritten reference is computed again") {
  File file;
  const auto problem = ToyOp::problem(DType::f32, 10, 16, 8);
  CHECK(computed(file, problem, 1) > 0);
  const auto size = file.size();
  for (const off_t place : {off_t{3}, off_t{12}, off_t{20}, off_t{100}, size / 2, size - 1}) {
    char byte = 0;
    REQUIRE(::pread(file.descriptor, &byte, 1, place) == 1);
    byte = static_cast<char>(byte ^ 0x11);
    REQUIRE(::pwrite(file.descriptor, &byte, 1, place) == 1);
    INFO("byte " << place);
    CHECK(computed(file, problem, 1) > 0);
    REQUIRE(::ftruncate(file.descriptor, 0) == 0);
    CHECK(computed(file, problem, 1) > 0);
  }
  REQUIRE(::ftruncate(file.descriptor, size - 5) == 0);
  CHECK(computed(file, problem, 1) > 0);
}

TEST_CASE("nothing is kept by what does not pass") {
  File file;
  HostBackend backend;
  const ToyOp op;
  const auto problem = ToyOp::problem(DType::f32, 10, 16, 8);
  Verifier verifier(backend, op, problem, 1, &file.kept);
  const auto wrong = toy_stage(
      problem, 0, [](void* const* t, void*) { static_cast<float*>(t[toy_hidden])[3] += 1; });
  CHECK_FALSE(verifier.verify(0, 1, {wrong}).passed);
  CHECK(file.size() == 0);
}

TEST_CASE("a reference that is found has the requested name and size") {
  File file;
  const std::vector<double> values(1000, 2.5);
  file.kept.keep("a", values, file.threads);
  CHECK(file.kept.find("a", 1000, file.threads) == values);
  CHECK(file.kept.find("a", 999, file.threads).empty());
  CHECK(file.kept.find("b", 1000, file.threads).empty());
  const ReferenceFile none(-1);
  CHECK(none.find("a", 1000, file.threads).empty());
}
