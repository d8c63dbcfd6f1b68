#include "models/gguf.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/gguf_writer.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using test::expect_error;
using test::gguf_bytes;
using test::gguf_string;
using test::GgufWriter;

Gguf gguf_of(const std::string& bytes) { return Gguf::parse(std::as_bytes(std::span(bytes)), "x.gguf"); }

/// Expects an error of one line that begins with the file's name and holds `parts`.
void expect_gguf_refused(const std::string& bytes, std::initializer_list<std::string_view> parts) {
  expect_error<FileError>([&] { gguf_of(bytes); }, parts);
  try {
    gguf_of(bytes);
  } catch (const FileError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.rfind("x.gguf: ", 0), 0u) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 1000u);
  }
}

/// The stored bytes of a tensor.
std::string content(const Gguf& file, const std::string& name) {
  std::string bytes(file.bytes(name), '\0');
  file.read(name, 0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

GgufWriter two_tensors() {
  GgufWriter writer;
  writer.set("general.architecture", "llama").tensor("a", {2, 3}, 0, std::string(24, 'a')).tensor("b", {32}, 8, std::string(34, 'b'));
  return writer;
}

TEST(Gguf, MetadataAndTensors) {
  GgufWriter writer = two_tensors();
  writer.set<std::uint32_t>("count", 7).set("epsilon", 0.5f).set("theta", 1e6).set("flag", true).set<std::int8_t>("below", -3);
  writer.set<std::uint64_t>("large", 1ull << 62).set("empty", "");
  writer.set_array<std::int32_t>("few", {1, -2, 3}).set_array("texts", std::vector<std::string>{"x", "", "y z"});
  std::vector<std::uint16_t> many(1000);
  std::iota(many.begin(), many.end(), std::uint16_t{5});
  writer.set_array("many", many);
  for (const std::uint32_t version : {2, 3}) {
    writer.start = "GGUF" + gguf_bytes(version);
    const std::string bytes = writer.file();
    const Gguf file = gguf_of(bytes);
    EXPECT_EQ(file.file(), "x.gguf");
    const ConfigReader& metadata = file.metadata();
    EXPECT_EQ(metadata.text("general.architecture"), "llama");
    EXPECT_EQ(metadata.integer("count", 0, 9), 7);
    EXPECT_EQ(metadata.integer("below", -9, 9), -3);
    EXPECT_EQ(metadata.integer("large", 0, std::numeric_limits<std::int64_t>::max()), std::int64_t{1} << 62);
    EXPECT_EQ(metadata.number("epsilon", 0, 1), 0.5);
    EXPECT_EQ(metadata.number("theta", 0, 1e9), 1e6);
    EXPECT_TRUE(metadata.flag("flag", false));
    EXPECT_EQ(metadata.text("empty"), "");
    EXPECT_EQ(metadata.integers("few", -9, 9), (std::vector<int>{1, -2, 3}));
    EXPECT_EQ(file.integers("few", 3), (std::vector<std::int64_t>{1, -2, 3}));
    EXPECT_EQ(file.integers("many", 1000), (std::vector<std::int64_t>(many.begin(), many.end())));
    EXPECT_EQ(file.strings("texts", 3), (std::vector<std::string>{"x", "", "y z"}));
    expect_error<FileError>([&] { file.strings("texts", 2); }, {"x.gguf: texts has 3 elements; allowed: at most 2"});
    expect_error<FileError>([&] { file.strings("few", 9); }, {"x.gguf: few is not an array of strings"});
    expect_error<FileError>([&] { file.integers("texts", 9); }, {"x.gguf: texts: is not an array of integers"});
    expect_error<FileError>([&] { file.strings("count", 9); }, {"x.gguf: count is 7; allowed: an array"});
    expect_error<FileError>([&] { metadata.integer("few", 0, 9); }, {"x.gguf: few is [1,-2,3]; allowed: an integer from 0 to 9"});

    EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(file.shape("a"), (Shape{2, 3}));
    EXPECT_EQ(file.format("b").name, "Q8_0");
    EXPECT_EQ(content(file, "a"), std::string(24, 'a'));
    EXPECT_EQ(content(file, "b"), std::string(34, 'b'));
    std::vector<std::byte> part(4);
    file.read("b", 30, part);
    EXPECT_EQ(part[3], std::byte{'b'});
    EXPECT_THROW(file.read("b", 31, part), InvalidArgument);
    expect_error<FileError>([&] { file.shape("c"); }, {"x.gguf: no tensor \"c\""});
  }
}

TEST(Gguf, FilesOnDisk) {
  const test::TemporaryDirectory directory;
  GgufWriter writer = two_tensors();
  writer.alignment = 64;  // of the file, too
  writer = GgufWriter(writer).set<std::uint32_t>("general.alignment", 64);
  writer.infos.clear();
  writer.data.clear();
  writer.tensor("first", {16}, 1, std::string(32, '1')).tensor("second", {1}, 0, "2222");
  const auto path = directory.write("x.gguf", writer.file());
  const Gguf file = Gguf::open(path);
  EXPECT_EQ(content(file, "first"), std::string(32, '1'));
  EXPECT_EQ(content(file, "second"), "2222");
  directory.write("x.gguf", writer.file() + "x");
  expect_error<FileError>([&] { content(file, "first"); }, {path.string(), "was changed while it was read"});
  expect_error<FileError>([&] { Gguf::open(directory.path()); }, {"is a directory; allowed: a regular file"});
}

TEST(Gguf, EveryTruncationIsRefused) {
  const std::string whole = two_tensors().set_array("texts", std::vector<std::string>{"x", "yz"}).file();
  ASSERT_NO_THROW(gguf_of(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    try {
      gguf_of(whole.substr(0, size));
      ADD_FAILURE() << size << " of " << whole.size() << " bytes are accepted";
    } catch (const FileError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("x.gguf: ", 0), 0u) << error.what();
    }
  }
}

TEST(Gguf, BadStart) {
  const std::string rest = two_tensors().file().substr(8);
  expect_gguf_refused("GGUF", {"4 bytes; a GGUF file has at least 24"});
  expect_gguf_refused("GGML" + gguf_bytes<std::uint32_t>(3) + rest, {"not a GGUF file, which begins with \"GGUF\""});
  expect_gguf_refused("GGUF" + gguf_bytes<std::uint32_t>(1) + rest, {"version 1 of the GGUF format; allowed: 2 and 3"});
  expect_gguf_refused("GGUF" + gguf_bytes<std::uint32_t>(4) + rest, {"version 4 of the GGUF format; allowed: 2 and 3"});
  expect_gguf_refused("GGUF" + gguf_bytes<std::uint32_t>(3 << 24) + rest, {"a big-endian GGUF file; only little-endian ones are read"});
  expect_gguf_refused("FUGG" + gguf_bytes<std::uint32_t>(3) + rest, {"a big-endian GGUF file"});
  expect_gguf_refused("version https://git-lfs.github.com/spec/v1\n", {"a git-LFS pointer"});
  const std::string start = "GGUF" + gguf_bytes<std::uint32_t>(3);
  const auto counts = [&](std::uint64_t tensors, std::uint64_t keys) { return start + gguf_bytes(tensors) + gguf_bytes(keys); };
  expect_gguf_refused(counts(1ull << 60, 0), {"1152921504606846976 tensors; allowed: at most 65536"});
  expect_gguf_refused(counts(0, 1ull << 60), {"1152921504606846976 metadata keys; allowed: at most 65536"});
  expect_gguf_refused(counts(0, 65536), {"metadata entry 0: ends at byte 24, the end of the file"});
  expect_gguf_refused(counts(65536, 0), {"tensor 0: ends at byte 24, the end of the file"});
}

TEST(Gguf, BadMetadata) {
  const auto with = [](const std::string& entry) {
    GgufWriter writer = two_tensors();
    writer.entries.push_back(entry);
    return writer.file();
  };
  const std::string key = gguf_string("key");
  const auto type = [](std::uint32_t number) { return gguf_bytes(number); };
  const auto size = [](std::uint64_t number) { return gguf_bytes(number); };
  expect_gguf_refused(with(key + type(13)), {"metadata \"key\": has the type 13; allowed: 0 to 12"});
  expect_gguf_refused(with(key + type(8) + size(1ull << 60)),
                      {"metadata \"key\": 1152921504606846976 bytes of a string; ", " bytes are left"});
  expect_gguf_refused(with(key + type(9) + type(8) + size(~0ull)), {"metadata \"key\": 18446744073709551615 elements of an array; "});
  expect_gguf_refused(with(key + type(9) + type(10) + size(1ull << 61)), {"metadata \"key\": 2305843009213693952 elements of an array; "});
  expect_gguf_refused(with(key + type(9) + type(9) + size(1)), {"metadata \"key\": is an array of arrays"});
  expect_gguf_refused(with(key + type(9) + type(8) + size(2) + gguf_string("x") + size(1 << 20)),
                      {"metadata \"key\": 1048576 bytes of a string"});
  expect_gguf_refused(with(key + type(7) + "\2"), {"metadata \"key\": is the boolean 2; allowed: 0 and 1"});
  expect_gguf_refused(with(key + type(9) + type(7) + size(1) + "\2"), {"metadata \"key\": is the boolean 2"});
  expect_gguf_refused(with(gguf_string("general.architecture") + type(0) + "x"), {"metadata \"general.architecture\": is there twice"});
  expect_gguf_refused(with(gguf_string("new\nline") + type(0) + "x"), {"metadata entry 1: has a name with characters other than"});
  expect_gguf_refused(with(gguf_string(std::string(70000, 'k')) + type(0) + "x"), {"has a name of 70000 bytes; allowed: at most 65535"});
  for (const std::uint32_t alignment : {0u, 4u, 24u, 1u << 17})
    expect_gguf_refused(two_tensors().set("general.alignment", alignment).file(), {"general.alignment is "});
}

TEST(Gguf, BadTensors) {
  const auto with = [](const std::function<void(GgufWriter&)>& change) {
    GgufWriter writer = two_tensors();
    change(writer);
    return writer.file();
  };
  using Extents = std::vector<std::uint64_t>;
  const auto extents = [&](const Extents& given, std::uint32_t type) {
    return with([&](GgufWriter& w) { w.infos[0].extents = given, w.infos[0].type = type; });
  };
  expect_gguf_refused(extents({}, 0), {"tensor \"a\": has 0 dimensions; allowed: 1 to 4"});
  expect_gguf_refused(extents({1, 1, 1, 1, 1}, 0), {"tensor \"a\": has 5 dimensions; allowed: 1 to 4"});
  expect_gguf_refused(extents({~0ull}, 0), {"tensor \"a\": has the extent 18446744073709551615; allowed: at most"});
  expect_gguf_refused(extents({1ull << 32, 1ull << 32}, 0),
                      {"tensor \"a\": F32 of shape [4294967296, 4294967296] is larger than the file"});
  expect_gguf_refused(extents({1ull << 40, 1ull << 40, 1ull << 40, 0}, 0), {"tensor \"a\": ", " is larger than the file"});
  expect_gguf_refused(extents({1ull << 62}, 12), {"tensor \"a\": Q4_K of shape [4611686018427387904] is larger than the file"});
  expect_gguf_refused(extents({48, 2}, 8), {"tensor \"a\": Q8_0 of shape [2, 48]; allowed: rows of a multiple of 32 elements"});
  expect_gguf_refused(extents({6}, 3), {"tensor \"a\": has the type Q4_1; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K"});
  expect_gguf_refused(extents({6}, 99), {"tensor \"a\": has the type number 99"});
  const auto offset = [&](std::size_t index, std::uint64_t given) { return with([&](GgufWriter& w) { w.infos[index].offset = given; }); };
  expect_gguf_refused(offset(1, 33), {"tensor \"b\": begins at byte 33 of the data; allowed: a multiple of 32"});
  expect_gguf_refused(offset(1, 0),
                      {"tensor \"b\": begins at byte 0 of the data, but the one before ends at 24: overlaps are not allowed"});
  expect_gguf_refused(offset(1, 64), {"tensor \"b\": begins at byte 64 of the data, but the one before ends at 24: holes are not allowed"});
  expect_gguf_refused(offset(1, ~31ull), {"tensor \"b\": begins at byte 18446744073709551584 of the data"});
  expect_gguf_refused(with([](GgufWriter& w) { w.infos[1].name = "a"; }), {"tensor \"a\": is there twice"});
  expect_gguf_refused(with([](GgufWriter& w) { w.infos[1].name = "a\x80"; }), {"tensor 1: has a name with characters other than"});
  expect_gguf_refused(with([](GgufWriter& w) { w.infos[1].name = std::string(2000, 'n'); }), {"tensor 1: has a name of 2000 bytes"});
  expect_gguf_refused(with([](GgufWriter& w) { w.data.resize(64); }),
                      {"tensor \"b\": ends at byte 66 of the data, of which the file has 64"});
  expect_gguf_refused(with([](GgufWriter& w) { w.data.resize(200); }), {"200 bytes of data; its tensors have 66: nothing else is allowed"});
  EXPECT_NO_THROW(gguf_of(with([](GgufWriter& w) { w.data.resize(96); })));  // the last one may be padded
}

TEST(Gguf, RowsOfHeadsInTheModelsOrder) {
  // Two heads of six rows of 32: four are rotated. The file has the members of a pair next to each other.
  constexpr int kRows = 12, kRow = 32;
  const std::array<int, 6> order = {0, 2, 1, 3, 4, 5};  // of the file's rows, in each head
  for (const char* name : {"F32", "BF16", "Q8_0"}) {
    SCOPED_TRACE(name);
    std::vector<float> values(kRows * kRow);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i / kRow * 4) + (i % kRow == 0 ? 127.0f : 0.0f);
    GgufWriter writer;
    writer.tensor("q", {kRows, kRow}, test::gguf_format(name).id, test::gguf_encode(test::gguf_format(name), values));
    const std::string bytes = writer.file();
    GgufTensors tensors;
    tensors.add(gguf_of(bytes), "q", {kRows, kRow}, {.head_dim = 6, .rotary_dim = 4});
    EXPECT_EQ(tensors.dtype_name("q"), name);
    const DType dtype = *tensors.element_dtype("q");
    EXPECT_EQ(dtype, std::string(name) == "BF16" ? DType::bf16 : DType::f32);
    // In pieces that end anywhere.
    for (const std::int64_t piece : {kRows * kRow, 1, 7, 33, 200}) {
      for (std::int64_t begin = 0; begin < kRows * kRow; begin += piece) {
        const Tensor part = Tensor::empty({std::min<std::int64_t>(piece, kRows * kRow - begin)}, dtype);
        tensors.read_elements("q", begin, part);
        const Tensor read = part.to(DType::f32);
        for (std::int64_t i = 0; i < read.numel(); ++i) {
          const std::int64_t row = (begin + i) / kRow, stored = row / 6 * 6 + order[static_cast<std::size_t>(row % 6)];
          const float wanted = static_cast<float>(stored * 4) + ((begin + i) % kRow == 0 ? 127.0f : 0.0f);
          ASSERT_NEAR(read.data<float>()[i], wanted, std::string(name) == "Q8_0" ? 1.0 : 0.0) << begin + i;
        }
      }
    }
  }
  const std::string bytes = two_tensors().file();
  GgufTensors tensors;
  tensors.add(gguf_of(bytes), "a");
  tensors.add(gguf_of(bytes), "b");
  for (const int first : {0, 8})
    expect_error<InvalidArgument>([&] { tensors.read_elements("b", first, Tensor::empty({24}, DType::f32)); },
                                  {tw::format("24 elements of tensor \"b\" from {}: not those of whole blocks", first)});
  expect_error<FileError>([&] { tensors.add(gguf_of(bytes), "a"); }, {"tensor \"a\" is in x.gguf, too; allowed: once"});
  expect_error<FileError>([&] { tensors.add(gguf_of(bytes), "b", {32}, {.head_dim = 6, .rotary_dim = 4}); },
                          {"x.gguf: b is [32]; allowed: a multiple of 6 rows, those of a head"});
  expect_error<FileError>([&] { tensors.add(gguf_of(bytes), "b", {32}, {.head_dim = 4, .rotary_dim = 4}); },
                          {"x.gguf: b is Q8_0; allowed: a format without blocks of 32 elements, which belong to two heads"});
}

}  // namespace
}  // namespace tw::models
