// Contexts: opening a device, what is refused and how it is said.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "api/c_consumer.h"
#include "api/layer.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("the API is C") {
  CHECK(use_fftune_from_c() == 0);
}

TEST_CASE("the version is the project's") {
  CHECK(std::string(fftune_version()) == FFTUNE_VERSION);
}

TEST_CASE("a context needs somewhere to go and a device that is here") {
  CHECK(fftune_context_create(-1, nullptr, nullptr) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("out is NULL"));

  auto* const garbage = reinterpret_cast<fftune_context*>(0x10);
  fftune_context* context = garbage;
  CHECK(fftune_context_create(-2, nullptr, &context) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("device -2"));
  CHECK(context == nullptr);

  context = garbage;
  CHECK(fftune_context_create(99, nullptr, &context) == FFTUNE_UNAVAILABLE);
  CHECK(last_error_says("cuda:99"));
  CHECK(last_error_says("cpu ("));
  CHECK(context == nullptr);
  fftune_context_destroy(nullptr);
}

TEST_CASE("a preset path must be a folder") {
  fftune_context* context = nullptr;
  CHECK(fftune_context_create(-1, "/no/such/folder", &context) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("'/no/such/folder' is not a folder"));
  // A cut line ends with a whole character.
  std::string folder = "/";
  for (int i = 0; i < 1500; ++i) folder += "\u00e9";
  for (const char* first : {"", "x"}) {
    const std::string path = first + folder;
    CHECK(fftune_context_create(-1, path.c_str(), &context) == FFTUNE_INVALID_INPUT);
    const std::string said = fftune_last_error();
    CHECK(said.substr(said.size() - 5) == "\u00e9...");
  }
  CHECK(context == nullptr);
}

TEST_CASE("a context reads the device sources of the environment's folder") {
  ::setenv("FFTUNE_DEVICE_SOURCES", "/no/such/folder", 1);
  fftune_context* context = nullptr;
  const fftune_status refused = fftune_context_create(-1, nullptr, &context);
  ::setenv("FFTUNE_DEVICE_SOURCES", FFTUNE_SOURCE_DIR "/kernels", 1);
  const fftune_status opened = fftune_context_create(-1, nullptr, &context);
  ::unsetenv("FFTUNE_DEVICE_SOURCES");
  CHECK(refused == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("FFTUNE_DEVICE_SOURCES: '/no/such/folder' has no device sources"));
  REQUIRE(opened == FFTUNE_OK);
  fftune_context_destroy(context);
}

TEST_CASE("an error belongs to the thread that met it") {
  CHECK(fftune_context_create(-2, nullptr, nullptr) == FFTUNE_INVALID_INPUT);
  const std::string mine = fftune_last_error();
  std::string others = "untouched";
  std::thread([&] {
    others = fftune_last_error();
    fftune_plan_run(nullptr, nullptr, 0, nullptr, nullptr);
  }).join();
  CHECK(others.empty());
  CHECK(fftune_last_error() == mine);
}

TEST_CASE("a preset file that is no preset is named in the plan, and nothing breaks") {
  const testing::TemporaryFolder temporary;
  const auto& folder = temporary.path();
  std::filesystem::create_directories(folder / "some-cpu");
  std::ofstream(folder / "some-cpu" / "ffn.json") << "{\"schema\": 1, ";
  const library::Context context(-1, folder.c_str());
  const auto plan = context.plan(ffn_json(2, 8, 16));
  CHECK(plan.describe().find("some-cpu/ffn.json") != std::string_view::npos);
}

TEST_CASE("the C++ header throws what the C API said") {
  try {
    const library::Context context(-7);
    FAIL("did not throw");
  } catch (const library::Exception& error) {
    CHECK(error.status() == FFTUNE_INVALID_INPUT);
    CHECK(std::string(error.what()).find("device -7") != std::string::npos);
  }
}
