// Random problems against the float64 reference, on every family of a device; and the CUDA spaces.
#include "qkv/problems.hpp"
#include "support/fuzz_cases.hpp"

using namespace fftune;
using namespace fftune::test;

const FuzzCases<qkv_op, random_qkv,
                FuzzCounts{.small = 2000, .larger = 30, .gpu = 50, .spaces = 1000}>
    qkv_cases;
