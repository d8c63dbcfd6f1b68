// The order in which packed sequences are taken against a stable sort, on the CPU and, where there is one, on a GPU.

#include "kernels/attention/sequence_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "runtime/format.hpp"
#include "tests/support.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;
using Integers = std::vector<std::int32_t>;

class SequenceOrder : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  int pick(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); }
  Tensor to_device(const Integers& values) const {
    const Tensor host = Tensor::empty({static_cast<std::int64_t>(values.size())}, DType::i32);
    std::copy(values.begin(), values.end(), host.data<std::int32_t>());
    return host.to(device);
  }
  static Integers to_host(const Tensor& t) {
    const Tensor host = t.to(Device::cpu());
    return {host.data<std::int32_t>(), host.data<std::int32_t>() + host.numel()};
  }
  /// `queries`, `keys`: of all sequences; the contents may say more.
  void check(const Integers& cu_q, const Integers& cu_k, const Integers& used_k, int queries, int keys) {
    const int tile_rows = pick(2) == 0 ? 128 : 192;
    SCOPED_TRACE(tw::format("cu_q {} cu_k {} used_k {}", tw::join(cu_q, ","), tw::join(cu_k, ","), tw::join(used_k, ",")));
    const std::size_t batch = cu_q.size() - 1;
    const Tensor device_q = to_device(cu_q), device_k = to_device(cu_k), device_used = to_device(used_k);
    detail::AttentionCall call;
    call.batch = static_cast<int>(batch);
    call.keys = keys;
    call.cu_q = device_q.data<std::int32_t>(), call.cu_k = device_k.data<std::int32_t>();
    if (!used_k.empty()) call.used_k = device_used.data<std::int32_t>();
    call.stream = Stream::standard(device);
    call.q = Tensor::empty({1, 1, queries, 8}, DType::bf16, call.stream);
    const Tensor order = Tensor::empty({static_cast<std::int64_t>(batch)}, DType::i32, call.stream);
    const Tensor first_tile = Tensor::empty({static_cast<std::int64_t>(batch)}, DType::i32, call.stream);
    sequence_order(call, tile_rows, order, first_tile);
    call.stream.synchronize();

    const auto length = [](const Integers& cu, std::size_t i, int most) {
      return std::max(std::clamp(cu[i + 1], 0, most) - std::clamp(cu[i], 0, most), 0);
    };
    Integers lengths_k(batch), expected_order(batch), expected_first(batch);
    for (std::size_t i = 0; i < batch; ++i) {
      lengths_k[i] = length(cu_k, i, keys);
      if (!used_k.empty()) lengths_k[i] = std::clamp(used_k[i], 0, lengths_k[i]);
    }
    std::iota(expected_order.begin(), expected_order.end(), 0);
    std::stable_sort(expected_order.begin(), expected_order.end(),
                     [&](int a, int b) { return lengths_k[static_cast<std::size_t>(a)] < lengths_k[static_cast<std::size_t>(b)]; });
    int tiles = 0;
    for (std::size_t place = 0; place < batch; ++place) {
      expected_first[place] = tiles;
      tiles += ceil_div(length(cu_q, static_cast<std::size_t>(expected_order[place]), queries), tile_rows);
    }
    EXPECT_EQ(to_host(order), expected_order);
    EXPECT_EQ(to_host(first_tile), expected_first);
  }

  Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

TEST_P(SequenceOrder, RandomLengths) {
  for (const int batch : {1, 2, 3, 16, 255, 256, 257, 1000}) {
    for (const bool used : {false, true}) {
      Integers cu_q{0}, cu_k{0}, used_k;
      for (int i = 0; i < batch; ++i) {
        cu_q.push_back(cu_q.back() + (pick(5) == 0 ? 0 : pick(700)));
        cu_k.push_back(cu_k.back() + (pick(5) == 0 ? 0 : pick(batch > 100 ? 50 : 3000)));  // many of one length
        if (used) used_k.push_back(pick(3000) - 100);
      }
      check(cu_q, cu_k, used_k, cu_q.back(), cu_k.back());
    }
  }
}

TEST_P(SequenceOrder, ContentsAreClamped) {
  check({-5, 300, 100, 900, 2000}, {0, 10, 5, 1 << 30, -7}, {}, 1000, 700);
  check({0, 128, 256, 384}, {0, 4, 8, 12}, {1 << 30, -3, 2}, 384, 12);
}

INSTANTIATE_TEST_SUITE_P(Ops, SequenceOrder, testing::ValuesIn(kDevices), device_name);

}  // namespace
}  // namespace tw::kernels::attention
