// Compiled and linked without CMake: the library's own tile code must be there all the same.
#include <tilewave/kernel.hpp>

int main() { return tw::find_embedded("tilewave/tile/types.tile.hpp") == nullptr; }
