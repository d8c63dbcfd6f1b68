// The hidden command that prints the manual page, made of the same descriptions as --help.

#include <algorithm>
#include <regex>
#include <set>
#include <sstream>

#include "command.hpp"
#include "runtime/format.hpp"

namespace tw::cli {
namespace {

/// `text` without what roff would interpret, and with the ASCII characters that it would replace.
std::string roff(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\')
      result += "\\e";
    else if (c == '-')
      result += "\\-";
    else if (c == '\'')
      result += "\\(aq";
    else if (c == '`')
      result += "\\(ga";
    else if (c == '^')
      result += "\\(ha";
    else if (c == '~')
      result += "\\(ti";
    else
      result += c;
  }
  return result;
}

/// Lines of text. A dot at the beginning of one would be a request.
std::string paragraph(const std::string& text) {
  constexpr std::size_t kWrapped = 100;  // sources wrap at up to 140 columns; a shorter line is meant to end there
  std::istringstream stream(text);
  std::string result;
  for (std::string line; std::getline(stream, line);) {
    result += (line.starts_with('.') ? "\\&" : "") + roff(line) + "\n";
    if (line.size() < kWrapped && !stream.eof()) result += ".br\n";
  }
  return result;
}

std::string sentence(std::string text) {
  if (!text.empty() && !text.ends_with('.')) text += '.';
  return text;
}

std::string names_of(const std::set<CLI::Option*>& options) {
  std::vector<std::string> names;
  for (const CLI::Option* each : options) names.push_back(each->get_name());
  std::sort(names.begin(), names.end());
  return tw::join(names, ", ");
}

std::string option_text(const CLI::Option& option) {
  const bool has_value = option.get_items_expected_max() > 0;
  std::string type = option.get_type_name(), text = sentence(option.get_description());
  const std::size_t colon = type.find(':');
  const std::string allowed = colon == type.npos ? "" : type.substr(colon + 1);
  type = type.substr(0, colon);
  if (allowed.starts_with('{')) {
    type = allowed.substr(1, allowed.find('}') - 1);
    std::replace(type.begin(), type.end(), ',', '|');
  } else if (!allowed.empty()) {
    std::smatch range;
    if (std::regex_search(allowed, range, std::regex(R"(\[(\S+) - (\S+)\])")))  // "INT in [1 - 16]"
      text += tw::format(" Allowed: {} to {}.", range[1].str(), range[2].str());
    else
      text += tw::format(" Allowed: {}.", allowed);
  }
  if (has_value && !option.get_default_str().empty()) text += tw::format(" Default: {}.", option.get_default_str());
  if (!option.get_excludes().empty()) text += tw::format(" Not with {}.", names_of(option.get_excludes()));
  if (!option.get_needs().empty()) text += tw::format(" Needs {}.", names_of(option.get_needs()));
  if (option.get_positional()) return tw::format(".TP\n\\fI{}\\fR\n{}", roff(option.get_name(true)), paragraph(text));
  std::string names = roff(option.get_name(false, true));
  if (const std::size_t comma = names.find(','); comma != names.npos) names.replace(comma, 1, "\\fR, \\fB");
  return tw::format(".TP\n\\fB{}\\fR{}\n{}", names, has_value ? tw::format(" \\fI{}\\fR", roff(type)) : "", paragraph(text));
}

std::string options_text(const CLI::App& command) {
  std::string text;
  for (const bool positional : {true, false})
    for (const CLI::Option* each : command.get_options({}))
      if (each->get_positional() == positional && each->get_name() != "--help") text += option_text(*each);
  return text;
}

std::string command_text(const CLI::App& command) {
  std::string usage = full_name(command);
  const auto subcommands = command.get_subcommands({});
  if (!subcommands.empty()) usage += command.get_require_subcommand_min() > 0 ? " COMMAND" : " [COMMAND]";
  for (const CLI::Option* each : command.get_options({})) {
    if (!each->get_positional()) continue;
    const std::string name = each->get_name(true) + (each->get_items_expected_max() > 1 ? "..." : "");
    usage += each->get_required() ? " " + name : " [" + name + "]";
  }
  std::string text = tw::format(".SS {}\n{}", roff(usage), paragraph(sentence(command.get_description()))) + options_text(command);
  if (const std::string footer = command.get_footer(); footer != command.get_parent()->get_footer())  // else inherited
    text += ".PP\n" + paragraph(footer);
  for (const CLI::App* each : subcommands) text += command_text(*each);
  return text;
}

}  // namespace

int print_manual(const CLI::App& app) {
  std::string text = ".\\\" Printed by tilewave " + std::string(kManualCommand) + "\n";
  text += tw::format(".TH TILEWAVE 1 \"\" \"tilewave {}\" \"User Commands\"\n", roff(TILEWAVE_VERSION));
  text += ".SH NAME\ntilewave \\- speech to text\n";
  text += ".SH SYNOPSIS\n.B tilewave\n.I COMMAND\n[\\fIOPTION\\fR]... [\\fIARGUMENT\\fR]...\n";
  text += ".SH DESCRIPTION\n" + paragraph(sentence(app.get_description())) + paragraph(app.get_footer());
  text += ".SH OPTIONS\nEvery command has \\fB\\-\\-help\\fR.\n" + options_text(app);
  text += ".SH COMMANDS\n";
  for (const CLI::App* each : app.get_subcommands({})) text += command_text(*each);
  text += ".SH ENVIRONMENT\n";
  for (const Variable& each : environment_variables()) text += tw::format(".TP\n.B {}\n{}", each.name, paragraph(sentence(each.what)));
  text += ".SH EXAMPLES\n";
  for (const auto& [command, what] :
       {std::pair{"tilewave transcribe talk.flac", "Prints what is said."},
        {"tilewave transcribe --output texts --format srt talks", "Writes subtitles of all recordings in a folder to another."},
        {"tilewave listen", "Prints what a microphone hears."},
        {"tilewave serve", "Answers OpenAI's requests for transcriptions on port 8080."}})
    text += tw::format(".TP\n.B {}\n{}", roff(command), paragraph(what));
  tw::print("{}", text);
  return kOk;
}

}  // namespace tw::cli
