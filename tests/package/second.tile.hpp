// Tile code in the executable, embedded by a second call.
