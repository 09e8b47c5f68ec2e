#include "runtime/environment.hpp"

#include <cstdlib>
#include <map>
#include <string>

#include "support/catch.hpp"

using fftune::read_environment;

namespace {

/// Sets variables (null: unset), and puts them back at the end.
class Variables {
 public:
  explicit Variables(const std::map<std::string, const char*>& values) {
    for (const auto& [name, value] : values) {
      if (const char* old = std::getenv(name.c_str())) before_[name] = old;
      names_.push_back(name);
      set(name, value);
    }
  }
  ~Variables() {
    for (const auto& name : names_) {
      const auto old = before_.find(name);
      set(name, old == before_.end() ? nullptr : old->second.c_str());
    }
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  static void set(const std::string& name, const char* value) {
    if (value)
      ::setenv(name.c_str(), value, 1);
    else
      ::unsetenv(name.c_str());
  }
  std::vector<std::string> names_;
  std::map<std::string, std::string> before_;
};

}  // namespace

TEST_CASE("folders below the home are the default") {
  const Variables variables({{"HOME", "/home/someone"},
                             {"FFTUNE_PRESETS", nullptr},
                             {"FFTUNE_CACHE", nullptr},
                             {"FFTUNE_DEVICE_SOURCES", ""},
                             {"XDG_DATA_HOME", nullptr},
                             {"XDG_CACHE_HOME", "relative/is/ignored"},
                             {"XDG_STATE_HOME", ""},
                             {"CUDA_HOME", nullptr},
                             {"CUDA_PATH", nullptr},
                             {"NO_COLOR", ""}});
  const auto environment = read_environment();
  REQUIRE(environment.preset_folders.size() == 2);
  REQUIRE(environment.preset_folders[0] == "/home/someone/.local/share/fftune/presets");
  REQUIRE(environment.preset_folders[1].is_absolute());
  REQUIRE(environment.preset_folders[1].string().find("share/fftune/presets") != std::string::npos);
  REQUIRE(environment.cache_folder == "/home/someone/.cache/fftune");
  REQUIRE(environment.state_folder == "/home/someone/.local/state/fftune");
  REQUIRE(environment.toolkit_folders.size() == 1);
  REQUIRE(environment.preset_complaints.empty());
  REQUIRE(environment.device_sources.empty());
  REQUIRE_FALSE(environment.no_color);
}

TEST_CASE("variables go before the defaults") {
  const Variables variables({{"FFTUNE_PRESETS", "/a::b c:"},
                             {"FFTUNE_CACHE", "/cache"},
                             {"XDG_DATA_HOME", "/data"},
                             {"XDG_STATE_HOME", "/state"},
                             {"FFTUNE_DEVICE_SOURCES", "/kernels"},
                             {"CUDA_HOME", "/cuda"},
                             {"CUDA_PATH", nullptr},
                             {"NO_COLOR", "1"}});
  const auto environment = read_environment();
  REQUIRE(environment.preset_folders.size() == 4);
  REQUIRE(environment.preset_complaints.size() == 2);
  REQUIRE(environment.preset_complaints[1] ==
          "FFTUNE_PRESETS names 'b c', which is not there: correct or unset it");
  REQUIRE(environment.preset_folders[0] == "/a");
  REQUIRE(environment.preset_folders[1] == "b c");
  REQUIRE(environment.preset_folders[2] == "/data/fftune/presets");
  REQUIRE(environment.cache_folder == "/cache");
  REQUIRE(environment.device_sources == "/kernels");
  REQUIRE(environment.state_folder == "/state/fftune");
  REQUIRE(environment.toolkit_folders.at(0) == "/cuda/lib64");
  REQUIRE(environment.no_color);
}

TEST_CASE("without a home, or with a relative one, there are still absolute folders") {
  for (const char* home : {static_cast<const char*>(nullptr), "relative/home"}) {
    const Variables variables(
        {{"HOME", home}, {"XDG_CACHE_HOME", nullptr}, {"FFTUNE_CACHE", nullptr}});
    REQUIRE(read_environment().cache_folder.is_absolute());
  }
}
