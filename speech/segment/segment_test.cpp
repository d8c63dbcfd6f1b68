#include "speech/segment/segment.hpp"

#include <gtest/gtest.h>
