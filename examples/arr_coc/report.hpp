#pragma once

#include <cstdio>
#include <fstream>
#include <tilewave/kernel.hpp>

#include "relevance.hpp"

namespace arr_coc {

/// The plan as JSON, with numbers that read back as the same bits.
inline std::string to_json(const Image& image, std::span<const Patch> patches) {
  std::string json = "{\"width\": " + std::to_string(image.width) + ", \"height\": " + std::to_string(image.height) + ", \"patches\": [";
  for (const Patch& patch : patches) {
    char line[400];
    std::snprintf(
        line, sizeof line,
        "%s\n{\"x\": %d, \"y\": %d, \"width\": %d, \"height\": %d, \"information\": %.17g, \"salience\": %.17g, \"match\": %.17g, "
        "\"relevance\": %.17g, \"tokens\": %d}",
        &patch == patches.data() ? "" : ",", patch.x, patch.y, patch.width, patch.height, patch.information, patch.salience, patch.match,
        patch.relevance, patch.tokens);
    json += line;
  }
  return json + "\n]}";
}

/// The pixels' bytes in base64.
inline std::string base64(const std::vector<Colour>& pixels) {
  const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (const auto& [red, green, blue] : pixels) {  // 3 bytes are 4 digits, so there is no padding
    const int bits = red << 16 | green << 8 | blue;
    for (const int shift : {18, 12, 6, 0}) text += digits[bits >> shift & 63];
  }
  return text;
}

/// page.html with the plan and the image in it. It needs no other file.
inline std::string to_page(const Image& image, std::span<const Patch> patches) {
  std::string page(tw::find_embedded("page.html")->text);
  const auto fill_in = [&](const std::string& mark, const std::string& text) { page.replace(page.find(mark), mark.size(), text); };
  fill_in("{{plan}}", to_json(image, patches));
  fill_in("{{pixels}}", base64(image.pixels));
  return page;
}

/// Writes a tensor of f32 on the CPU as a NumPy file, for numpy.load().
inline std::string to_npy(const tw::Tensor& tensor) {
  std::string shape;
  for (const std::int64_t extent : tensor.shape()) shape += std::to_string(extent) + ", ";
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + shape + ")}";
  header.resize((10 + header.size() + 64) / 64 * 64 - 10 - 1, ' ');  // the data begin at a multiple of 64 bytes
  header += '\n';
  std::string npy("\x93NUMPY\x01\x00", 8);
  npy += {static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
  return npy + header + std::string(static_cast<const char*>(tensor.data()), static_cast<std::size_t>(tensor.numel()) * sizeof(float));
}

/// Writes a file. Throws tw::FileError if that fails.
inline void write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  if (!(file << text).flush()) throw tw::FileError(path + ": cannot be written");
}

}  // namespace arr_coc
