#include "registry/variant.hpp"

#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("a variant's id reads back as the variant") {
  for (const Variant& variant :
       {Variant{"gate_up_sm80", {{"bm", 128}, {"bn", 64}}}, Variant{"fallback", {}}})
    REQUIRE(Variant::parse(variant.id()) == variant);
  REQUIRE(Variant{"gate_up_sm80", {{"bm", 128}, {"bn", 64}}}.id() == "gate_up_sm80/bm=128,bn=64");
  REQUIRE(Variant{"fallback", {}}.id() == "fallback");
}

TEST_CASE("text that is no variant is refused") {
  for (const char* id : {"", "/bm=1", "down/bm", "down/bm=4x"}) {
    CAPTURE(id);
    REQUIRE_THROWS_AS(Variant::parse(id), Error);
  }
}

TEST_CASE("a recipe reads as its variants in order") {
  REQUIRE(recipe_text({{"up", {{"bm", 1}}}, {"down", {}}}) == "up/bm=1 + down");
  REQUIRE(recipe_text({}).empty());
}

TEST_CASE("recipes are the same variants whatever the order of their parameters") {
  const Recipe recipe{{"up", {{"bm", 1}, {"bn", 2}}}, {"down", {}}};
  REQUIRE(same_variants(recipe, recipe));
  REQUIRE(same_variants(recipe, {{"up", {{"bn", 2}, {"bm", 1}}}, {"down", {}}}));
  REQUIRE_FALSE(same_variants(recipe, {{"up", {{"bm", 2}, {"bn", 1}}}, {"down", {}}}));
  REQUIRE_FALSE(same_variants(recipe, {{"up", {{"bm", 1}}}, {"down", {}}}));
  REQUIRE_FALSE(same_variants(recipe, {{"down", {}}, {"up", {{"bm", 1}, {"bn", 2}}}}));
  REQUIRE_FALSE(same_variants(recipe, {{"up", {{"bm", 1}, {"bn", 2}}}}));
}
