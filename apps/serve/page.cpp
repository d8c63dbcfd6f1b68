#include "apps/serve/page.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "apps/serve/error.hpp"
#include "runtime/format.hpp"
#include "runtime/sha256.hpp"

// clang-format off
asm(".pushsection .rodata\n"
    "tilewave_page_begin: .incbin \"" TILEWAVE_PAGE "\"\n"
    "tilewave_page_end: .byte 0\n"
    ".popsection\n");
// clang-format on
extern "C" {
extern const char tilewave_page_begin[] __attribute__((visibility("hidden")));
extern const char tilewave_page_end[] __attribute__((visibility("hidden")));
}

namespace tw::serve {

namespace {

std::string base64(const Sha256::Digest& digest) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < digest.size(); i += 3) {
    const auto byte = [&](std::size_t at) { return at < digest.size() ? unsigned{digest[at]} : 0U; };
    const unsigned bits = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    for (const unsigned shift : {18U, 12U, 6U, 0U}) text += kDigits[bits >> shift & 63];
  }
  for (std::size_t missing = (3 - digest.size() % 3) % 3; missing > 0; --missing) text[text.size() - missing] = '=';
  return text;
}

/// The hash by which a Content-Security-Policy allows the only element `name` of `page`.
std::string hash_of(std::string_view page, const std::string& name) {
  const std::string open = "<" + name + ">", close = "</" + name + ">";
  const std::size_t begin = page.find(open), end = page.find(close);
  if (begin == std::string_view::npos || end == std::string_view::npos) return "'none'";
  return "'sha256-" + base64(Sha256().add(page.substr(begin + open.size(), end - begin - open.size())).finish()) + "'";
}

}  // namespace

std::string_view page_text() { return {tilewave_page_begin, static_cast<std::size_t>(tilewave_page_end - tilewave_page_begin)}; }

Handler page_handler() {
  const std::string_view page = page_text();
  const std::string tag = "\"" + hex(Sha256().add(page).finish()).substr(0, 32) + "\"";
  // blob: is for the audio thread's module, which the page makes from its own text.
  const std::string policy = tw::format(
      "default-src 'none'; script-src {} blob:; style-src {}; connect-src 'self'; media-src 'self' blob:; worker-src blob:; img-src 'self' "
      "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
      hash_of(page, "script"), hash_of(page, "style"));
  const Headers headers = {
      {"Content-Type", "text/html; charset=utf-8"}, {"Cache-Control", "no-cache"},      {"ETag", tag},
      {"Content-Security-Policy", policy},          {"Referrer-Policy", "no-referrer"}, {"Permissions-Policy", "microphone=(self)"}};
  return [page, tag, headers](const std::shared_ptr<const HttpRequest>& request, const std::shared_ptr<Responder>& responder) {
    if (request->header("If-None-Match").find(tag) != std::string_view::npos)
      responder->send(304, headers, "");
    else
      responder->send(200, headers, std::string(page));
  };
}

Handler samples_handler(const std::filesystem::path& directory) {
  std::map<std::string, std::string> texts;
  std::ifstream list(directory / "transcripts.txt");
  for (std::string line; std::getline(list, line);)
    if (const std::size_t tab = line.find('\t'); tab != std::string::npos) texts[line.substr(0, tab)] = line.substr(tab + 1);
  return [directory, texts](const std::shared_ptr<const HttpRequest>& request, const std::shared_ptr<Responder>& responder) {
    constexpr std::string_view kPath = "/samples";
    const std::string name = request->path.substr(std::min(request->path.size(), kPath.size() + 1));
    if (name.empty()) {
      nlohmann::ordered_json samples = nlohmann::ordered_json::array();
      for (const auto& [file, text] : texts) samples.push_back({{"name", file}, {"text", text}});
      return responder->send(200, {{"Content-Type", "application/json"}}, samples.dump());
    }
    std::ifstream file;
    if (texts.contains(name)) file.open(directory / name, std::ios::binary);
    if (!file.is_open()) throw ApiError(404, "there is no such sample");
    std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    responder->send(200, {{"Content-Type", "audio/wav"}, {"Cache-Control", "max-age=86400"}}, std::move(bytes));
  };
}

}  // namespace tw::serve
