#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tw::cli {

/// A recording to transcribe.
struct Recording {
  std::string file;            ///< as it is opened and shown; "-": standard input
  std::filesystem::path name;  ///< relative to the folder, or the part of a pattern without wildcards, that it was found in
};

struct Recordings {
  std::vector<Recording> found;
  std::vector<std::string> problems;  ///< folders and patterns without recordings, folders that cannot be read
  bool searched = false;              ///< an argument was a folder or a pattern
};

/// The recordings that `arguments` name: files; folders, searched recursively for names with the suffix of an audio format; and patterns
/// that no shell has expanded, with *, ?, [...], {a,b}, and **/ for any number of folders. A name that exists is never a pattern. What is
/// found in a folder or by a pattern is sorted. Hidden files and folders, and links to folders inside a folder, are skipped.
Recordings find_recordings(const std::vector<std::string>& arguments);

/// Paths of the transcripts below `folder`: the recordings' names with `suffix` instead of their own, or after their own where two would
/// otherwise be the same. Throws UsageError if two are the same nevertheless.
std::vector<std::string> transcript_paths(const std::vector<Recording>& recordings, const std::filesystem::path& folder,
                                          const std::string& suffix);

}  // namespace tw::cli
