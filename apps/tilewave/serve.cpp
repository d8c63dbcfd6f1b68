// tilewave serve

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <thread>

#include "apps/serve/routes.hpp"
#include "apps/serve/server.hpp"
#include "apps/tilewave/terminal.hpp"
#include "apps/tilewave/transcribe.hpp"
#include "command.hpp"
#include "runtime/format.hpp"
#include "speech/audio/av_module.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech_engine.hpp"

namespace tw::cli {
namespace {

struct ServeArguments {
  ModelArguments model;
  std::string name, prompt_template, keys, log_format = "text", log_level = "info";
  std::vector<std::string> origins;
  int forced_tokens = 0;
  serve::ServerOptions server;
  serve::Limits limits;
  speech::EngineOptions engine;
};

/// Descriptors for all connections, if the system allows them.
void raise_descriptor_limit(int connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = static_cast<rlim_t>(connections) + 256;  // and for files, GPUs, and connections that are refused
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

/// SIGINT and SIGTERM, which all threads that start later leave to this object: the first calls `first`, the second ends the process.
class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, &old_);
  }
  ~StopSignals() {
    if (thread_.joinable()) {
      done_ = true;
      pthread_kill(thread_.native_handle(), SIGTERM);
      thread_.join();
    }
    pthread_sigmask(SIG_SETMASK, &old_, nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  void wait(std::function<void()> first) {
    thread_ = std::thread([this, first = std::move(first)] {
      int signal = 0;
      sigwait(&set_, &signal);
      if (done_) return;
      first();
      sigwait(&set_, &signal);
      if (!done_) std::_Exit(128 + signal);
    });
  }

 private:
  sigset_t set_{}, old_{};
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

/// The bundled recordings, next to the bundled checkpoint: installed, or in the folder that the project is built in.
std::filesystem::path samples_folder() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* place : {"../share/tilewave/samples", "../assets/samples"})
    if (std::filesystem::exists(program / place, error)) return program / place;
  return {};
}

std::string served_name(const ServeArguments& a, const std::string& model) {
  if (!a.name.empty()) return a.name;
  const std::filesystem::path path = std::filesystem::weakly_canonical(model);
  return path.extension() == ".gguf" ? path.stem().string() : path.filename().string();
}

int run_server(ServeArguments& a) {
  const auto begin = std::chrono::steady_clock::now();
  const speech::LoadOptions load = load_options(a.model);
  const std::string model = a.model.model.empty() ? default_model() : a.model.model;
  if (!a.keys.empty()) a.server.keys = serve::ApiKeys::read(a.keys);
  try {
    a.server.cors = serve::Cors(a.origins);
  } catch (const InvalidArgument& error) {
    throw UsageError(tw::format("--cors: {}", error.what()));
  }
  if (!a.prompt_template.empty() && a.prompt_template.find("{prompt}") == std::string::npos)
    throw UsageError(tw::format("--prompt-template: {} has no {{prompt}}", a.prompt_template));
  raise_descriptor_limit(a.limits.connections);

  const auto level = [&] {
    if (a.log_level == "debug") return serve::LogLevel::debug;
    if (a.log_level == "warning") return serve::LogLevel::warning;
    if (a.log_level == "error") return serve::LogLevel::error;
    return a.log_level == "none" ? serve::LogLevel::none : serve::LogLevel::info;
  };
  serve::Log log(a.log_format == "json" ? serve::LogFormat::json : serve::LogFormat::text, level());
  serve::Service service;
  service.model = served_name(a, model);
  service.created = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  service.prompt_template = a.prompt_template;
  a.limits.upload_memory_bytes = std::max(a.limits.upload_memory_bytes, 4 * a.limits.upload_bytes);
  service.forced_tokens = a.forced_tokens;
  service.limits = a.limits;

  StopSignals signals;
  a.server.workers = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 2, 16);
  serve::Server server(service, log, serve::routes(service, samples_folder()), std::move(a.server));
  signals.wait([&] {
    log.write(serve::LogLevel::info, "draining");
    server.drain();
  });
  const std::string url = server.url();
  log.write(serve::LogLevel::info, "listening", {{"url", url}});
  if (a.model.model.empty())
    log.write(serve::LogLevel::info,
              "the model is the bundled one, which knows spoken English digits and nothing else; --model DIR serves another");

  // FFmpeg's libraries take 0.1 s to load: not on the time of the first upload that needs them.
  const std::jthread formats([&] {
    if (const std::string& problem = speech::av_module_problem(); !problem.empty())
      log.write(serve::LogLevel::warning, "webm, m4a and other formats of FFmpeg are refused", {{"reason", problem}});
  });

  // The server is destroyed after the engine, whose last callbacks answer.
  std::unique_ptr<speech::Engine> engine;
  std::exception_ptr failed;
  std::atomic<bool> loading = true;
  std::jthread runner([&](const std::stop_token& stop) {
    try {
      a.engine.on_stage = [&](speech::EngineStage stage, double seconds, int count) { service.metrics.stage(stage, seconds, count); };
      engine = std::make_unique<speech::Engine>(model, load, a.engine);
    } catch (...) {
      failed = std::current_exception();
      loading = false;
      return server.drain();
    }
    service.loaded = engine.get();
    loading = false;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const speech::LoadOptions& loaded = engine->options();
    log.write(
        serve::LogLevel::info, "ready",
        {{"model", service.model}, {"device", loaded.device.name()}, {"dtype", std::string(name_of(*loaded.dtype))}, {"seconds", seconds}});
    tw::print("listening on {}\n", url);
    std::fflush(stdout);
    try {
      engine->run(stop);
    } catch (const std::exception& error) {
      // Of a device, as a rule, on which nothing works any more. Whatever watches the server starts it anew.
      log.write(serve::LogLevel::error, "the engine failed", {{"what", std::string(error.what())}});
      std::_Exit(kFailure);
    }
  });
  server.wait();
  if (loading) std::_Exit(kOk);  // a large model; nothing can be lost
  runner.request_stop();
  runner.join();
  service.loaded = nullptr;
  if (failed) std::rethrow_exception(failed);
  engine.reset();
  log.write(serve::LogLevel::info, "ended");
  return kOk;
}

}  // namespace

void add_serve(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand(
      "serve",
      "Speech to text over HTTP: OpenAI's API for transcription, live captions over WebSocket, and a page to talk into (docs/serve.md)");
  auto arguments = std::make_shared<ServeArguments>();
  ServeArguments& a = *arguments;
  command->add_option("--host", a.server.host, "Name or address to listen on; 0.0.0.0 or :: for all")->capture_default_str();
  command->add_option("--port", a.server.port, "0: any that is free")->check(CLI::Range(0, 65535))->capture_default_str();
  add_model_options(*command, a.model);
  command->add_option("--model-name", a.name, "The model's name for clients; default: that of its folder or file");
  command->add_option("--prompt-template", a.prompt_template,
                      "The model's instruction for requests with a prompt, in which {prompt} stands for it; default: prompts are ignored");
  command->add_option("--batch", a.engine.batch, "Sequences that are decoded together; default: 16, or 64 on a GPU")
      ->check(CLI::Range(1, 256));
  command->add_option("--cache-tokens", a.engine.cache_tokens, "Tokens that the key-value cache holds; default: 1024 for each of --batch")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
  command->add_option("--queue", a.engine.queue, "Requests that may wait; others get 429")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--max-upload", a.limits.upload_bytes, "Bytes of a request, such as 100MB")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::size_t{1024}, std::size_t{1} << 40))
      ->capture_default_str();
  command->add_option("--max-audio-seconds", a.limits.audio_seconds, "Of one recording")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  command->add_option("--max-connections", a.limits.connections, "Others get 503")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  command->add_option("--request-timeout", a.limits.request_seconds, "Seconds from a request's first byte to the end of its answer")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  command
      ->add_option("--idle-timeout", a.limits.idle_seconds,
                   "Seconds that a connection may be silent: between requests, in the middle of an upload, or without reading its answer")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  command->add_option("--header-timeout", a.limits.header_seconds, "Seconds for a request's headers")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  command->add_option("--api-keys", a.keys, "File with one API key in each line; requests to /v1 need one of them")->type_name("FILE");
  command->add_option("--cors", a.origins, "Origin whose pages may use the server, such as https://example.org, or *; may be repeated")
      ->type_name("ORIGIN")
      ->allow_extra_args(false);
  command->add_option("--force-tokens", a.forced_tokens, "Tokens that every segment of an upload generates")
      ->check(CLI::Range(1, 1 << 20))
      ->group("");  // for benchmarks/serve.py, with random weights
  command->add_option("--log-format", a.log_format, "text, or json: one object in each line")
      ->check(CLI::IsMember({"text", "json"}))
      ->capture_default_str();
  command->add_option("--log-level", a.log_level, "debug, info, warning, error or none; logs go to standard error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "none"}))
      ->capture_default_str();
  command->callback([arguments, &exit_code] { exit_code = run_server(*arguments); });
}

}  // namespace tw::cli
