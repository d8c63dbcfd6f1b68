#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace tw::serve {

enum class LogFormat { text, json };
enum class LogLevel { debug, info, warning, error, none };

using LogField = std::pair<std::string_view, std::variant<std::string, std::int64_t, double>>;

/// Lines about what the server does, by spdlog. Whatever a client may have sent belongs in a field: fields are escaped to printable ASCII;
/// those with empty text are left out. Any thread.
class Log {
 public:
  Log(LogFormat format, LogLevel level, std::FILE* file = stderr);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  /// text: `2026-01-31T12:00:00.000Z info request id=req_1 status=200`; json: `{"time": ..., "level": ..., "message": ..., "id": ...}`
  void write(LogLevel level, std::string_view message, std::initializer_list<LogField> fields = {});
  bool writes(LogLevel level) const { return level >= level_ && level != LogLevel::none; }

 private:
  struct State;
  LogFormat format_;
  LogLevel level_;
  std::unique_ptr<State> state_;
};

}  // namespace tw::serve
