// Compares the example with plain loops in double, on the CPU and on a GPU if there is one, and checks its promises: the budget is kept
// exactly, a packed patch is encoded as it is alone, and a bad file is refused. Exit code 0 if all holds.
#include <numeric>

#include "reference.hpp"
#include "report.hpp"

namespace {

using namespace arr_coc;

int failures = 0;

void check(bool holds, const std::string& what) {
  failures += !holds;
  std::printf("%s: %s\n", holds ? "ok" : "FAILED", what.c_str());
}

void check_error(double error, double allowed, const std::string& what) {
  char text[64];
  std::snprintf(text, sizeof text, ": largest error %.2g, allowed %.2g", error, allowed);
  check(error <= allowed, what + text);  // false for NaN
}

double max_difference(const tw::Tensor& a, const reference::Matrix& b) {
  const reference::Matrix m = reference::matrix(a);
  double largest = m.size() == b.size() ? 0 : INFINITY;
  for (std::size_t i = 0; i < b.size() && i < m.size(); ++i) {
    for (std::size_t j = 0; j < b[i].size(); ++j) {
      const double error = std::abs(m[i][j] - b[i][j]);
      if (!(error <= largest)) largest = error;  // also for NaN
    }
  }
  return largest;
}

/// A part of the lighthouse whose sides are no multiples of the patches'.
Image detail() {
  const Image whole = lighthouse();
  Image image{250, 170, {}};
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) image.pixels.push_back(whole.at(x + 40, y + 60));
  }
  return image;
}

void test_texture() {
  Image ramp{64, 64, {}};  // brighter by 2 for each column: a gradient of 4 / 255 in x, 0 in y, and no contrast inside
  for (int i = 0; i < 64 * 64; ++i) {
    const auto grey = static_cast<std::uint8_t>(2 * (i % 64));
    ramp.pixels.push_back({grey, grey, grey});
  }
  const auto expected = std::array{0.25098f,
                                   0.25098f,
                                   0.25098f,
                                   0.25098f,
                                   0.0f,
                                   0.0f,
                                   4 / 255.0f,
                                   0.0f,
                                   4 / 255.0f,
                                   0.0f,
                                   1 / 64.0f,
                                   -23 / 64.0f,
                                   std::hypot(1 / 64.0f, 23 / 64.0f)};
  const std::array<float, kChannels> pixel = texture_of(ramp).at(32, 20);
  double error = 0;
  for (std::size_t c = 0; c < kChannels; ++c) error = std::max(error, static_cast<double>(std::abs(pixel[c] - expected[c])));
  check_error(error, 1e-5, "the channels of a ramp");
}

void test_plan(const Image& image) {
  const Texture texture = texture_of(image, {0.3f, 0.6f});
  std::vector<Patch> patches = plan(texture, {});

  const reference::Matrix expected = reference::scores(patches, Features(texture, patches, Options().query), texture);
  double error = 0;
  for (std::size_t p = 0; p < patches.size(); ++p) {
    const double scores[] = {patches[p].information, patches[p].salience, patches[p].match};
    for (std::size_t i = 0; i < 3; ++i) error = std::max(error, std::abs(scores[i] - expected[p][i]));
  }
  check_error(error, 1e-4, "scores up to 20");

  std::int64_t area = 0;
  for (const Patch& patch : patches) area += patch.width * patch.height;
  check(area == image.width * image.height, "the patches are the image");

  const std::int64_t count = std::ssize(patches);
  for (const std::int64_t budget :
       {count * kMinTokens, count * kMinTokens + 1, count * 100 + 7, count * kMaxTokens - 1, count * kMaxTokens}) {
    allocate(patches, budget);
    std::int64_t sum = 0;
    bool within = true, in_order = true;
    for (const Patch& patch : patches) {
      sum += patch.tokens;
      within = within && patch.tokens >= kMinTokens && patch.tokens <= kMaxTokens;
      for (const Patch& other : patches) in_order = in_order && (patch.relevance <= other.relevance || patch.tokens >= other.tokens);
    }
    check(sum == budget && within && in_order,
          "a budget of " + std::to_string(budget) + " tokens, 64 to 400 each, more where more is relevant");
  }
  for (const std::int64_t budget : {count * kMinTokens - 1, count * kMaxTokens + 1}) {
    bool refused = false;
    try {
      allocate(patches, budget);
    } catch (const tw::InvalidArgument&) {
      refused = true;
    }
    check(refused, "a budget of " + std::to_string(budget) + " tokens is refused");
  }

  const std::vector<Patch> equal = plan(texture_of({200, 130, std::vector<Colour>(200 * 130, {90, 120, 150})}), {});
  check(std::ranges::all_of(equal, [](const Patch& patch) { return patch.tokens == kMeanTokens; }), "a plain image is divided equally");
}

void test_sample(const Image& image) {
  const Texture texture = texture_of(image);
  for (const int n : {kMinTokens, 65, 131, 342, 343, kMaxTokens - 1, kMaxTokens}) {
    std::vector<Patch> patches = cut(texture);
    for (Patch& patch : patches) patch.tokens = n;
    const Tokens tokens = sample(texture, patches);
    bool good = tokens.values.shape(0) == n * std::ssize(patches);
    for (std::int64_t p = 0; p <= std::ssize(patches); ++p) good = good && tokens.cu_seqlens.at({p}) == static_cast<double>(p * n);
    for (std::int64_t i = 0; good && i < tokens.values.shape(0); ++i) {  // an empty cell is NaN and fails
      const Patch& patch = patches[static_cast<std::size_t>(i / n)];
      const double x = (tokens.values.at({i, 10}) + 1) / 2 * image.width, y = (tokens.values.at({i, 11}) + 1) / 2 * image.height;
      good = x > patch.x && x < patch.x + patch.width && y > patch.y && y < patch.y + patch.height;
    }
    check(good, std::to_string(n) + " tokens are inside their patches");
  }

  const Texture plain = texture_of({64, 64, std::vector<Colour>(64 * 64)});
  std::vector<Patch> patches = cut(plain);
  patches[0].tokens = 64;  // cells of 8 x 8 pixels
  const Tokens tokens = sample(plain, patches);
  double error = 0;
  for (std::int64_t i = 0; i < 64; ++i) {
    error = std::max(error, std::abs(tokens.values.at({i, 10}) - (static_cast<double>(i % 8) - 3.5) / 4));
    error = std::max(error, std::abs(tokens.values.at({i, 11}) - (static_cast<double>(i / 8) - 3.5) / 4));
  }
  check_error(error, 1e-6, "the cells' centres, row by row");
}

void test_encoder(tw::Device device, const Image& image) {
  const Texture texture = texture_of(image);
  const std::vector<Patch> patches = plan(texture, {});
  const Tokens tokens = sample(texture, patches);
  const Encoder encode(device);
  const tw::Tensor packed = encode(tokens).to(tw::Device::cpu());
  const double allowed = device.is_cuda() ? 0.05 : 1e-5;  // results are up to 4, which bf16 rounds by up to 1/128 in each of five steps
  check_error(max_difference(packed, reference::encode(tokens, encode.dtype())), allowed, device.name() + ", the packed patches");

  double error = 0;
  std::int64_t begin = 0;
  for (const Patch& patch : patches) {
    const Tokens alone = sample(texture, {&patch, 1});
    error = std::max(error, tw::max_difference(encode(alone), packed.slice(0, begin, begin + patch.tokens)));
    begin += patch.tokens;
  }
  check_error(error, allowed, device.name() + ", each patch alone");
}

void test_files() {
  const std::string path = "arr_coc_test.ppm";
  const auto refusal = [&](const std::string& text) -> std::string {
    write(path, text);
    try {
      read_ppm(path);
      return "";
    } catch (const tw::FileError& error) {
      return error.what();
    }
  };
  const std::string pixels(64 * 65 * 3, '\x80');
  check(refusal("P6\n# a comment\n64 65\n255\n" + pixels).empty(), "a PPM file");
  const std::pair<const char*, std::string> bad[] = {
      {"ends after 12479 of 12480 bytes", "P6 64 65 255\n" + pixels.substr(1)},
      {"does not begin with P6", "P3 64 65 255\n" + pixels},
      {"does not begin with P6", ""},
      {"header's width", "P6 wide 65 255\n" + pixels},
      {"header's height", "P6 64 99999999999 255\n" + pixels},
      {"header's largest value", "P6 64 65"},
      {"is 64 x 2049 pixels", "P6 64 2049 255\n" + pixels},
      {"is -64 x 65 pixels", "P6 -64 65 255\n" + pixels},
      {"largest value of 65535", "P6 64 65 65535\n" + pixels},
  };
  for (const auto& [message, text] : bad) check(refusal(text).find(message) != std::string::npos, std::string("refused: ") + message);
  std::remove(path.c_str());
  bool refused = false;
  try {
    read_ppm(path);
  } catch (const tw::FileError& error) {
    refused = true;
  }
  check(refused, "refused: no file");
}

void test_report(const Image& image) {
  const std::string page = to_page(image, plan(texture_of(image), {}));
  check(page.find("{{") == std::string::npos && page.find("\"relevance\": ") != std::string::npos, "the page holds the plan");
  check(page.find("src=") == std::string::npos && page.find("url(") == std::string::npos, "the page loads nothing");
  check(base64({{77, 97, 110}, {0, 0, 255}}) == "TWFuAAD/", "base64");
}

}  // namespace

int main() {
  const Image image = detail();
  test_texture();
  test_plan(image);
  test_sample(image);
  test_files();
  test_report(image);
  const tw::DeviceReport found = tw::find_devices();
  std::printf("%s", found.problems().c_str());
  for (const tw::Device device : found.usable()) test_encoder(device, image);
  return failures != 0;
}
