#include "apps/tilewave/output.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::cli {

Output::Output(const std::string& path) : path_(path), is_new_(access(path.c_str(), F_OK) != 0), file_(std::fopen(path.c_str(), "a")) {
  if (file_ == nullptr) throw Error(tw::format("{}: {}", path, std::strerror(errno)));
}

Output::~Output() {
  if (file_ == nullptr) return;
  std::fclose(file_);
  if (is_new_) std::remove(path_.c_str());
}

void Output::write(const std::string& text) {
  std::FILE* file = std::freopen(path_.c_str(), "w", std::exchange(file_, nullptr));
  bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int reason = errno;
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  if (!ok) throw Error(tw::format("{}: {}", path_, std::strerror(reason != 0 ? reason : errno)));
}

}  // namespace tw::cli
