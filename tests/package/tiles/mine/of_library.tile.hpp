// Tile code in a static library of the user.
