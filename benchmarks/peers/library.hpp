#pragma once

#include <string>
#include <vector>

namespace tw::bench {

/// A peer's shared library, loaded when the benchmark runs. It stays loaded for the life of the process.
class Library {
 public:
  /// Tries every name in every folder (glob patterns; "" is the loader's path). `problem` says what was searched when there is none.
  static Library open(const std::vector<std::string>& folders, const std::vector<std::string>& names, std::string& problem);

  explicit operator bool() const { return handle_ != nullptr; }

  /// Sets `function` to the symbol. False if the library does not have it.
  template <class Function>
  bool load(Function*& function, const char* symbol) const {
    function = reinterpret_cast<Function*>(find(symbol));
    return function != nullptr;
  }

 private:
  void* find(const char* symbol) const;
  void* handle_ = nullptr;
};

/// Folders where the libraries of a CUDA toolkit or of NVIDIA's Python packages lie, most specific first. `wheel` is a package's folder
/// below site-packages/nvidia, such as "cublas".
std::vector<std::string> cuda_library_folders(const std::string& wheel);

}  // namespace tw::bench
