#pragma once

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <tilewave/error.hpp>
#include <vector>

#include "weights.hpp"

namespace arr_coc {

inline constexpr int kMinSide = 64, kMaxSide = 2048;  ///< pixels of an image's side: 1 to 1024 patches

struct Colour {
  std::uint8_t red, green, blue;
};

struct Image {
  int width, height;
  std::vector<Colour> pixels;  ///< row by row

  const Colour& at(int x, int y) const { return pixels[static_cast<std::size_t>(y) * width + x]; }
};

/// A lighthouse by the sea at dusk, 512 x 384: a sky almost without information, a rock and waves full of it, and two things that stand
/// out. In integers, so that other languages draw the same bytes.
inline Image lighthouse() {
  Image image{512, 384, {}};
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      const int from_sun = std::abs(x - 368), from_tower = std::abs(x - 128), from_rock = std::abs(y - 304);
      int red = 48 + y / 2, green = 64 + y / 4, blue = 128 - y / 8;
      if (y >= 224) {
        const int wave = (2 * x + y * y / 8) % 64;
        red = 16 + wave / 2, green = 48 + wave / 2, blue = 88 + wave / 2;
        if (from_sun < 16 + (y - 224) / 4 && wave > 40) red = 250, green = 200, blue = 90;
      }
      if (from_sun * from_sun + (y - 112) * (y - 112) < 40 * 40) red = 250, green = 200, blue = 90;
      if (from_tower * from_tower + 4 * from_rock * from_rock < 112 * 112) {
        red = green = blue = static_cast<int>(hash(static_cast<std::uint32_t>(y * image.width + x)) % 96) + 32;
      }
      if (y >= 80 && y < 272 && from_tower < 10 + y / 16) {
        red = 200, green = 60, blue = 44;
        if (y / 24 % 2 == 0) red = green = blue = 232;
      }
      if (y >= 60 && y < 80 && from_tower < 10) red = 255, green = 240, blue = 170;
      image.pixels.push_back({static_cast<std::uint8_t>(red), static_cast<std::uint8_t>(green), static_cast<std::uint8_t>(blue)});
    }
  }
  return image;
}

/// Reads a binary PPM file (P6, 8 bits). Throws tw::FileError for anything else, for sides outside kMinSide to kMaxSide, and for a file
/// that ends early.
inline Image read_ppm(const std::string& path) {
  const auto fail = [&](const std::string& problem) { throw tw::FileError(path + ": " + problem); };
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("cannot be opened");
  char magic[2] = {};
  if (!file.read(magic, 2) || magic[0] != 'P' || magic[1] != '6') fail("is not a binary PPM file: it does not begin with P6");

  const auto number = [&](const char* name) {
    int value = 0;
    while ((file >> std::ws).peek() == '#') file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    if (!(file >> value)) fail(std::string("the header's ") + name + " is not a number that fits into 31 bits");
    return value;
  };
  Image image{number("width"), number("height"), {}};
  for (const int side : {image.width, image.height}) {
    if (side < kMinSide || side > kMaxSide) {
      fail("is " + std::to_string(image.width) + " x " + std::to_string(image.height) + " pixels; allowed are sides of " +
           std::to_string(kMinSide) + " to " + std::to_string(kMaxSide));
    }
  }
  if (const int most = number("largest value"); most != 255)
    fail("has a largest value of " + std::to_string(most) + "; only 255 is supported");
  file.get();  // one white-space character ends the header

  image.pixels.resize(static_cast<std::size_t>(image.width) * image.height);
  const std::size_t bytes = image.pixels.size() * sizeof(Colour);
  file.read(reinterpret_cast<char*>(image.pixels.data()), static_cast<std::streamsize>(bytes));
  if (const auto got = static_cast<std::size_t>(file.gcount()); got != bytes) {
    fail("ends after " + std::to_string(got) + " of " + std::to_string(bytes) + " bytes of pixels");
  }
  return image;
}

}  // namespace arr_coc
