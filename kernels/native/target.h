// One file of the library is compiled for one instruction set. It says which before its first function:
//
//     #define XQ_TARGET "avx2,fma"
//     #include "target.h"
//
// GCC then compiles all that follows for it. clang, which does not know that pragma, pushes an attribute
// instead; the file ends with `XQ_TARGET_END`, which takes it off again.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XQ_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define XQ_PUSH_TARGET(isa) \
  XQ_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define XQ_TARGET_END XQ_PRAGMA(clang attribute pop)
#else
#define XQ_PUSH_TARGET(isa) XQ_PRAGMA(GCC target(isa))
#define XQ_TARGET_END
#endif

XQ_PUSH_TARGET(XQ_TARGET)
