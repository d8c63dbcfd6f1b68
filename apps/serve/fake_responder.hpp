#pragma once

// For tests: a client that keeps its answer, and bodies as clients send them.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/serve/http.hpp"

namespace tw::serve::test {

/// Keeps the answer.
struct FakeResponder : Responder {
  int status = 0;
  Headers headers;
  std::string body;
  std::vector<std::string> chunks;
  bool ended = false;
  std::function<void()> gone;
  std::function<void()> on_write;  ///< called after each chunk

  void send(int code, Headers fields, std::string text) override {
    status = code;
    headers = std::move(fields);
    body = std::move(text);
    ended = true;
  }
  void begin(int code, Headers fields) override {
    status = code;
    headers = std::move(fields);
  }
  void write(std::string chunk) override {
    body += chunk;
    chunks.push_back(std::move(chunk));
    if (on_write) on_write();
  }
  void end() override { ended = true; }
  void on_gone(std::function<void()> call) override { gone = std::move(call); }

  std::string header(std::string_view name) const {
    for (const auto& [key, value] : headers)
      if (key == name) return value;
    return "";
  }
};

inline constexpr const char* kFormType = "multipart/form-data; boundary=----x7MA";

/// A form with these fields; those called file get a name of a file.
inline std::string form_body(const std::vector<std::pair<std::string, std::string>>& fields) {
  std::string body;
  for (const auto& [name, value] : fields)
    body += "------x7MA\r\nContent-Disposition: form-data; name=\"" + name + "\"" +
            (name == "file" ? "; filename=\"talk.wav\"\r\nContent-Type: audio/wav" : "") + "\r\n\r\n" + value + "\r\n";
  return body + "------x7MA--\r\n";
}

}  // namespace tw::serve::test
