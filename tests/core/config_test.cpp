#include "core/config.hpp"

#include "core/error.hpp"
#include "support/catch.hpp"

using fftune::Config;

TEST_CASE("a configuration prints and parses") {
  const Config config{{"bm", 128}, {"bn", 64}, {"offset", -3}};
  REQUIRE(config.text() == "bm=128,bn=64,offset=-3");
  REQUIRE(Config::parse(config.text()) == config);
  REQUIRE(Config::parse("") == Config{});
}

TEST_CASE("a parameter is read and changed by name") {
  Config config{{"bm", 128}};
  config.set("bm", 64);
  config.set("bn", 32);
  REQUIRE(config.text() == "bm=64,bn=32");
  REQUIRE(config.get("bn") == 32);
  REQUIRE_THROWS_AS(config.at("bk"), fftune::Error);
}

TEST_CASE("text that is no configuration is refused") {
  for (const char* text : {"bm", "bm=", "=4", "bm=4x", "bm=99999999999999999999", "bm=1,,bn=2"}) {
    CAPTURE(text);
    REQUIRE_THROWS_AS(Config::parse(text), fftune::Error);
  }
}
