#include "models/tokenizer/budget.hpp"

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

void Budget::grow(std::size_t before, std::size_t after, const char* what) {
  if (after > before) growth_ -= static_cast<std::int64_t>(after - before);
  if (growth_ < 0) throw FileError(tw::format("{}: the {} makes a text of {} bytes too long: {} bytes", file_, what, before, after));
}

}  // namespace tw::models
