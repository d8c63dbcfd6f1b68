// The names of a kernel's Globals, for errors. C++20 has no reflection, so they are parsed from the kernel's source.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "runtime/bind.hpp"
#include "runtime/format.hpp"
#include "tilewave/kernel.hpp"
#include "tilewave/launch.hpp"

namespace tw::detail {
namespace {

constexpr std::string_view kSpace = " \t\n";

/// The offsets of all Globals in unbound Params, in the order of their declarations.
std::vector<std::size_t> unbound_in(const void* params, std::size_t bytes) {
  std::vector<std::size_t> offsets;
  for (std::size_t at = 0; at + sizeof(BoundView) <= bytes; at += alignof(BoundView)) {
    i64 stride;
    std::memcpy(&stride, static_cast<const char*>(params) + at + offsetof(BoundView, stride_j), sizeof stride);
    if (stride == BoundView::kUnbound) offsets.push_back(at);
  }
  return offsets;
}

std::string without_comments(std::string_view text) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view rest = text.substr(at);
    std::size_t skipped = 0;
    if (rest.substr(0, 2) == "//")
      skipped = std::min(rest.find('\n'), rest.size());
    else if (rest.substr(0, 2) == "/*")
      skipped = std::min(rest.find("*/"), rest.size() - 2) + 2;
    if (skipped == 0) result += text[at++];
    at += skipped;
  }
  return result;
}

/// The text between the opening bracket at the beginning of `text` and the matching closing one.
std::string_view inside(std::string_view text, char opening, char closing) {
  int depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    depth += text[i] == opening ? 1 : text[i] == closing ? -1 : 0;
    if (depth == 0) return text.substr(1, i - 1);
  }
  return text.substr(1);
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kSpace);
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

/// The Globals that `struct Params` of the kernel declares itself: "Global<Target, const T> a, b;" gives a and b.
std::vector<std::string> declared_globals(std::string_view kernel, std::string_view source) {
  const EmbeddedFile* const file = find_embedded(source);
  if (file == nullptr) return {};
  const std::string text = without_comments({file->text, file->size});
  std::string_view name = kernel.substr(0, kernel.find('<'));
  if (const std::size_t scope = name.rfind(':'); scope != std::string_view::npos) name = name.substr(scope + 1);
  std::size_t at = std::string::npos;
  for (const char after : {' ', ':', '\n'})
    if (at == std::string::npos) at = text.find(tw::format("struct {}{}", name, after));
  at = text.find("struct Params", std::min(at, text.size()));
  at = text.find('{', std::min(at, text.size()));
  if (at == std::string::npos) return {};

  std::vector<std::string> names;
  std::string_view body = inside(std::string_view(text).substr(at), '{', '}');
  while (!body.empty()) {
    std::string_view statement = trimmed(body.substr(0, body.find(';')));
    body = body.find(';') == std::string_view::npos ? std::string_view() : body.substr(body.find(';') + 1);
    if (statement.substr(0, 4) == "tw::") statement.remove_prefix(4);
    const std::size_t angle = statement.find('<');
    if (angle == std::string_view::npos) continue;
    const std::string_view type = statement.substr(0, angle);
    if (type != "Global" && type != "Windowed" && type != "Awaited") continue;
    std::string_view declared = statement.substr(angle);
    declared.remove_prefix(std::min(inside(declared, '<', '>').size() + 2, declared.size()));
    while (!declared.empty()) {
      const std::size_t comma = declared.find(',');
      names.emplace_back(trimmed(declared.substr(0, comma)));
      declared = comma == std::string_view::npos ? std::string_view() : declared.substr(comma + 1);
    }
  }
  return names;
}

/// The host's default-constructed Params.
std::unique_ptr<void, decltype(&std::free)> make_blank(const ParamsUnderConstruction& p) {
  std::unique_ptr<void, decltype(&std::free)> blank(std::aligned_alloc(p.alignment, p.bytes), &std::free);
  if (blank == nullptr) throw std::bad_alloc();
  p.make_unbound(blank.get());
  return blank;
}

/// "kernel tw::Gemm<...>: params.bias", or "tensor 2 of 5 in its Params" if the name is not found.
std::string name_of_global(const ParamsUnderConstruction& p, std::size_t offset) {
  const auto blank = make_blank(p);
  const std::vector<std::size_t> all = unbound_in(blank.get(), p.bytes);
  const std::size_t index = static_cast<std::size_t>(std::find(all.begin(), all.end(), offset) - all.begin());
  const std::vector<std::string> names = declared_globals(p.kernel, p.source);
  if (names.size() == all.size() && index < names.size()) return tw::format("kernel {}: params.{}", p.kernel, names[index]);
  return tw::format("kernel {}: tensor {} of {} in its Params", p.kernel, index + 1, all.size());
}

}  // namespace

void require_bound(const ParamsUnderConstruction& p) {
  const std::vector<std::size_t> unbound = unbound_in(p.params, p.bytes);
  if (unbound.empty()) return;
  throw InvalidArgument(tw::format("{} was not bound; allowed: a tensor, or a null pointer if the kernel does not need one",
                                   name_of_global(p, unbound.front())));
}

void require_layout(const ParamsUnderConstruction& p, std::string_view unbound) {
  const auto refuse = [&](const std::string& what) {
    throw InvalidArgument(
        tw::format("kernel {}: Params differ between host and device: {}. Both must be compiled from the same files", p.kernel, what));
  };
  if (unbound.size() != p.bytes) refuse(tw::format("{} bytes on the host, {} on the device", p.bytes, unbound.size()));
  const auto blank = make_blank(p);
  const std::vector<std::size_t> here = unbound_in(blank.get(), p.bytes), there = unbound_in(unbound.data(), unbound.size());
  if (here != there) refuse(tw::format("tensors at bytes {} on the host, {} on the device", tw::join(here, ", "), tw::join(there, ", ")));
  for (const std::size_t at : here) {
    BoundView ours, theirs;
    std::memcpy(&ours, static_cast<const char*>(blank.get()) + at, sizeof ours);
    std::memcpy(&theirs, unbound.data() + at, sizeof theirs);
    if (ours.map_tile().element != theirs.map_tile().element) refuse(tw::format("the tensor at byte {} is of another type", at));
  }
}

void throw_named(const ParamsUnderConstruction& p, const BindError& error) {
  const auto offset = reinterpret_cast<const char*>(error.global) - static_cast<const char*>(p.params);
  throw InvalidArgument(tw::format("{}: {}", name_of_global(p, static_cast<std::size_t>(offset)), error.what()));
}

}  // namespace tw::detail
