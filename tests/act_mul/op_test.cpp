#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/act_mul/act_mul.hpp"
#include "support/catch.hpp"
#include "support/op_reference.hpp"

using namespace fftune;

namespace {

Problem problem_of(const std::string& pass, const std::string& packed) {
  return canonical(act_mul_op(),
                   {"act-mul", pass, DType::f32, {{"m", 2}, {"h", 2}}, {{"packed", packed}}},
                   DeviceKind::cpu);
}

}  // namespace

TEST_CASE("packed, gate and up are in one tensor, and so are their gradients") {
  for (const std::string pass : {"fwd", "bwd"})
    for (const std::string packed : {"no", "yes"}) {
      const auto problem = problem_of(pass, packed);
      const auto tensors = act_mul_op().tensors(problem);
      CAPTURE(problem.text());
      const bool both = packed == "yes";
      const auto place_of = [&](const char* part) {
        return tensor_index(tensors, act_mul::tensor_with(problem, part));
      };
      CHECK(place_of("gate") == tensor_index(tensors, both ? "gate_up" : "gate"));
      CHECK(place_of("up") == tensor_index(tensors, both ? "gate_up" : "up"));
      CHECK(tensors[place_of("gate")].shape.back() == (both ? 4 : 2));
      if (pass == "fwd") {
        CHECK(tensors.size() == (both ? 2 : 3));
        CHECK(place_of("out") == tensor_index(tensors, "out"));
        continue;
      }
      CHECK(tensors.size() == (both ? 3 : 5));
      CHECK(place_of("dout") == tensor_index(tensors, "dout"));
      CHECK(place_of("dgate") == tensor_index(tensors, both ? "dgate_up" : "dgate"));
      CHECK(place_of("dup") == tensor_index(tensors, both ? "dgate_up" : "dup"));
    }
}

TEST_CASE("the reference is the formula, and packing moves values alone") {
  const double s = 1 / (1 + std::exp(-1.0));  // of silu at 1
  const ReferenceTensors apart{
      {"gate", {1, 0, -1, 1}}, {"up", {2, 3, 4, 5}}, {"dout", {1, 2, 3, 4}}};
  const ReferenceTensors together{{"gate_up", {1, 0, 2, 3, -1, 1, 4, 5}}, {"dout", {1, 2, 3, 4}}};
  const auto out = test::run_reference(problem_of("fwd", "no"), apart).at("out");
  CHECK(out[0] == Approx(2 * s));
  CHECK(out[1] == 0);
  CHECK(out[2] == Approx(-4 * (1 - s)));
  CHECK(test::run_reference(problem_of("fwd", "yes"), together).at("out") == out);

  const auto backward = test::run_reference(problem_of("bwd", "no"), apart);
  const auto& dgate = backward.at("dgate");
  const auto& dup = backward.at("dup");
  CHECK(dgate[0] == Approx(2 * s * (1 + 1 - s)));
  CHECK(dgate[1] == Approx(2 * 3 * 0.5));
  CHECK(dup[3] == Approx(4 * s));
  CHECK(
      test::run_reference(problem_of("bwd", "yes"), together).at("dgate_up") ==
      std::vector<double>{dgate[0], dgate[1], dup[0], dup[1], dgate[2], dgate[3], dup[2], dup[3]});
}
