// Nothing but the headers that are compiled once for every test.
#include "support/catch.hpp"
