// The same through the C++ header, with inputs that are const, and an error that is an exception.
#include <cstdio>
#include <cstring>
#include <fftune/fftune.hpp>

int main() {
  const float gate[4] = {1, -2, 3, 0.5f}, up[4] = {2, 5, -1, 8}, expected[4] = {2, 0, -3, 4};
  float out[4] = {};
  const fftune::library::Context context(-1);
  const auto plan = context.plan(R"({"op":"act-mul","dtype":"f32","m":1,"h":4,"act":"relu"})");
  plan.launch({gate, up}, {out}, {});
  if (std::memcmp(out, expected, sizeof out) != 0) return std::puts("out is wrong"), 1;
  try {
    plan.launch({gate}, {out}, {});
    return std::puts("a buffer is missing, and nothing says so"), 1;
  } catch (const fftune::library::Exception& error) {
    if (error.status() != FFTUNE_INVALID_INPUT) return std::puts(error.what()), 1;
  }
  std::printf("fftune %s: out is right\n", FFTUNE_VERSION_STRING);
}
