#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "image.hpp"

namespace arr_coc {

inline constexpr int kChannels = 13;
inline constexpr int kColours = 6;        ///< channels 0 to 5: red, green, blue, luma, red - green, blue - yellow
inline constexpr int kAppearance = 10;    ///< and 6 to 9: gradient in x and y, edge strength, contrast. The rest says where a pixel is:
inline constexpr int kEccentricity = 12;  ///< 10 and 11 are x and y, 12 is the distance from the fixation point

/// A point of the image, as fractions of its width and height.
struct Point {
  float x = 0.5f, y = 0.5f;
};

/// The image as 13 numbers for each pixel.
struct Texture {
  int width, height;
  std::vector<std::array<float, kChannels>> pixels;  ///< row by row

  /// The pixel, or the nearest one of the image.
  const std::array<float, kChannels>& at(int x, int y) const {
    return pixels[static_cast<std::size_t>(std::clamp(y, 0, height - 1)) * width + std::clamp(x, 0, width - 1)];
  }
};

/// Red, green, blue, luma (Rec. 709), and the two opponent colours of human vision: red against green, and blue against yellow.
inline std::array<float, kColours> colour_channels(const Colour& colour) {
  const float r = colour.red / 255.0f, g = colour.green / 255.0f, b = colour.blue / 255.0f;
  return {r, g, b, 0.2126f * r + 0.7152f * g + 0.0722f * b, r - g, b - (r + g) / 2};
}

/// Computes the 13 channels for a viewer who looks at `fixation`. All of them are of about the size of 1.
inline Texture texture_of(const Image& image, Point fixation = {}) {
  Texture texture{image.width, image.height, std::vector<std::array<float, kChannels>>(image.pixels.size())};
  for (std::size_t i = 0; i < image.pixels.size(); ++i) {
    std::ranges::copy(colour_channels(image.pixels[i]), texture.pixels[i].begin());
  }

  const auto luma = [&](int x, int y) { return texture.at(x, y)[3]; };
  auto pixel = texture.pixels.begin();
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x, ++pixel) {
      float gradient_x = 0, gradient_y = 0;  // Sobel's: a central difference, smoothed across by 1 2 1
      for (int i = -1; i <= 1; ++i) {
        const float smooth = i == 0 ? 0.5f : 0.25f;
        gradient_x += smooth * (luma(x + 1, y + i) - luma(x - 1, y + i));
        gradient_y += smooth * (luma(x + i, y + 1) - luma(x + i, y - 1));
      }
      float surround = 0;  // the mean of 9 x 9 pixels
      for (int j = -4; j <= 4; ++j) {
        for (int i = -4; i <= 4; ++i) surround += luma(x + i, y + j) / 81;
      }
      const float u = (static_cast<float>(x) + 0.5f) / static_cast<float>(image.width);
      const float v = (static_cast<float>(y) + 0.5f) / static_cast<float>(image.height);
      const std::array rest = {gradient_x,
                               gradient_y,
                               std::hypot(gradient_x, gradient_y),
                               std::abs(luma(x, y) - surround),
                               2 * u - 1,
                               2 * v - 1,
                               2 * std::hypot(u - fixation.x, v - fixation.y)};
      std::ranges::copy(rest, pixel->begin() + kColours);
    }
  }
  return texture;
}

}  // namespace arr_coc
