#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace tw::models {

/// One object of a JSON file and its path there, for messages. Both must outlive it. Throws FileError for members of another type.
class Fields {
 public:
  Fields(const nlohmann::json& object, const std::string& file, std::string where);

  const std::string& file() const { return file_; }
  const std::string& where() const { return where_; }
  /// The member `type`, or `fallback` if it is absent.
  std::string type(const std::string& fallback = "") const;
  /// Null counts as absent.
  bool has(const char* name) const;
  const nlohmann::json& at(const char* name) const;
  std::string string(const char* name) const;
  bool boolean(const char* name, bool fallback) const;
  /// A whole number from 0 to `largest`.
  int number(const char* name, int largest) const;
  const nlohmann::json& array(const char* name) const;
  Fields object(const char* name) const;
  /// An object in an array.
  Fields element(const char* name, std::size_t index) const;
  /// Calls `visit` with the objects in an array, in order.
  template <class F>
  void for_each(const char* name, F visit) const {
    const std::size_t count = array(name).size();
    for (std::size_t i = 0; i < count; ++i) visit(element(name, i));
  }

  /// "file: where: what"
  [[noreturn]] void fail(const std::string& what) const;
  /// For an unknown `type`.
  [[noreturn]] void unsupported(const std::string& found, const char* allowed) const;

 private:
  const nlohmann::json& object_;
  const std::string& file_;
  std::string where_;
};

}  // namespace tw::models
