// main() for a Catch2 2 that has no library with it.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
