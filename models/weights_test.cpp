#include "models/weights.hpp"

#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <utility>
#include <vector>

#include "models/convert.hpp"
#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "runtime/sha256.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using test::expect_error;
using test::TemporaryDirectory;

struct Stored {
  std::string name, dtype;
  Shape shape;
  std::string bytes;
};

/// `values` as elements of type T.
template <class T>
Stored stored(const std::string& name, const std::string& dtype, const Shape& shape, const std::vector<float>& values) {
  std::vector<T> elements;
  for (const float value : values) elements.push_back(static_cast<T>(value));
  return {name, dtype, shape, {reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(T)}};
}
Stored f32_tensor(const std::string& name, const Shape& shape, const std::vector<float>& values) {
  return stored<float>(name, "F32", shape, values);
}

/// A checkpoint of one file.
SafeTensors checkpoint(const TemporaryDirectory& directory, const std::vector<Stored>& tensors) {
  std::string header = "{", data;
  for (const Stored& t : tensors) {
    header += tw::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", data.empty() ? "" : ",", t.name, t.dtype,
                         tw::join(t.shape, ","), data.size(), data.size() + t.bytes.size());
    data += t.bytes;
  }
  header += '}';
  while (header.size() % 8 != 0) header += ' ';
  std::string size(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) size[i] = static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return SafeTensors::open(directory.write("model.safetensors", size + header + data));
}

std::string same(const std::string& name) { return name; }

/// Runs `build` as a model is built: checked, then loaded.
void load(Weights& weights, const std::function<void(Weights&)>& build, DType dtype, Device device = Device::cpu()) {
  weights.check(build);
  weights.load(build, dtype, Stream::standard(device), {});
}

std::vector<float> floats(const Tensor& tensor) {
  const Tensor host = tensor.to(Device::cpu()).to(DType::f32);
  return {host.data<float>(), host.data<float>() + host.numel()};
}

class WeightsOn : public testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, WeightsOn, testing::ValuesIn(test::kDevices), test::device_name);

TEST_P(WeightsOn, EveryDTypeBecomesTheOneAskedFor) {
  skip_unless_present(GetParam());
  const TemporaryDirectory directory;
  // 1/3 is rounded by bf16 and f16, each in its way.
  const std::vector<float> exact = {1, -2.5f, 0.15625f, 384}, third = {1.0f / 3, -1.0f / 3, 0, 1};
  const auto file = [&] {
    return checkpoint(directory, {stored<bf16>("bf16", "BF16", {2, 2}, exact), stored<f16>("f16", "F16", {2, 2}, exact),
                                  f32_tensor("f32", {4}, exact), f32_tensor("third", {4}, third)});
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(name_of(dtype));
    std::vector<Tensor> taken;
    Weights weights("model", file(), same);
    load(
        weights,
        [&](Weights& from) {
          taken = {from.take("bf16", {2, 2}), from.take("f16", {2, 2}), from.take("f32", {4}), from.take("third", {4})};
        },
        dtype, GetParam());
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(taken[i].dtype(), dtype);
      EXPECT_EQ(taken[i].device(), Stream::standard(GetParam()).device());
      EXPECT_EQ(taken[i].shape(), i < 2 ? (Shape{2, 2}) : (Shape{4}));
    }
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(floats(taken[i]), exact);
    const float rounded = dtype == DType::f32    ? third[0]
                          : dtype == DType::bf16 ? static_cast<float>(bf16(third[0]))
                                                 : static_cast<float>(f16(third[0]));
    EXPECT_EQ(floats(taken[3]), (std::vector<float>{rounded, -rounded, 0, 1}));
  }
}

TEST_P(WeightsOn, TensorsOfMoreThanOnePart) {
  skip_unless_present(GetParam());
  const TemporaryDirectory directory;
  std::vector<float> values((1 << 22) + 5);  // read in parts of 2^21
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) - 125;
  const auto size = static_cast<std::int64_t>(values.size());
  Weights weights(
      "model", checkpoint(directory, {stored<f16>("f16", "F16", {1, size}, values), stored<bf16>("bf16", "BF16", {size}, values)}), same);
  Tensor f16s, bf16s;
  load(
      weights,
      [&](Weights& from) {
        f16s = from.take("f16", {1, size});
        bf16s = from.stack(std::array<Weights::Part, 2>{{{"", 3}, {"bf16", size}}}, 0);
      },
      DType::bf16, GetParam());
  EXPECT_EQ(floats(f16s), values);
  EXPECT_EQ(floats(bf16s.slice(0, 3, size + 3)), values);
}

TEST_P(WeightsOn, StackedPartsLieBeneathEachOther) {
  skip_unless_present(GetParam());
  const TemporaryDirectory directory;
  Weights weights("model",
                  checkpoint(directory, {f32_tensor("a", {1, 2}, {1, 2}), f32_tensor("b", {2, 2}, {3, 4, 5, 6}),
                                         f32_tensor("a.bias", {1}, {7}), f32_tensor("b.bias", {2}, {8, 9})}),
                  same);
  Tensor all, bias;
  load(
      weights,
      [&](Weights& from) {
        all = from.stack(std::array<Weights::Part, 4>{{{"b", 2}, {"", 1}, {"a", 1}, {"", 2}}}, 2);
        bias = from.stack(std::array<Weights::Part, 3>{{{"a.bias", 1}, {"", 3}, {"b.bias", 2}}}, 0);
      },
      DType::bf16, GetParam());
  EXPECT_EQ(all.shape(), (Shape{6, 2}));
  EXPECT_EQ(floats(all), (std::vector<float>{3, 4, 5, 6, 0, 0, 1, 2, 0, 0, 0, 0}));
  EXPECT_EQ(bias.shape(), (Shape{6}));
  EXPECT_EQ(floats(bias), (std::vector<float>{7, 0, 0, 0, 8, 9}));
}

TEST(Weights, Linear) {
  const TemporaryDirectory directory;
  Weights weights("model",
                  checkpoint(directory, {f32_tensor("a.weight", {2, 1}, {1, 2}), f32_tensor("a.bias", {2}, {3, 4}),
                                         f32_tensor("b.weight", {1, 2}, {5, 6})}),
                  same);
  Linear a, b;
  load(
      weights,
      [&](Weights& from) {
        a = from.linear("a", 2, 1, true);
        b = from.linear("b", 1, 2, false);
      },
      DType::f32);
  EXPECT_EQ(floats(a.weight), (std::vector<float>{1, 2}));
  EXPECT_EQ(floats(a.bias), (std::vector<float>{3, 4}));
  EXPECT_EQ(floats(b.weight), (std::vector<float>{5, 6}));
  EXPECT_EQ(b.bias.numel(), 0);
}

TEST(Weights, OneErrorNamesAllThatDoesNotFit) {
  const TemporaryDirectory directory;
  Weights weights("folder",
                  checkpoint(directory, {f32_tensor("good", {1}, {1}), f32_tensor("turned", {2, 1}, {1, 2}),
                                         f32_tensor("flat", {2}, {1, 2}), f32_tensor("surplus.1", {1}, {1}),
                                         f32_tensor("surplus.2", {1}, {1}), stored<std::int32_t>("whole", "I32", {1}, {1}),
                                         stored<double>("double", "F64", {1}, {1}), stored<double>("surplus.double", "F64", {1}, {1}),
                                         stored<double>("all.wrong", "F64", {1}, {1}), f32_tensor("part", {2, 2}, {1, 2, 3, 4})}),
                  same);
  const auto build = [](Weights& from) {
    EXPECT_TRUE(from.checking());
    from.take("good", {1});
    from.take("turned", {1, 2});
    from.take("flat", {2, 1});
    from.take("absent", {3, 4});
    from.take("whole", {1});
    from.take("double", {1});
    from.take("all.wrong", {2});
    from.linear("head", 5, 6, true);
    from.stack(std::array<Weights::Part, 3>{{{"part", 3}, {"", 1}, {"missing.part", 2}}}, 2);
  };
  expect_error<FileError>(
      [&] { weights.check(build); },
      {"folder: the weights do not fit config.json: ", "turned is [2, 1], which must be [1, 2]", "flat is [2], which must be [2, 1]",
       "absent [3, 4] is missing", "whole is I32; BF16, F16 and F32 are read", "double is F64; BF16, F16 and F32 are read",
       "all.wrong is F64", "all.wrong is [1], which must be [2]", "head.weight [5, 6] is missing", "head.bias [5] is missing",
       "part is [2, 2], which must be [3, 2]", "missing.part [2, 2] is missing", "surplus.1 is not part of this model",
       "surplus.2 is not part of this model", "surplus.double is not part of this model"});
  try {
    weights.check(build);
  } catch (const FileError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find("good"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(Weights, AMessageNamesAHundredTensors) {
  const TemporaryDirectory directory;
  std::vector<Stored> tensors;
  for (int i = 0; i < 150; ++i) tensors.push_back(f32_tensor(tw::format("surplus.{}", i), {1}, {1}));
  Weights weights("folder", checkpoint(directory, tensors), same);
  expect_error<FileError>([&] { weights.check([](Weights&) {}); }, {"surplus.0 is not part of this model; ", "; and 50 more"});
}

TEST(Weights, AFileThatChangesWhileItIsLoadedIsAnError) {
  const TemporaryDirectory directory;
  Weights weights("model", checkpoint(directory, {f32_tensor("a", {2}, {1, 2}), f32_tensor("b", {2}, {3, 4})}), same);
  const auto build = [&](Weights& from) {
    from.take("a", {2});
    if (!from.checking()) std::filesystem::resize_file(directory.path() / "model.safetensors", 100);
    from.take("b", {2});
  };
  expect_error<FileError>([&] { load(weights, build, DType::f32); },
                          {(directory.path() / "model.safetensors").string() + ": was changed while it was read: ", "100 now"});
}

TEST(Weights, NamesInMessagesStayOnOneLine) {
  const TemporaryDirectory directory;
  Weights weights("folder", checkpoint(directory, {f32_tensor(R"(two\nlines)", {1}, {1})}), same);
  expect_error<FileError>([&] { weights.check([](Weights&) {}); }, {"two\\x0Alines is not part of this model"});
}

TEST(Weights, TwoSpellingsOfOneTensor) {
  const TemporaryDirectory directory;
  const auto canonical = [](const std::string& name) { return name.substr(name.rfind('.') + 1); };
  const auto open = [&](const char* other) {
    return Weights("folder", checkpoint(directory, {f32_tensor("model.a", {1}, {1}), f32_tensor(other, {1}, {2})}), canonical);
  };
  expect_error<FileError>([&] { open("a"); }, {"folder: ", "a and model.a are the same tensor in two spellings"});
  Weights weights = open("model.b");
  EXPECT_TRUE(weights.contains("a"));
  EXPECT_FALSE(weights.contains("model.a"));
  Tensor b;
  load(
      weights,
      [&](Weights& from) {
        from.take("a", {1});
        b = from.take("b", {1});
      },
      DType::f32);
  EXPECT_EQ(floats(b), (std::vector<float>{2}));
  // Messages have the file's spelling.
  expect_error<FileError>([&] { weights.check([](Weights& from) { from.take("a", {2}); }); },
                          {"model.a is [1], which must be [2]", "model.b is not part of this model"});
}

TEST(Weights, ShapesAndTheMainDType) {
  const TemporaryDirectory directory;
  const Weights weights("folder",
                        checkpoint(directory, {f32_tensor("a", {2, 3}, {1, 2, 3, 4, 5, 6}),
                                               stored<bf16>("b", "BF16", {7}, {1, 2, 3, 4, 5, 6, 7}), f32_tensor("c", {0}, {})}),
                        same);
  EXPECT_EQ(weights.shape("a", 2), (Shape{2, 3}));
  EXPECT_TRUE(weights.shape("a", 1).empty());
  EXPECT_TRUE(weights.shape("none", 2).empty());
  EXPECT_EQ(weights.main_dtype(), DType::bf16);
  const Weights none("folder", checkpoint(directory, {}), same);
  EXPECT_EQ(none.main_dtype(), DType::f32);
  // What cannot be read is check()'s matter.
  const Weights doubles("folder", checkpoint(directory, {stored<double>("d", "F64", {3}, {1, 2, 3}), stored<f16>("h", "F16", {1}, {1})}),
                        same);
  EXPECT_EQ(doubles.main_dtype(), DType::f16);
}

TEST(Weights, ProgressCountsTheFilesBytes) {
  const TemporaryDirectory directory;
  Weights weights(
      "model", checkpoint(directory, {f32_tensor("a", {2}, {1, 2}), stored<bf16>("b", "BF16", {3}, {1, 2, 3}), f32_tensor("c", {1}, {4})}),
      same);
  const auto build = [](Weights& from) {
    from.take("b", {3});
    from.take("c", {1});
    from.stack(std::array<Weights::Part, 2>{{{"", 5}, {"a", 2}}}, 0);
  };
  weights.check(build);
  for (int repeat = 0; repeat < 2; ++repeat) {
    std::vector<std::pair<std::int64_t, std::int64_t>> seen;
    weights.load(build, DType::f32, Stream::standard(Device::cpu()),
                 [&](std::int64_t done, std::int64_t all) { seen.emplace_back(done, all); });
    EXPECT_EQ(seen, (std::vector<std::pair<std::int64_t, std::int64_t>>{{6, 18}, {10, 18}, {18, 18}}));
  }
}

const QuantizedMatrix::Layout kPlain = {.format = WeightFormat::plain};
const std::vector<QuantizedMatrix::Layout> kLayouts = {
    {WeightFormat::int8}, {WeightFormat::fp8}, {WeightFormat::int4, 32}, {WeightFormat::int4, 32, true}};

struct Layers {
  Linear whole, stacked, head;
  void build(Weights& from) {
    whole = from.linear("a", 3, 64, true);
    const Weights::Part parts[] = {{"b.weight", 2}, {"c.weight", 3}};
    stacked = from.linear(parts, 32);
    head = from.linear("head", 5, 32, false, Weights::Role::head);
  }
};

std::vector<Stored> layers() {
  const auto random = [](const char* name, const Shape& shape, std::uint64_t seed) {
    const Tensor t = Tensor::random(shape, DType::f32, seed);
    return stored<bf16>(name, "BF16", shape, floats(t));
  };
  return {random("a.bias", {3}, 1), random("a.weight", {3, 64}, 2), random("b.weight", {2, 32}, 3), random("c.weight", {3, 32}, 4),
          random("head.weight", {5, 32}, 5)};
}

std::vector<float> dequantized(const Linear& linear) {
  const Tensor out = Tensor::poisoned({linear.out(), linear.in()}, DType::f32);
  dequantize(linear.quantized, out);
  return floats(out);
}

TEST(QuantizedWeights, ConvertedFilesLoadAsRoundedOnes) {
  for (const auto& layout : kLayouts) {
    SCOPED_TRACE(text_of(layout));
    const TemporaryDirectory directory, converted;
    const SafeTensors files = checkpoint(directory, layers());
    Layers rounded, loaded;
    Weights weights("model", files, same);
    weights.set_layouts(kPlain, layout);
    load(
        weights, [&](Weights& from) { rounded.build(from); }, DType::f32);
    EXPECT_EQ(rounded.whole.quantized.format, layout.format);
    EXPECT_EQ(rounded.head.quantized.format, layout.format == WeightFormat::int4 ? WeightFormat::int8 : layout.format);
    EXPECT_EQ(floats(rounded.whole.bias), floats(files.tensor("a.bias")));
    const std::vector<float> stacked = dequantized(rounded.stacked), c = floats(files.tensor("c.weight"));
    for (std::size_t i = 0; i < c.size(); ++i) EXPECT_NEAR(stacked[64 + i], c[i], 0.3);

    const std::filesystem::path file = converted.path() / "model.safetensors";
    std::int64_t last = 0, all = 0;
    const std::string hash = write_quantized(files, weights.linear_layouts(), file, [&](std::int64_t done, std::int64_t total) {
      EXPECT_GT(done, last);
      last = done, all = total;
    });
    EXPECT_EQ(last, all);
    EXPECT_EQ(hash, hex(Sha256().add(*read_file(file.string(), 1 << 20)).finish()));
    Weights again("model", SafeTensors::open(file), same);
    again.set_layouts(layout, layout);
    load(
        again, [&](Weights& from) { loaded.build(from); }, DType::f32);
    EXPECT_EQ(dequantized(loaded.whole), dequantized(rounded.whole));
    EXPECT_EQ(dequantized(loaded.stacked), dequantized(rounded.stacked));
    EXPECT_EQ(dequantized(loaded.head), dequantized(rounded.head));
    EXPECT_EQ(floats(loaded.whole.bias), floats(rounded.whole.bias));
    EXPECT_EQ(again.main_dtype(), DType::bf16);  // scales do not count
  }
}

TEST(QuantizedWeights, ContradictionsAreOneError) {
  const TemporaryDirectory directory, converted;
  const SafeTensors files = checkpoint(directory, layers());
  const QuantizedMatrix::Layout int8 = {WeightFormat::int8}, int4 = {WeightFormat::int4, 32};
  Weights weights("model", files, same);
  weights.set_layouts(kPlain, int8);
  Layers layers_of_file;
  const auto build = [&](Weights& from) { layers_of_file.build(from); };
  weights.check(build);
  const std::filesystem::path file = converted.path() / "model.safetensors";
  write_quantized(files, weights.linear_layouts(), file, {});
  const auto refused = [&](const QuantizedMatrix::Layout& layout, std::initializer_list<std::string_view> parts) {
    Weights other("model", SafeTensors::open(file), same);
    other.set_layouts(layout, layout);
    expect_error<FileError>([&] { load(other, build, DType::f32); }, parts);
  };
  refused(int4,
          {"model: the weights do not fit config.json", "a.weight is I8; for weights in int4:32 it must be U8", "[3, 64]", "[3, 32]"});
  refused(kPlain, {"a.weight is I8; BF16, F16 and F32 are read", "a.weight_scale is not part of this model"});
  refused({WeightFormat::fp8}, {"a.weight is I8; for weights in fp8 it must be F8_E4M3"});
  // What config.json says is not changed by what is asked for.
  Weights other("model", SafeTensors::open(file), same);
  expect_error<InvalidArgument>([&] { other.set_layouts(int8, int4); },
                                {"model: the weights are in int8; for int4:32 convert the original"});
  // A group that the columns do not have.
  Weights wide("model", files, same);
  wide.set_layouts(kPlain, {WeightFormat::int4, 128});
  expect_error<InvalidArgument>([&] { wide.check(build); }, {"a.weight has 64 columns", "int4:128", "multiple of 128"});
}

TEST(QuantizedWeights, DamagedValuesAreErrors) {
  const auto refused = [](const QuantizedMatrix::Layout& layout, std::vector<Stored> tensors, const char* part) {
    const TemporaryDirectory directory;
    Weights weights("model", checkpoint(directory, tensors), same);
    weights.set_layouts(layout, layout);
    expect_error<FileError>(
        [&] {
          load(
              weights, [](Weights& from) { from.linear("a", 1, 32, false); }, DType::f32);
        },
        {"model: a.weight", part});
  };
  const Stored codes{"a.weight", "U8", {1, 16}, std::string(16, '\x12')}, zero{"a.weight_zero", "U8", {1, 1}, "\x0f"};
  const Stored scale = stored<f16>("a.weight_scale", "F16", {1, 1}, {0.5f});
  const QuantizedMatrix::Layout zeros = {WeightFormat::int4, 32, true};
  {
    const TemporaryDirectory directory;
    Weights weights("model", checkpoint(directory, {codes, scale, zero}), same);
    weights.set_layouts(zeros, zeros);
    Linear linear;
    load(
        weights, [&](Weights& from) { linear = from.linear("a", 1, 32, false); }, DType::f32);
    EXPECT_EQ(dequantized(linear)[0], 0.5f * (2 - 15));
    EXPECT_EQ(dequantized(linear)[1], 0.5f * (1 - 15));
  }
  refused(zeros, {codes, scale, {"a.weight_zero", "U8", {1, 1}, "\x10"}}, "_zero holds a zero point above 15");
  refused(zeros, {codes, stored<f16>("a.weight_scale", "F16", {1, 1}, {test::kInf}), zero}, "_scale holds a number that is not finite");
  refused({WeightFormat::int8}, {{"a.weight", "I8", {1, 32}, std::string(32, '\x05')}, f32_tensor("a.weight_scale", {1}, {test::kNaN})},
          "_scale holds a number that is not finite");
  refused({WeightFormat::fp8}, {{"a.weight", "F8_E4M3", {1, 32}, std::string(31, '\x05') + '\xff'}, f32_tensor("a.weight_scale", {1}, {1})},
          "holds NaN");
  const TemporaryDirectory directory;
  Weights weights("model", checkpoint(directory, {stored<float>("a.weight", "F32", {1, 32}, std::vector<float>(32, test::kNaN))}), same);
  weights.set_layouts(kPlain, {WeightFormat::int8});
  expect_error<FileError>(
      [&] {
        load(
            weights, [](Weights& from) { from.linear("a", 1, 32, false); }, DType::f32);
      },
      {"model: a.weight: quantize: row 0 of the weight has an element that is not finite"});
}

}  // namespace
}  // namespace tw::models
