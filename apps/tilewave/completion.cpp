// tilewave completion, and the hidden command that its scripts call while a command is typed.

#include <algorithm>
#include <map>
#include <sstream>

#include "command.hpp"
#include "runtime/format.hpp"

namespace tw::cli {
namespace {

/// The possible words at a position of the command line.
struct Candidates {
  enum class Files { none, all, folders };
  Files files = Files::none;
  std::vector<std::pair<std::string, std::string>> words;  ///< with descriptions
};

using Source = std::function<std::vector<std::string>()>;

std::map<const CLI::Option*, Source>& sources() {
  static std::map<const CLI::Option*, Source> map;
  return map;
}

/// The members in "TEXT:{text,json}", the description of a CLI::IsMember.
std::vector<std::string> members(const std::string& type) {
  std::vector<std::string> names;
  const std::size_t begin = type.find('{'), end = type.find('}');
  if (begin == std::string::npos || end == std::string::npos) return names;
  std::istringstream list(type.substr(begin + 1, end - begin - 1));
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

Candidates values_of(const CLI::Option& option) {
  Candidates candidates;
  const std::string type = option.get_type_name();
  if (type.find("FILE") != std::string::npos)
    candidates.files = Candidates::Files::all;
  else if (type == "DIR")
    candidates.files = Candidates::Files::folders;
  const auto source = sources().find(&option);
  const std::vector<std::string> words = source == sources().end() ? members(type) : source->second();
  if (source != sources().end() && words.empty()) candidates.files = Candidates::Files::all;
  for (const std::string& word : words) candidates.words.emplace_back(word, "");
  return candidates;
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

/// Null if the command has no such option.
const CLI::Option* find_option(const CLI::App& command, const std::string& name) {
  const auto found = command.get_options([&](const CLI::Option* option) { return option->check_name(name); });
  return found.empty() || !name.starts_with('-') ? nullptr : found.front();
}

void add_options(const CLI::App& command, Candidates& candidates) {
  const auto shown = [](const CLI::Option* option) { return !option->get_group().empty(); };
  for (const CLI::Option* option : command.get_options(shown))
    for (const std::string& name : option->get_lnames()) candidates.words.emplace_back("--" + name, option->get_description());
}

/// The commands and values that may follow `positionals_given` positional arguments.
Candidates arguments_of(const CLI::App& command, std::size_t positionals_given) {
  Candidates candidates;
  for (const CLI::Option* option : command.get_options([](const CLI::Option* each) { return each->get_positional(); })) {
    const auto most = static_cast<std::size_t>(option->get_items_expected_max());
    if (positionals_given >= most) {
      positionals_given -= most;
      continue;
    }
    candidates = values_of(*option);
    break;
  }
  for (const CLI::App* each : command.get_subcommands({})) candidates.words.emplace_back(each->get_name(), each->get_description());
  return candidates;
}

/// The completions of `typed` after the words before it.
Candidates candidates_for(const CLI::App& root, const std::vector<std::string>& before, const std::string& typed) {
  const CLI::App* command = &root;
  const CLI::Option* open = nullptr;  // its value is next
  std::size_t positionals = 0;
  for (const std::string& word : before) {
    if (std::exchange(open, nullptr) != nullptr) continue;
    if (word.starts_with('-') && word != "-") {
      const CLI::Option* option = find_option(*command, word);
      if (option != nullptr && takes_value(*option)) open = option;
      continue;
    }
    const auto named = command->get_subcommands([&](const CLI::App* each) { return each->get_name() == word; });
    if (named.empty()) {
      ++positionals;
    } else {
      command = named.front();
      positionals = 0;
    }
  }
  if (open != nullptr) return values_of(*open);
  if (!typed.starts_with('-')) return arguments_of(*command, positionals);
  Candidates candidates;
  const std::size_t equals = typed.find('=');
  if (equals == std::string::npos) {
    add_options(*command, candidates);
  } else if (const CLI::Option* option = find_option(*command, typed.substr(0, equals)); option != nullptr && takes_value(*option)) {
    candidates = values_of(*option);
    for (auto& [word, meaning] : candidates.words) word = typed.substr(0, equals + 1) + word;
  }
  return candidates;
}

/// Bash splits "--format=js" into three words; this returns the two words of "--format js".
void join_at_equals(std::vector<std::string>& words) {
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i] != "=" || !words[i - 1].starts_with("--")) continue;
    if (i + 1 < words.size())
      words.erase(words.begin() + static_cast<std::ptrdiff_t>(i));
    else
      words[i].clear();
  }
}

// Each script calls the program that is being typed, so that the completions match its version. The first line of the answer is "files",
// "folders" or "words": whether file names are possible, too. Each further line is a word, a tab and its description.

constexpr const char* kBash = R"(# In ~/.bashrc: source <(tilewave completion bash)
_tilewave() {
  local kind word meaning
  COMPREPLY=()
  {
    read -r kind
    while IFS=$'\t' read -r word meaning; do COMPREPLY+=("$word"); done
  } < <("${COMP_WORDS[0]/#\~/$HOME}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  local typed=${COMP_WORDS[COMP_CWORD]}
  [[ $typed == = ]] && typed=
  case $kind in
    files) compopt -o filenames; while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$typed") ;;
    folders) compopt -o filenames; while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -d -- "$typed") ;;
  esac
}
complete -F _tilewave tilewave
)";

constexpr const char* kZsh = R"(#compdef tilewave
# In ~/.zshrc, after compinit: source <(tilewave completion zsh)
_tilewave() {
  local kind word meaning
  local -a found
  {
    read -r kind
    while IFS=$'\t' read -r word meaning; do found+=("${word//:/\\:}:$meaning"); done
  } < <("${words[1]/#\~/$HOME}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
  (( $#found )) && _describe tilewave found
  case $kind in
    files) _files ;;
    folders) _files -/ ;;
  esac
}
if [[ ${funcstack[1]-} == _tilewave ]]; then _tilewave "$@"; else compdef _tilewave tilewave; fi
)";

constexpr const char* kFish = R"(# In ~/.config/fish/config.fish: tilewave completion fish | source
function __tilewave_complete
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    set -l answer ($program __complete $words[2..] "$typed" 2>/dev/null)
    test (count $answer) -gt 1; and printf '%s\n' $answer[2..]
    switch "$answer[1]"
        case files
            __fish_complete_path "$typed"
        case folders
            __fish_complete_directories "$typed"
    end
end
complete -c tilewave -f -a '(__tilewave_complete)'
)";

}  // namespace

void completes_with(CLI::Option* option, std::function<std::vector<std::string>()> values) { sources()[option] = std::move(values); }
void completes_with_files(CLI::Option* option) {
  completes_with(option, [] { return std::vector<std::string>(); });
}

int complete(const CLI::App& app, std::vector<std::string> words) {
  if (words.empty()) words.emplace_back();
  join_at_equals(words);
  const std::string typed = words.back();
  words.pop_back();
  Candidates candidates = candidates_for(app, words, typed);
  using Files = Candidates::Files;
  tw::print("{}\n", candidates.files == Files::all ? "files" : candidates.files == Files::folders ? "folders" : "words");
  std::sort(candidates.words.begin(), candidates.words.end());
  for (const auto& [word, meaning] : candidates.words)
    if (word.starts_with(typed)) tw::print("{}\t{}\n", word, meaning);
  return kOk;
}

void add_completion(CLI::App& app, int& exit_code) {
  static std::string shell;
  CLI::App* command = app.add_subcommand("completion", "Print a shell script that completes commands, options and names");
  command->add_option("SHELL", shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer(
      "bash: source <(tilewave completion bash)\nzsh:  source <(tilewave completion zsh)\nfish: tilewave completion fish | source");
  command->callback([&exit_code] {
    tw::print("{}", shell == "bash" ? kBash : shell == "zsh" ? kZsh : kFish);
    exit_code = kOk;
  });
}

}  // namespace tw::cli
