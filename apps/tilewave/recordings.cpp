#include "apps/tilewave/recordings.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <sstream>
#include <system_error>

#include "command.hpp"
#include "runtime/format.hpp"

namespace tw::cli {
namespace {

namespace fs = std::filesystem;

// Those of the formats that speech/audio decodes.
constexpr const char* kAudioSuffixes[] = {"wav", "flac", "ogg", "oga", "opus", "mp3", "aif", "aiff", "m4a", "mp4", "aac", "webm", "mka"};

bool has_audio_suffix(const fs::path& path) {
  std::string suffix = path.extension().string();
  std::transform(suffix.begin(), suffix.end(), suffix.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return std::any_of(std::begin(kAudioSuffixes), std::end(kAudioSuffixes),
                     [&](const char* each) { return suffix == tw::format(".{}", each); });
}

bool is_pattern(const std::string& text) {
  const auto has = [&](char begin, char end) { return text.find(end, std::min(text.find(begin), text.size())) != text.npos; };
  return text.find_first_of("*?") != text.npos || has('[', ']') || has('{', '}');
}

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

/// The entries of `folder` that are not hidden, sorted.
std::vector<fs::directory_entry> entries_of(const fs::path& folder, std::vector<std::string>& problems) {
  std::vector<fs::directory_entry> entries;
  std::error_code error;
  for (fs::directory_iterator each(folder, error), end; !error && each != end; each.increment(error))
    if (!is_hidden(each->path())) entries.push_back(*each);
  if (error) problems.push_back(tw::format("{}: {}", folder.string(), error.message()));
  std::sort(entries.begin(), entries.end());
  return entries;
}

/// A link to a folder may lead back to where it is.
bool is_own_folder(const fs::directory_entry& entry) {
  std::error_code error;
  return entry.is_directory(error) && !entry.is_symlink(error);
}

void search(const fs::path& folder, const fs::path& name, Recordings& all) {
  for (const fs::directory_entry& entry : entries_of(folder, all.problems)) {
    const fs::path inner = name / entry.path().filename();
    std::error_code error;
    const fs::file_type type = entry.status(error).type();
    if (is_own_folder(entry))
      search(entry.path(), inner, all);
    else if (has_audio_suffix(inner) && (type == fs::file_type::regular || type == fs::file_type::not_found))  // a broken link is reported
      all.found.push_back({entry.path().string(), inner});
  }
}

/// "{a,b}.wav" as "a.wav" and "b.wav". Braces in braces are not supported.
std::vector<std::string> without_braces(const std::string& pattern) {
  const std::size_t begin = pattern.find('{'), end = pattern.find('}', begin == pattern.npos ? 0 : begin);
  if (begin == pattern.npos || end == pattern.npos) return {pattern};
  std::vector<std::string> all;
  std::istringstream choices(pattern.substr(begin + 1, end - begin - 1) + ",");
  for (std::string choice; std::getline(choices, choice, ',');) {
    const std::vector<std::string> rest = without_braces(pattern.substr(end + 1));
    for (const std::string& each : rest) all.push_back(pattern.substr(0, begin) + choice + each);
  }
  return all;
}

using Components = std::span<const std::string>;

/// Appends what matches the components of a pattern in `folder` ("": the current one).
void add_matches(const fs::path& folder, Components pattern, Recordings& all, std::vector<fs::path>& matches) {
  std::error_code error;
  if (pattern.empty()) {
    if (fs::exists(fs::symlink_status(folder, error))) matches.push_back(folder);
    return;
  }
  const std::string& component = pattern.front();
  const Components rest = pattern.subspan(1);
  const bool any_folders = component == "**" && !rest.empty();
  if (any_folders) add_matches(folder, rest, all, matches);
  if (!is_pattern(component)) return add_matches(folder / component, rest, all, matches);
  if (!fs::is_directory(folder.empty() ? "." : folder, error)) return;
  for (const fs::directory_entry& entry : entries_of(folder.empty() ? "." : folder, all.problems)) {
    const fs::path inner = folder / entry.path().filename();
    if (any_folders) {
      if (is_own_folder(entry)) add_matches(inner, pattern, all, matches);
    } else if (fnmatch(component.c_str(), inner.filename().c_str(), 0) == 0) {
      add_matches(inner, rest, all, matches);
    }
  }
}

void add_pattern(const std::string& argument, Recordings& all) {
  std::map<fs::path, fs::path> found;  // file and name, sorted, each once
  for (const std::string& pattern : without_braces(argument)) {
    std::vector<std::string> components;
    for (const fs::path& component : fs::path(pattern)) components.push_back(component.string());
    const auto first = std::find_if(components.begin(), components.end(), is_pattern);
    fs::path fixed;
    for (auto each = components.begin(); each != first; ++each) fixed /= *each;
    std::vector<fs::path> matches;
    add_matches(fixed, Components(first, components.end()), all, matches);
    for (const fs::path& match : matches) {
      const fs::path name = fixed.empty() ? match : match.lexically_relative(fixed);
      std::error_code error;
      if (!fs::is_directory(match, error)) {
        found.emplace(match, name == "." ? match.filename() : name);  // all of the pattern is fixed after its braces
        continue;
      }
      Recordings inside;
      search(match, name, inside);
      for (const Recording& each : inside.found) found.emplace(each.file, each.name);
      all.problems.insert(all.problems.end(), inside.problems.begin(), inside.problems.end());
    }
  }
  for (const auto& [file, name] : found) all.found.push_back({file.string(), name});
  if (found.empty()) all.problems.push_back(tw::format("{}: no file matches this pattern", argument));
}

}  // namespace

Recordings find_recordings(const std::vector<std::string>& arguments) {
  Recordings all;
  for (const std::string& argument : arguments) {
    std::error_code error;
    if (argument != "-" && fs::is_directory(argument, error)) {
      all.searched = true;
      Recordings inside;
      search(argument, "", inside);
      if (inside.found.empty() && inside.problems.empty())
        inside.problems = {tw::format("{}: no recordings in this folder; looked for names with the suffixes {}", argument,
                                      tw::join(kAudioSuffixes, ", "))};
      all.found.insert(all.found.end(), inside.found.begin(), inside.found.end());
      all.problems.insert(all.problems.end(), inside.problems.begin(), inside.problems.end());
    } else if (argument != "-" && is_pattern(argument) && !fs::exists(fs::symlink_status(argument, error))) {
      all.searched = true;
      add_pattern(argument, all);
    } else {
      all.found.push_back({argument, argument == "-" ? fs::path("stdin") : fs::path(argument).filename()});
    }
  }
  std::set<std::string> told;
  std::erase_if(all.problems, [&](const std::string& problem) { return !told.insert(problem).second; });
  return all;
}

std::vector<std::string> transcript_paths(const std::vector<Recording>& recordings, const fs::path& folder, const std::string& suffix) {
  std::map<fs::path, int> wanted;
  for (const Recording& each : recordings) ++wanted[fs::path(each.name).replace_extension(suffix)];
  std::vector<std::string> paths;
  std::set<std::string> taken;
  for (const Recording& each : recordings) {
    const fs::path name = fs::path(each.name).replace_extension(suffix);
    paths.push_back((folder / (wanted[name] == 1 ? name : fs::path(each.name) += suffix)).string());
    if (taken.insert(paths.back()).second) continue;
    throw UsageError(
        tw::format("transcribe: two recordings would be written to {}; give the folder that both are in, or transcribe them separately",
                   paths.back()));
  }
  return paths;
}

}  // namespace tw::cli
