// Something for a static library that a program uses.
int answer();
int answer() { return 42; }
