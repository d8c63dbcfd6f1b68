#include "models/observe.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/tensor_checks.hpp"
#include "runtime/format.hpp"

namespace tw::models {
namespace {

/// Notes each call as a line.
struct Notes : Observer {
  std::vector<std::string> lines;
  void stage_begin(std::string_view name, const Stream&) override { lines.push_back(tw::format("+{}", name)); }
  void stage_end(std::string_view name, const Stream&) override { lines.push_back(tw::format("-{}", name)); }
  void operator_begin(std::string_view name, int layer, const Stream&) override { lines.push_back(tw::format("+{} {}", name, layer)); }
  void operator_end(const Operator& op, const Tensor* output, const Stream&) override {
    const int kind = static_cast<int>(op.kind);
    lines.push_back(tw::format("-{} {} {} {} {} {}", op.name, op.layer, kind, op.flops, op.bytes, output != nullptr));
  }
};

TEST(Observer, SeesStagesAndOperatorsWithTheirWork) {
  const Stream stream = Stream::standard(Device::cpu());
  const Linear linear{Tensor::random({5, 3}, DType::f32, 1), Tensor::random({5}, DType::f32, 2)};
  const Tensor x = Tensor::random({7, 3}, DType::f32, 3), y = Tensor::empty({7, 5}, DType::f32);
  Notes notes;
  {
    const Observing observing(&notes);
    const Stage stage("encoder", stream);
    const Operators run(stream, 2);
    run("norm", y, {.reads = {&x}, .other_bytes = 8}, [] {});
    run.linear("up", linear, x, y);
    EXPECT_THROW(run("attention", y, {.reads = {&x}, .keys = 4}, [] { throw std::runtime_error("no"); }), std::runtime_error);
    run("attention", y, {.reads = {&x}, .keys = 4}, [] {});
    const Observing nobody(nullptr);
    const Operators unseen(stream);
    int calls = 0;
    unseen("unseen", y, {}, [&] { ++calls; });
    EXPECT_EQ(calls, 1);
  }
  EXPECT_EQ(observer(), nullptr);
  const Stage unseen("unseen", stream);
  // 7 x 5 floats written, 7 x 3 read; the product: 2 x 7 x 15 FLOPs, 20 floats of weight and bias; attention: 4 x 35 x 4 FLOPs.
  EXPECT_EQ(notes.lines,
            (std::vector<std::string>{"+encoder", "+norm 2", "-norm 2 2 0 232 true", "+up 2", "-up 2 0 210 304 true", "+attention 2",
                                      "-attention 2 2 0 0 false", "+attention 2", "-attention 2 1 560 224 true", "-encoder"}));
}

TEST(Observer, AccumulatingReadsTheOutput) {
  const Stream stream = Stream::standard(Device::cpu());
  const Linear linear{Tensor::random({5, 3}, DType::f32, 1), {}};
  const Tensor x = Tensor::random({7, 3}, DType::f32, 3), y = Tensor::random({7, 5}, DType::f32, 4);
  Notes notes;
  const Observing observing(&notes);
  Operators(stream, 0).linear("down", linear, x, y, {.accumulate = true});
  EXPECT_EQ(notes.lines.back(), tw::format("-down 0 0 210 {} true", 4 * (2 * 35 + 21 + 15)));
}

TEST(TensorChecks, FindWhatIsNotFinite) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const auto look = [&](std::vector<float> values) {
      return find_not_finite(Tensor::from<float>(values, {static_cast<std::int64_t>(values.size())}).to(dtype));
    };
    EXPECT_EQ(look({0, -1, 60000, 1e-7f}).first, -1);
    const NotFinite found = look({1, -inf, 2, nan, inf});
    EXPECT_EQ(found.first, 1);
    EXPECT_EQ(found.nans, 1);
    EXPECT_EQ(found.infinities, 2);
    EXPECT_EQ(look({nan}).first, 0);
  }
  EXPECT_EQ(find_not_finite(Tensor::from<int>(std::vector<int>{0x7F800000}, {1})).first, -1);
}

TEST(TensorChecks, Compare) {
  const auto tensor = [](std::vector<float> values) { return Tensor::from<float>(values, {static_cast<std::int64_t>(values.size())}); };
  const Difference same = compare(tensor({0, 0}), tensor({0, 0}));
  EXPECT_EQ(same.relative_l2, 0);
  EXPECT_EQ(same.largest, 0);
  const Difference some = compare(tensor({3, 4, 1}), tensor({3, 4, 0}));
  EXPECT_DOUBLE_EQ(some.relative_l2, 0.2);
  EXPECT_EQ(some.largest, 1);
  EXPECT_EQ(compare(tensor({1}), tensor({0})).relative_l2, std::numeric_limits<double>::infinity());
  EXPECT_EQ(compare(tensor({std::numeric_limits<float>::quiet_NaN()}), tensor({1})).relative_l2, std::numeric_limits<double>::infinity());
  EXPECT_NEAR(compare(tensor({1.0f, 2.0f}).to(DType::bf16), tensor({1.0f, 2.001f})).largest, 0.001, 1e-5);
}

}  // namespace
}  // namespace tw::models
