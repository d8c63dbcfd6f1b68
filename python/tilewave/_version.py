__version__ = "0.1.0"  # as in CMakeLists.txt
