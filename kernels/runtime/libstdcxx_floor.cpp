// Keeps the libraries loadable with the libstdc++ of GCC 8, which its wheels promise (manylinux_2_28).
#include <new>

namespace std {

// Called by newer headers where a vector would be too large; libstdc++ has it from GCC 11 on.
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
