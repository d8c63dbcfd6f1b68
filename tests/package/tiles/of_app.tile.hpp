// Tile code in the executable.
