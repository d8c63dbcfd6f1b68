#include "apps/serve/error.hpp"

#include <gtest/gtest.h>

namespace tw::serve {
namespace {

TEST(ApiError, IsOpenAisErrorObject) {
  EXPECT_EQ(
      error_json({400, "temperature is \"hot\"; it must be a number", "temperature"}),
      R"({"error":{"message":"temperature is \"hot\"; it must be a number","type":"invalid_request_error","param":"temperature","code":null}})");
  EXPECT_EQ(error_json({401, "no API key", "", "invalid_api_key"}),
            R"({"error":{"message":"no API key","type":"authentication_error","param":null,"code":"invalid_api_key"}})");
  EXPECT_EQ(error_json({503, "\xff"}), "{\"error\":{\"message\":\"\xEF\xBF\xBD\",\"type\":\"server_error\",\"param\":null,\"code\":null}}");
}

}  // namespace
}  // namespace tw::serve
