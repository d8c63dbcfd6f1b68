// Divides an image's patches into tokens where they matter, and encodes them by multi-query attention over packed sequences. README.md
// explains it.
#include <charconv>
#include <cstring>

#include "encoder.hpp"
#include "report.hpp"

namespace {

using namespace arr_coc;

constexpr const char* kUsage =
    "usage: arr_coc [--image FILE.ppm] [--query RRGGBB,...] [--fixation X,Y] [--budget TOKENS] [--device auto|cpu|cuda]\n"
    "               [--page FILE.html] [--output FILE.npy] [--json]\n";

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The numbers of a list "1,2,3". Throws UsageError unless `text` is nothing but that.
template <class T>
std::vector<T> numbers(const std::string& option, const std::string& text, auto... base) {
  std::vector<T> list;
  const char *at = text.data(), *end = at + text.size();
  for (;;) {
    const auto [after, error] = std::from_chars(at, end, list.emplace_back(), base...);
    if (error != std::errc() || (after != end && *after != ',')) throw UsageError(option + ": " + text + " is not a list of numbers");
    if (after == end) return list;
    at = after + 1;
  }
}

struct Arguments {
  std::string image, page, output, device = "auto";
  bool json = false;
  Options options;
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--json") {
      arguments.json = true;
      continue;
    }
    if (i + 1 == argc) throw UsageError(option + ": unknown, or without its value");
    const std::string value = argv[++i];
    if (option == "--image") {
      arguments.image = value;
    } else if (option == "--page") {
      arguments.page = value;
    } else if (option == "--output") {
      arguments.output = value;
    } else if (option == "--device") {
      arguments.device = value;
    } else if (option == "--budget") {
      arguments.options.budget = numbers<std::int64_t>(option, value).front();
    } else if (option == "--fixation") {
      const std::vector<float> point = numbers<float>(option, value);
      const bool inside = std::ranges::all_of(point, [](float at) { return at >= 0 && at <= 1; });
      if (point.size() != 2 || !inside) throw UsageError(option + ": takes fractions of the width and the height, from 0 to 1");
      arguments.options.fixation = {point[0], point[1]};
    } else if (option == "--query") {
      arguments.options.query.clear();
      for (const std::uint32_t rgb : numbers<std::uint32_t>(option, value, 16)) {
        if (rgb > 0xffffff) throw UsageError(option + ": a colour has six hexadecimal digits, RRGGBB");
        arguments.options.query.push_back(
            {static_cast<std::uint8_t>(rgb >> 16), static_cast<std::uint8_t>(rgb >> 8), static_cast<std::uint8_t>(rgb)});
      }
    } else {
      throw UsageError(option + ": unknown");
    }
  }
  return arguments;
}

void run(const Arguments& arguments) {
  const tw::Device device = tw::Device::parse(arguments.device);
  const Image image = arguments.image.empty() ? lighthouse() : read_ppm(arguments.image);
  const Texture texture = texture_of(image, arguments.options.fixation);
  const std::vector<Patch> patches = plan(texture, arguments.options);
  const tw::Tensor embeddings = Encoder(device)(sample(texture, patches)).to(tw::Device::cpu()).to(tw::DType::f32);

  if (!arguments.page.empty()) write(arguments.page, to_page(image, patches));
  if (!arguments.output.empty()) write(arguments.output, to_npy(embeddings));
  if (arguments.json) {
    std::printf("%s\n", to_json(image, patches).c_str());
    return;
  }
  for (const Patch& patch : patches) std::printf("%s%5d", patch.x == 0 && patch.y > 0 ? "\n" : "", patch.tokens);
  std::printf("\n%d x %d pixels, %zu patches, %d tokens of %d numbers on %s\n", image.width, image.height, patches.size(),
              static_cast<int>(embeddings.shape(0)), static_cast<int>(embeddings.shape(1)), device.name().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && !std::strcmp(argv[1], "--help")) {
    std::printf("%s", kUsage);
    return 0;
  }
  try {
    run(parse(argc, argv));
  } catch (const UsageError& error) {
    std::fprintf(stderr, "arr_coc: %s\n%s", error.what(), kUsage);
    return 2;
  } catch (const tw::Error& error) {
    std::fprintf(stderr, "arr_coc: %s\n", error.what());
    return 1;
  }
}
