// What the stock part, a library of its own, calls of this one: see setup.py. All else is hidden.
#pragma once

#define X86QUANT_EXPORTED __attribute__((visibility("default")))
