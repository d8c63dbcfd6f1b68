#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>

namespace tw::test {

/// Expects that f() throws exactly an `Exception`, whose message contains all of `parts`.
template <class Exception, class F>
void expect_error(F f, std::initializer_list<std::string_view> parts) {
  try {
    f();
  } catch (const Exception& error) {
    EXPECT_EQ(typeid(error), typeid(Exception)) << error.what();
    for (std::string_view part : parts)
      EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos) << "no \"" << part << "\" in: " << error.what();
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

}  // namespace tw::test
