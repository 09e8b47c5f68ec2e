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

TEST_CASE("a parameter may hold a word") {
  Config config{{"schedule", "pingpong"}, {"bm", 128}};
  REQUIRE(config.text() == "schedule=pingpong,bm=128");
  REQUIRE(Config::parse(config.text()) == config);
  REQUIRE(config.word("schedule") == "pingpong");
  REQUIRE(config.value("bm") == fftune::ParameterValue(128));
  config.set("schedule", "swap_ab");
  config.set("order", std::string_view("column-major"));
  REQUIRE(config.text() == "schedule=swap_ab,bm=128,order=column-major");
  REQUIRE(Config::parse(config.text()) == config);
}

TEST_CASE("a word is not read as a number, nor a number as a word") {
  const Config config{{"schedule", "pingpong"}, {"bm", 128}};
  REQUIRE_THROWS_WITH(config.at("schedule"),
                      "parameter 'schedule' is a word, not a number, in "
                      "'schedule=pingpong,bm=128'");
  REQUIRE_THROWS_AS(config.get("schedule"), fftune::Error);
  REQUIRE_THROWS_WITH(config.word("bm"),
                      "parameter 'bm' is a number, not a word, in 'schedule=pingpong,bm=128'");
  REQUIRE_THROWS_AS(config.word("bk"), fftune::Error);
}

TEST_CASE("configurations compare by their words and numbers") {
  const Config cooperative{{"schedule", "cooperative"}}, pingpong{{"schedule", "pingpong"}};
  const Config zero{{"schedule", 0}}, one{{"schedule", 1}};
  REQUIRE(cooperative != pingpong);
  REQUIRE(cooperative < pingpong);
  REQUIRE(zero != cooperative);
  REQUIRE(zero < cooperative);
  REQUIRE(zero < one);
  REQUIRE(pingpong == Config{{"schedule", "pingpong"}});
}

TEST_CASE("text that is no configuration is refused") {
  for (const char* text :
       {"bm", "bm=", "=4", "=word", "bm=4x", "bm=99999999999999999999", "bm=1,,bn=2", "bm=a b",
        "bm=_a", "bm=-a", "bm=1.5", "bm=a/b", "bm=\xc3\xa4"}) {
    CAPTURE(text);
    REQUIRE_THROWS_AS(Config::parse(text), fftune::Error);
  }
}
