#include "models/safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using test::expect_error;
using Directory = test::TemporaryDirectory;

/// A file: the header's size, the header, the data.
std::string file_of(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return bytes + header + data;
}

std::string padded(std::string header, std::size_t offset = 0) {
  while (header.size() % 8 != offset) header += ' ';
  return header;
}

template <class T>
std::string bytes_of(std::initializer_list<T> values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

SafeTensors parsed(const std::string& bytes) { return SafeTensors::parse(std::as_bytes(std::span(bytes)), "x.safetensors"); }

/// Expects an error of one line that begins with the file's name and holds `parts`.
void expect_refused(const std::string& bytes, std::initializer_list<std::string_view> parts) {
  expect_error<FileError>([&] { parsed(bytes); }, parts);
  try {
    parsed(bytes);
  } catch (const FileError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.rfind("x.safetensors: ", 0), 0u) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 1000u);
  }
}

std::string one_float(const std::string& name, float value) {
  return file_of(padded(tw::format(R"({{"{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}})", name)), bytes_of({value}));
}

TEST(SafeTensors, TensorsOfAFile) {
  const Directory directory;
  const auto file = directory.write(
      "a.safetensors",
      file_of(padded(R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                     R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]},"c":{"dtype":"F16","shape":[],"data_offsets":[28,30]}})"),
              bytes_of({1.f, 2.f, 3.f, 4.f, 5.f, 6.f}) + bytes_of<std::uint16_t>({0x3F80, 0x4000, 0x4200})));
  const SafeTensors tensors = SafeTensors::open(file);
  EXPECT_EQ(tensors.names(), (std::vector<std::string>{"b", "c", "w"}));
  EXPECT_TRUE(tensors.contains("w"));
  EXPECT_FALSE(tensors.contains("__metadata__"));
  EXPECT_EQ(tensors.shape("w"), (Shape{2, 3}));
  EXPECT_EQ(tensors.dtype("b"), DType::bf16);
  EXPECT_EQ(tensors.dtype_name("b"), "BF16");
  EXPECT_EQ(tensors.bytes("w"), 24u);
  EXPECT_EQ(tensors.bytes(), 30u);
  EXPECT_EQ(tensors.file("w"), file.string());
  const Tensor w = tensors.tensor("w");
  EXPECT_EQ(w.at({1, 2}), 6.0);
  EXPECT_EQ(tensors.tensor("b").at({1}), 2.0);
  EXPECT_EQ(tensors.tensor("c").rank(), 0);
  EXPECT_EQ(tensors.tensor("c").at({}), 3.0);
  expect_error<FileError>([&] { tensors.tensor("x"); }, {file.string(), "no tensor \"x\""});
}

TEST(SafeTensors, TensorsKeepTheMapAlive) {
  const Directory directory;
  const auto file = directory.write("a.safetensors", one_float("a", 7.f));
  const Tensor a = SafeTensors::open(file).tensor("a");
  std::filesystem::remove(file);
  EXPECT_EQ(a.at({0}), 7.0);
}

TEST(SafeTensors, UnalignedElementsAreCopied) {
  const std::string bytes =
      file_of(padded(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})"),
              std::string("\x05") + bytes_of({1.5f, -2.f}));
  const SafeTensors tensors = parsed(bytes);
  const Tensor b = tensors.tensor("b");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data()) % 4, 0u);
  EXPECT_EQ(b.at({0}), 1.5);
  EXPECT_EQ(b.at({1}), -2.0);
  EXPECT_EQ(tensors.tensor("a").at({0}), 5.0);
}

TEST(SafeTensors, EmptyTensorsAndFilesWithoutTensors) {
  EXPECT_TRUE(parsed(file_of("{}", "")).names().empty());
  EXPECT_TRUE(parsed(file_of(R"({"__metadata__":{"a":[{"b":[1,2]},null]}})", "")).names().empty());
  const std::string bytes =
      file_of(padded(R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                     R"("c":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})"),
              bytes_of({3.f}));
  const SafeTensors tensors = parsed(bytes);
  EXPECT_EQ(tensors.tensor("a").numel(), 0);
  EXPECT_EQ(tensors.tensor("c").shape(), (Shape{0}));
  EXPECT_EQ(tensors.tensor("b").at({0}), 3.0);
}

TEST(SafeTensors, DTypesThatAreNotSupportedAreErrorsOnlyWhenAskedFor) {
  const std::string bytes =
      file_of(R"({"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]},"b":{"dtype":"X\n","shape":[9],"data_offsets":[8,9]}})",
              std::string(9, 'x'));
  const SafeTensors tensors = parsed(bytes);
  EXPECT_EQ(tensors.shape("a"), (Shape{1}));
  expect_error<FileError>([&] { tensors.tensor("a"); }, {"x.safetensors: tensor \"a\": dtype is \"F64\"; allowed: F32, F16, BF16"});
  EXPECT_EQ(tensors.dtype_name("a"), "F64");
  expect_error<FileError>([&] { tensors.dtype("b"); }, {"tensor \"b\": dtype is \"X\\x0A\""});
}

TEST(SafeTensors, PartsOfATensorAreRead) {
  const Directory directory;
  const auto file = directory.write(
      "a.safetensors",
      file_of(R"({"z":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"a":{"dtype":"I8","shape":[2,3],"data_offsets":[3,9]}})",
              "---012345"));
  const SafeTensors tensors = SafeTensors::open(file);
  const auto part = [&](std::size_t offset, std::size_t size) {
    std::string bytes(size, '?');
    tensors.read("a", offset, std::as_writable_bytes(std::span(bytes)));
    return bytes;
  };
  EXPECT_EQ(part(0, 6), "012345");
  EXPECT_EQ(part(2, 3), "234");
  EXPECT_EQ(part(6, 0), "");
  expect_error<InvalidArgument>([&] { part(2, 5); }, {"bytes 2 to 7 of tensor \"a\"; it has 6"});
  expect_error<InvalidArgument>([&] { part(7, 0); }, {"tensor \"a\""});
  expect_error<FileError>([&] { tensors.read("b", 0, {}); }, {"no tensor \"b\""});
}

TEST(SafeTensors, AFileThatChangesAfterItWasOpenedIsAnError) {
  const Directory directory;
  const std::string large =
      file_of(padded(R"({"a":{"dtype":"U8","shape":[100000],"data_offsets":[0,100000]}})"), std::string(100'000, 'x'));
  const auto file = directory.write("a.safetensors", large);
  const SafeTensors tensors = SafeTensors::open(file);
  EXPECT_EQ(tensors.tensor("a").at({99'999}), 'x');
  std::filesystem::resize_file(file, 5000);
  expect_error<FileError>([&] { tensors.tensor("a"); }, {file.string() + ": was changed while it was read: ",
                                                         tw::format("{} bytes when it was opened, 5000 now", large.size())});
}

TEST(SafeTensors, GitLfsPointersAreExplained) {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, '0') + "\nsize 4512345678\n";
  expect_refused(pointer, {"a git-LFS pointer", "git lfs pull", "hf download zai-org/GLM-ASR-Nano-2512 --local-dir"});
}

TEST(SafeTensors, TruncatedFilesAndHeaderSizes) {
  expect_refused("", {"0 bytes", "at least 8"});
  expect_refused("1234567", {"7 bytes", "at least 8"});
  const std::string good = one_float("a", 1.f);
  for (std::size_t size = 8; size < good.size(); ++size) expect_refused(good.substr(0, size), {});
  expect_refused(std::string(8, '\xFF') + "{}", {"the header has 18446744073709551615 bytes", "at most 2"});
  expect_refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), {"3 bytes", "at most 2", "rest of the file"});
  // A hole in memory of which no page is touched but the first.
  const std::size_t size = 200'000'000;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::uint64_t header = 100'000'001;
  std::memcpy(memory, &header, 8);
  expect_error<FileError>(
      [&] {
        SafeTensors::parse({static_cast<const std::byte*>(memory), size}, "x.safetensors");
      },
      {"x.safetensors: the header has 100000001 bytes", "at most 100000000"});
  munmap(memory, size);
}

TEST(SafeTensors, HeadersThatAreNoTensors) {
  const auto refused = [](const std::string& header, std::initializer_list<std::string_view> parts, std::size_t data = 0) {
    SCOPED_TRACE(header.substr(0, 100));
    expect_refused(file_of(header, std::string(data, '\0')), parts);
  };
  refused("", {"not valid JSON"});
  refused("{", {"not valid JSON"});
  refused("{}x", {"not valid JSON"});
  refused(std::string("{}\0{}", 5), {"the header is not valid JSON: byte 2 is zero"});  // where the parser would stop
  refused("{\"a\xFF\":1}", {"not valid JSON"});
  refused("[]", {"the header is an array", "a JSON object"});
  refused("3", {"the header is 3", "a JSON object"});
  refused(R"({"a":3})", {"tensor \"a\": is 3; allowed: an object"});
  refused(R"({"a":[]})", {"tensor \"a\": is an array; allowed: an object"});
  refused(R"({"a":{}})", {"tensor \"a\": has no dtype"});
  refused(R"({"a":{"dtype":"F32","data_offsets":[0,0]}})", {"has no shape"});
  refused(R"({"a":{"dtype":"F32","shape":[0]}})", {"has no data_offsets"});
  refused(R"({"a":{"dtype":32}})", {"dtype is 32; allowed: a string"});
  refused(R"({"a":{"dtype":["F32"]}})", {"dtype is an array; allowed: a string"});
  refused(R"({"a":{"shape":3}})", {"shape is 3; allowed: an array"});
  refused(R"({"a":{"shape":[-1]}})", {"shape holds -1; allowed: whole numbers"});
  refused(R"({"a":{"shape":[1.5]}})", {"shape holds 1.5"});
  refused(R"({"a":{"shape":["1"]}})", {"shape holds \"1\""});
  refused(R"({"a":{"shape":[[1]]}})", {"shape holds an array"});
  refused(R"({"a":{"shape":[9223372036854775808]}})", {"extent 9223372036854775808"});
  refused(R"({"a":{"shape":[18446744073709551616]}})", {"shape holds 18446744073709551616"});
  refused(R"({"a":{"shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}})", {"more than 32 extents"});
  refused(R"({"a":{"data_offsets":{}}})", {"data_offsets is an object; allowed: an array"});
  refused(R"({"a":{"data_offsets":[0]}})", {"has 1 numbers; allowed: [begin, end]"});
  refused(R"({"a":{"data_offsets":[0,1,2]}})", {"more than two numbers"});
  refused(R"({"a":{"data_offsets":[-4,0]}})", {"data_offsets holds -4"});
  refused(R"({"a":{"data_offsets":[0,null]}})", {"data_offsets holds null"});
  refused(R"({"a":{"dtype":"F32","dtype":"F32"}})", {"has dtype twice"});
  refused(R"({"a\nb":{}})", {"tensor \"a\\x0Ab\": has no dtype"});
  refused("{\"" + std::string(5000, 'n') + "\":{}}", {"nnn...\": has no dtype"});
  const std::string empty = R"({"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  refused(R"({"a":)" + empty + R"(,"a":)" + empty + "}", {"tensor \"a\" is in the header twice"});
  refused(R"({"__metadata__":)" + std::string(100, '[') + std::string(100, ']') + "}", {"more than 64 levels"});
  refused(R"({"__metadata__":)" + std::string(1'000'000, '['), {"more than 64 levels"});
  refused(R"({"a":{"x":)" + std::string(1'000'000, '{'), {"not valid JSON"});
}

TEST(SafeTensors, TooManyTensors) {
  std::string header;
  for (int i = 0; i <= 1 << 18; ++i)
    header += tw::format(R"({}"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", i == 0 ? '{' : ',', i);
  expect_refused(file_of(header + '}', ""), {"more than 262144 tensors"});
}

TEST(SafeTensors, RangesThatDoNotFit) {
  const auto tensor = [](const char* name, const char* shape, const char* offsets, const char* dtype = "F32") {
    return tw::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
  };
  const auto refused = [](const std::string& header, std::size_t data, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(header);
    expect_refused(file_of('{' + header + '}', std::string(data, '\0')), parts);
  };
  refused(tensor("a", "[2]", "[0,8]"), 4, {"tensor \"a\": data_offsets are [0, 8]; allowed: begin <= end <= 4"});
  refused(tensor("a", "[2]", "[8,0]"), 8, {"data_offsets are [8, 0]"});
  refused(tensor("a", "[2]", "[18446744073709551608,18446744073709551615]"), 8, {"data_offsets are [18446744073709551608, "});
  refused(tensor("a", "[3]", "[0,8]"), 8, {"F32 of shape [3] has 12 bytes, but data_offsets [0, 8] are 8"});
  refused(tensor("a", "[3]", "[0,8]", "F64"), 8, {"F64 of shape [3] has 24 bytes"});
  refused(tensor("a", "[4294967296,4294967296]", "[0,0]"), 0, {"shape [4294967296, 4294967296] has more elements than can be counted"});
  refused(tensor("a", "[0,4294967296,4294967296]", "[0,0]"), 0, {"more elements than can be counted"});
  refused(tensor("a", "[4611686018427387904]", "[0,0]"), 0, {"more elements than can be counted"});
  refused(tensor("a", "[2]", "[0,8]") + ',' + tensor("b", "[2]", "[4,12]"), 12,
          {"tensor \"b\": begins at byte 4", "ends at 8", "overlaps"});
  refused(tensor("a", "[2]", "[0,8]") + ',' + tensor("b", "[2]", "[0,8]"), 8, {"begins at byte 0", "overlaps"});
  refused(tensor("a", "[2]", "[4,12]"), 12, {"tensor \"a\": begins at byte 4", "ends at 0", "holes"});
  refused(tensor("a", "[1]", "[0,4]") + ',' + tensor("b", "[1]", "[8,12]"), 12, {"tensor \"b\"", "holes"});
  refused(tensor("a", "[0]", "[2,2]") + ',' + tensor("b", "[1]", "[0,4]"), 4, {"tensor \"a\": begins at byte 2", "overlaps"});
  refused(tensor("a", "[1]", "[0,4]"), 6, {"6 bytes after the header; its tensors have 4"});
}

TEST(SafeTensors, FilesThatCannotBeOpened) {
  const Directory directory;
  expect_error<FileError>([&] { SafeTensors::open(directory.path() / "none"); }, {(directory.path() / "none").string() + ": No such file"});
  expect_error<FileError>([&] { SafeTensors::open(directory.path()); },
                          {directory.path().string() + ": is a directory; allowed: a regular file"});
  ASSERT_EQ(mkfifo((directory.path() / "fifo").c_str(), 0600), 0);
  alarm(60);  // it would be waited for without end
  expect_error<FileError>([&] { SafeTensors::open(directory.path() / "fifo"); }, {"fifo: is a FIFO; allowed: a regular file"});
  alarm(0);
  expect_error<FileError>([&] { SafeTensors::open(directory.write("empty", "")); }, {"empty: 0 bytes"});
  expect_error<FileError>([&] { SafeTensors::open_directory(directory.path()); },
                          {"neither model.safetensors nor model.safetensors.index.json"});
  expect_error<FileError>([&] { SafeTensors::open_directory(directory.path() / "none"); }, {"none: neither"});
}

TEST(SafeTensors, ADirectoryOfOneFile) {
  const Directory directory;
  directory.write("model.safetensors", one_float("a", 1.f));
  directory.write("model.safetensors.index.json", "not read");
  EXPECT_EQ(SafeTensors::open_directory(directory.path()).tensor("a").at({0}), 1.0);
}

TEST(SafeTensors, ADirectoryOfShards) {
  const Directory directory;
  directory.write("model-1.safetensors", one_float("a", 1.f));
  directory.write("model-2.safetensors", one_float("b", 2.f));
  const auto open = [&](const std::string& index) {
    directory.write("model.safetensors.index.json", index);
    return SafeTensors::open_directory(directory.path());
  };
  const SafeTensors tensors = open(R"({"metadata":{"total_size":8},"weight_map":{"b":"model-2.safetensors","a":"model-1.safetensors"}})");
  EXPECT_EQ(tensors.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(tensors.tensor("a").at({0}), 1.0);
  EXPECT_EQ(tensors.tensor("b").at({0}), 2.0);
  EXPECT_EQ(tensors.file("b"), (directory.path() / "model-2.safetensors").string());

  const auto refused = [&](const std::string& index, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(index);
    expect_error<FileError>([&] { open(index); }, parts);
  };
  refused("{", {"model.safetensors.index.json: not valid JSON"});
  refused("[]", {"no weight_map"});
  refused("{}", {"no weight_map"});
  refused(R"({"weight_map":[]})", {"no weight_map"});
  refused(R"({"weight_map":{"a":1}})", {"tensor \"a\": its file is not a string"});
  refused(R"({"weight_map":{"a":"model-3.safetensors"}})", {"names \"model-3.safetensors\", which is not there"});
  for (const char* name : {"../model-1.safetensors", "/etc/passwd", "", ".", "..", "a\\\\b", "model-1.safetensors\\u0000"})
    refused(tw::format(R"({{"weight_map":{{"a":"{}"}}}})", name), {"tensor \"a\": its file is \"", "beside the index"});
  refused(R"({"weight_map":{"a":"model-1.safetensors","c":"model-2.safetensors"}})", {"model-2.safetensors: tensor \"c\" is not in it"});
  refused(R"({"weight_map":{"b":"model-1.safetensors","a":"model-2.safetensors"}})", {"is not in it, as"});
  directory.write("model-2.safetensors", one_float("a", 2.f));
  refused(R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})",
          {"model-2.safetensors: tensor \"a\" is in", "model-1.safetensors, too"});
}

}  // namespace
}  // namespace tw::models
