"""The C++ library that runs program files without Python and without torch."""
