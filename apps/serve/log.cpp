// The only file that includes spdlog. Header-only, like the project's use of fmt: the program needs neither library to run.
#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#define SPDLOG_HEADER_ONLY
#define SPDLOG_FMT_EXTERNAL
#include "apps/serve/log.hpp"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

namespace tw::serve {

namespace {

using Json = nlohmann::ordered_json;

spdlog::level::level_enum level_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::none:
      break;
  }
  return spdlog::level::off;
}

constexpr const char* name_of(LogLevel level) {
  constexpr const char* kNames[] = {"debug", "info", "warning", "error", "none"};
  return kNames[static_cast<int>(level)];
}

/// In printable ASCII: neither a terminal nor a line's end sees what a client sent.
std::string dumped(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }

Json to_json(const LogField& field) {
  return std::visit([](const auto& value) { return Json(value); }, field.second);
}

bool empty(const LogField& field) {
  const auto* text = std::get_if<std::string>(&field.second);
  return text != nullptr && text->empty();
}

/// A field's value in a line of text: quoted if it is not a plain word.
std::string to_text(const Json& json) {
  const auto plain = [](unsigned char c) { return c > ' ' && c < 0x7F && c != '"' && c != '\\' && c != '='; };
  if (!json.is_string()) return dumped(json);
  const auto& text = json.get_ref<const std::string&>();
  return !text.empty() && std::all_of(text.begin(), text.end(), plain) ? text : dumped(json);
}

}  // namespace

struct Log::State {
  explicit State(std::FILE* file)
      : logger("tilewave", std::make_shared<spdlog::sinks::stdout_sink_base<spdlog::details::console_mutex>>(file)) {}
  spdlog::logger logger;
};

Log::Log(LogFormat format, LogLevel level, std::FILE* file) : format_(format), level_(level), state_(std::make_unique<State>(file)) {
  // The whole line is made in write().
  state_->logger.set_formatter(std::make_unique<spdlog::pattern_formatter>("%v"));
  state_->logger.set_level(level_of(level));
  state_->logger.flush_on(spdlog::level::debug);
}

Log::~Log() = default;

void Log::write(LogLevel level, std::string_view message, std::initializer_list<LogField> fields) {
  if (!writes(level)) return;
  const auto now = std::chrono::time_point_cast<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  const std::string time = fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                                       utc.tm_hour, utc.tm_min, utc.tm_sec, now.time_since_epoch().count() % 1000);
  std::string line;
  if (format_ == LogFormat::json) {
    Json json = {{"time", time}, {"level", name_of(level)}, {"message", message}};
    for (const LogField& field : fields)
      if (!empty(field)) json[std::string(field.first)] = to_json(field);
    line = dumped(json);
  } else {
    line = fmt::format("{} {} {}", time, name_of(level), message);
    for (const LogField& field : fields)
      if (!empty(field)) line += fmt::format(" {}={}", field.first, to_text(to_json(field)));
  }
  state_->logger.log(level_of(level), spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace tw::serve
