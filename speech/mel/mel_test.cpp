#include "speech/mel/mel.hpp"

#include <gtest/gtest.h>
