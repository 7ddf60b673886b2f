// What C++ tests are told by: a check that fails says where, and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(what) \
  do { \
    if (!(what)) std::printf("line %d: %s\n", __LINE__, #what), std::exit(1); \
  } while (false)
