#include "speech/audio/audio.hpp"

#include <gtest/gtest.h>
