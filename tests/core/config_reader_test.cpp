#include "core/config_reader.hpp"

#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("a reader finds parameters in any order, as the configuration does") {
  const Config config{{"bm", 128}, {"schedule", "pingpong"}, {"bn", 64}, {"stages", 4}};
  ConfigReader in_order(config);
  CHECK(in_order.get("bm") == 128);
  CHECK(in_order.word("schedule") == "pingpong");
  CHECK(in_order.get_or("group_m", 8) == 8);
  CHECK(in_order.at("bn") == 64);
  CHECK(in_order.get_or("stages", 2) == 4);
  ConfigReader backwards(config);
  CHECK(backwards.get("stages") == 4);
  CHECK(backwards.get_or("split_k", 1) == 1);
  CHECK(backwards.get("bn") == 64);
  CHECK(backwards.get("bm") == 128);
  CHECK(backwards.get("bm") == 128);
}

TEST_CASE("a parameter that is missing or of the other kind is an error") {
  const Config config{{"bm", 128}, {"schedule", "pingpong"}};
  ConfigReader reader(config);
  CHECK_THROWS_AS(reader.get("bn"), Error);
  CHECK_THROWS_AS(reader.get("schedule"), Error);
  CHECK_THROWS_AS(reader.word("bm"), Error);
  CHECK_THROWS_AS(ConfigReader(Config()).get("bm"), Error);
}
