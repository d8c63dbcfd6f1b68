// What the functions of tilewave/mamba2.hpp refuse, and what they say.

#include <gtest/gtest.h>

#include <limits>

#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/mamba2.hpp"

namespace tw {
namespace {

using namespace tw::test;

class Mamba2BadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (IsSkipped()) return;
    x = make({2, 5, 4, 16}), dt = make({2, 5, 4}), a = make({4}, DType::f32), b = make({2, 5, 2, 8}), c = make({2, 5, 2, 8});
  }
  Tensor make(Shape shape, DType dtype = DType::bf16) const { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); }
  struct Replaced {
    Tensor x = {}, dt = {}, a = {}, b = {}, c = {};
  };
  /// The call with some operands replaced.
  void refused(const Replaced& r, std::initializer_list<std::string_view> parts, const Mamba2Options& options = {}) {
    const auto pick = [](const Tensor& given, const Tensor& standard) { return given.shape() == Shape{0} ? standard : given; };
    const PlacedTensor y({2, 5, 4, 16}, DType::bf16, device, {.offset = 8});
    expect_error<InvalidArgument>([&] { mamba2(pick(r.x, x), pick(r.dt, dt), pick(r.a, a), pick(r.b, b), pick(r.c, c), y, options); },
                                  parts);
    EXPECT_TRUE(y.untouched());
  }
  void refused(std::initializer_list<std::string_view> parts, const Mamba2Options& options) { refused({}, parts, options); }
  const Device device = GetParam();
  Tensor x, dt, a, b, c;
};

INSTANTIATE_TEST_SUITE_P(Ops, Mamba2BadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(Mamba2BadInput, Operands) {
  refused({.x = make({2, 5, 4, 16}, DType::i8)}, {"mamba2", "x is i8[2, 5, 4, 16]", "bf16"});
  refused({.x = make({5, 4, 16})}, {"x is bf16[5, 4, 16]", "[batch, seqlen, nheads, headdim]"});
  refused({.x = make({2, 5, 4, 257})}, {"x is bf16[2, 5, 4, 257]", "1 to 256"});
  refused({.dt = make({2, 5, 3})}, {"dt is bf16[2, 5, 3]", "[2, 5, 4]"});
  refused({.dt = make({2, 5, 4}, DType::f16)}, {"dt is f16[2, 5, 4]", "bf16, or f32"});
  refused({.a = make({3}, DType::f32)}, {"A is f32[3]", "f32[4]"});
  refused({.a = make({4})}, {"A is bf16[4]", "f32"});
  refused({.b = make({2, 6, 2, 8})}, {"B is bf16[2, 6, 2, 8]", "x, bf16[2, 5, 4, 16]"});
  refused({.b = make({2, 5, 3, 8})}, {"B is bf16[2, 5, 3, 8]", "multiple of its groups"});
  refused({.b = make({2, 5, 2, 0})}, {"B is bf16[2, 5, 2, 0]", "1 to 256"});
  refused({.b = make({2, 5, 2, 8}, DType::f32)}, {"B is f32[2, 5, 2, 8]", "bf16"});
  refused({.c = make({2, 5, 2, 9})}, {"C is bf16[2, 5, 2, 9]", "B's shape"});
  const Tensor wide = make({2, 5, 2, 200});
  refused({.b = wide, .c = wide}, {"config is 2", "B bf16[2, 5, 2, 200]", "up to 128"}, {.config = 2});
  refused({.x = make({2, 5, 4, 12})}, {"y is bf16[2, 5, 4, 16]", "x's shape"});
  expect_error<InvalidArgument>([&] { mamba2(x, dt, a, b, c, x); }, {"y", "x", "memory"});
}

TEST_P(Mamba2BadInput, Options) {
  const Tensor short_d = make({3}, DType::f32), half_d = make({4}), half_z = make({2, 5, 4, 8}), bias = make({5}, DType::f32);
  refused({"D is f32[3]", "f32[4] or f32[4, 16]"}, {.d = &short_d});
  refused({"D is bf16[4]", "f32"}, {.d = &half_d});
  refused({"z is bf16[2, 5, 4, 8]", "x's shape"}, {.z = &half_z});
  refused({"dt_bias is f32[5]", "f32[4]"}, {.dt_bias = &bias});
  refused({"dt_min is -1", "at least 0"}, {.dt_min = -1});
  refused({"dt_min is inf", "finite"}, {.dt_min = std::numeric_limits<float>::infinity()});
  refused({"dt_max is 0.5", "dt_min, 1"}, {.dt_min = 1, .dt_max = 0.5f});
  refused({"dt_max is nan"}, {.dt_max = kNaN});
  const Tensor state = make({2, 4, 8, 16}, DType::f32), memory = make({3, 4, 16, 8}, DType::f32);
  refused({"initial_states is f32[2, 4, 8, 16]", "f32[2, 4, 16, 8]"}, {.initial_states = &state});
  refused({"final_states is f32[2, 4, 8, 16]", "f32[2, 4, 16, 8]"}, {.final_states = &state});
  const Tensor first = memory.slice(0, 0, 2), second = memory.slice(0, 1, 3);
  refused({"final_states", "initial_states"}, {.initial_states = &first, .final_states = &second});
  refused({"config is 3", "-1 to 2"}, {.config = 3});
}

TEST_P(Mamba2BadInput, PackedSequences) {
  const Tensor offsets = Tensor::from<std::int32_t>(std::vector<std::int32_t>{0, 3, 5}, {3}).to(device);
  const Tensor numbers = make({2, 5}, DType::i32), half = make({2, 4}, DType::i32), floats = make({2, 5}, DType::f32),
               wide = make({3}, DType::f32);
  refused({"x is bf16[2, 5, 4, 16]", "cu_seqlens", "batch must be 1"}, {.cu_seqlens = &offsets});
  refused({"cu_seqlens is f32[3]", "i32[sequences + 1]"}, {.cu_seqlens = &wide});
  refused({"cu_seqlens and seq_idx"}, {.cu_seqlens = &offsets, .seq_idx = &numbers});
  refused({"seq_idx is i32[2, 4]", "i32[2, 5]"}, {.seq_idx = &half});
  refused({"seq_idx is f32[2, 5]", "i32"}, {.seq_idx = &floats});
  if (device.is_cuda()) return;
  const auto one = [](const Tensor& t) { return t.slice(0, 0, 1); };
  for (const std::vector<std::int32_t>& wrong : {std::vector<std::int32_t>{0, 3, 6}, {0, 4, 3}, {-1, 2, 5}}) {
    const Tensor cu = Tensor::from<std::int32_t>(wrong, {3});
    const PlacedTensor y({1, 5, 4, 16}, DType::bf16, device);
    expect_error<InvalidArgument>([&] { mamba2(one(x), one(dt), a, one(b), one(c), y, {.cu_seqlens = &cu}); }, {"cu_seqlens["});
    EXPECT_TRUE(y.untouched());
  }
}

TEST_P(Mamba2BadInput, Steps) {
  const Tensor y = make({2, 5, 4, 16}), states = make({2, 4, 16, 8}, DType::f32), pool = make({7, 4, 16, 8}, DType::f32);
  const Tensor indices = make({3}, DType::i32), floats = make({2}, DType::f32);
  const auto fails = [&](const Tensor& of, const Tensor& to, std::initializer_list<std::string_view> parts,
                         const Mamba2StepOptions& options = {}) {
    expect_error<InvalidArgument>([&] { mamba2_step(x, dt, a, b, c, of, to, options); }, parts);
  };
  fails(make({2, 4, 8, 16}, DType::f32), y, {"mamba2_step", "states is f32[2, 4, 8, 16]", "[2, 4, 16, 8]"});
  fails(pool, y, {"states is f32[7, 4, 16, 8]", "[2, 4, 16, 8]"});
  fails(make({2, 4, 16, 8}, DType::f16), y, {"states is f16[2, 4, 16, 8]", "f32 or of x's dtype, bf16"});
  fails(states, make({2, 5, 4, 8}), {"y is bf16[2, 5, 4, 8]", "x's shape"});
  fails(pool, y, {"state_indices is i32[3]", "i32[2]"}, {.state_indices = &indices});
  fails(pool, y, {"state_indices is f32[2]", "i32"}, {.state_indices = &floats});
  fails(states, x, {"y", "x", "memory"});
  expect_error<InvalidArgument>([&] { mamba2_step(x, make({2, 5, 4, 1}), a, b, c, states, y); }, {"dt is bf16[2, 5, 4, 1]"});
}

TEST_P(Mamba2BadInput, Gradients) {
  const Tensor dy = make({2, 5, 4, 16}), dx = make({2, 5, 4, 16}), d_dt = make({2, 5, 4}), db = make({2, 5, 2, 8}), dc = make({2, 5, 2, 8});
  const Tensor z = make({2, 5, 4, 16}), d = make({4}, DType::f32), vector = make({4}, DType::f32), matrix = make({4, 16}, DType::f32);
  const Tensor state = make({2, 4, 8}, DType::f32);
  const auto fails = [&](std::initializer_list<std::string_view> parts, const Mamba2BackwardOptions& options, const Tensor& to) {
    expect_error<InvalidArgument>([&] { mamba2_backward(x, dt, a, b, c, dy, dx, d_dt, to, dc, options); }, parts);
  };
  fails({"mamba2_backward", "dB is bf16[2, 5, 2, 9]", "B's shape"}, {}, make({2, 5, 2, 9}));
  fails({"dB", "dC", "memory"}, {}, dc);
  fails({"dz", "z is given"}, {.z = &z}, db);
  fails({"dz is bf16[2, 5, 4, 16]", "z is not given"}, {.dz = &z}, db);
  fails({"dD is f32[4]", "D is not given"}, {.dd = &vector}, db);
  fails({"dD is f32[4, 16]", "D's shape"}, {.d = &d, .dd = &matrix}, db);
  fails({"dA is f32[4, 16]", "A's shape"}, {.da = &matrix}, db);
  fails({"d_dt_bias is f32[4]", "dt_bias is not given"}, {.d_dt_bias = &vector}, db);
  fails({"d_final_states is f32[2, 4, 8]", "f32[2, 4, 16, 8]"}, {.d_final_states = &state}, db);
  fails({"d_initial_states is f32[2, 4, 8]"}, {.d_initial_states = &state}, db);
  fails({"config is 3", "-1 to 2"}, {.config = 3}, db);
  expect_error<InvalidArgument>([&] { mamba2_backward(x, dt, a, b, c, make({2, 5, 4, 8}), dx, d_dt, db, dc); }, {"dy is bf16[2, 5, 4, 8]"});
  expect_error<InvalidArgument>([&] { mamba2_backward(x, dt, a, b, c, dy, make({2, 5, 4, 8}), d_dt, db, dc); }, {"dx is bf16[2, 5, 4, 8]"});
  expect_error<InvalidArgument>([&] { mamba2_backward(x, dt, a, b, c, dy, dx, make({2, 5, 3}), db, dc); }, {"d_dt is bf16[2, 5, 3]"});
  expect_error<InvalidArgument>([&] { mamba2_backward(x, dt, a, b, c, dy, dx, d_dt, db, make({2, 5, 2, 7})); }, {"dC is bf16[2, 5, 2, 7]"});
}

TEST_P(Mamba2BadInput, GradientsInSteps) {
  const Tensor cu = Tensor::from<std::int32_t>(std::vector<std::int32_t>{0, 5}, {2}).to(device);
  const auto fails = [&](DType dtype, const Tensor* cu_seqlens, std::string_view part) {
    const auto of_x = [&] { return make({1, 5, 4, 16}, dtype); };
    const auto of_b = [&] { return make({1, 5, 2, 8}, dtype); };
    const Tensor of_dt = make({1, 5, 4}, dtype), d_dt = make({1, 5, 4}, dtype);
    expect_error<InvalidArgument>(
        [&] {
          mamba2_backward(of_x(), of_dt, a, of_b(), of_b(), of_x(), of_x(), d_dt, of_b(), of_b(), {.cu_seqlens = cu_seqlens, .config = 2});
        },
        {"mamba2_backward", "config is 2", part});
  };
  fails(DType::f32, nullptr, "x is f32[1, 5, 4, 16]");
  fails(DType::bf16, &cu, "without cu_seqlens");
}

}  // namespace
}  // namespace tw
