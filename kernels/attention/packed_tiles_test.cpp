// The list of packed sequences' tiles against a stable sort, on the CPU and, where there is one, on a GPU.

#include "kernels/attention/call.hpp"

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

class PackedTiles : public testing::TestWithParam<Device> {
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
  void check(const Integers& cu_q, const Integers& cu_k, const Integers& used_q, const Integers& used_k, int queries, int keys) {
    const int tile_rows = pick(2) == 0 ? 128 : 192;
    SCOPED_TRACE(tw::format("cu_q {} cu_k {} used_q {} used_k {} tile_rows {}", tw::join(cu_q, ","), tw::join(cu_k, ","),
                            tw::join(used_q, ","), tw::join(used_k, ","), tile_rows));
    const std::size_t batch = cu_q.size() - 1;
    const Tensor device_q = to_device(cu_q), device_k = to_device(cu_k), device_used_q = to_device(used_q),
                 device_used_k = to_device(used_k);
    detail::AttentionCall call;
    call.batch = static_cast<int>(batch);
    call.stream = Stream::standard(device);
    call.q = Tensor::empty({1, 1, queries, 8}, DType::bf16, call.stream);
    call.keys = keys;
    call.cu_q = device_q.data<std::int32_t>(), call.cu_k = device_k.data<std::int32_t>();
    if (!used_q.empty()) call.used_q = device_used_q.data<std::int32_t>();
    if (!used_k.empty()) call.used_k = device_used_k.data<std::int32_t>();
    const int count = queries / tile_rows + call.batch;
    const Tensor tiles = Tensor::poisoned({count, PackedTile::numbers}, DType::i32, call.stream);
    packed_tiles(call, tile_rows, tiles);
    call.stream.synchronize();

    struct Rows {
      int begin, size;
    };
    const auto rows_of = [](const Integers& cu, const Integers& used, std::size_t i, int most) {
      const int begin = std::clamp(cu[i], 0, most), size = std::max(std::clamp(cu[i + 1], 0, most) - begin, 0);
      return Rows{begin, used.empty() ? size : std::clamp(used[i], 0, size)};
    };
    std::vector<std::size_t> order(batch);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return rows_of(cu_k, used_k, a, keys).size < rows_of(cu_k, used_k, b, keys).size;
    });
    Integers expected;
    for (const std::size_t i : order) {
      const Rows q = rows_of(cu_q, used_q, i, queries), k = rows_of(cu_k, used_k, i, keys);
      for (int row = 0; row < q.size; row += tile_rows)
        expected.insert(expected.end(), {static_cast<std::int32_t>(i), row, q.begin, q.size, k.begin, k.size, -1, -1});
    }
    Integers listed = to_host(tiles);
    for (std::size_t at = expected.size(); at < listed.size(); at += PackedTile::numbers) EXPECT_EQ(listed[at + PackedTile::q_rows], 0);
    ASSERT_GE(listed.size(), expected.size());
    listed.resize(expected.size());
    EXPECT_EQ(listed, expected);
  }

  Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

TEST_P(PackedTiles, RandomLengths) {
  for (const int batch : {1, 2, 3, 16, 255, 256, 257, 1000}) {
    for (const bool used : {false, true}) {
      Integers cu_q{0}, cu_k{0}, used_q, used_k;
      for (int i = 0; i < batch; ++i) {
        cu_q.push_back(cu_q.back() + (pick(5) == 0 ? 0 : pick(700)));
        cu_k.push_back(cu_k.back() + (pick(5) == 0 ? 0 : pick(batch > 100 ? 50 : 3000)));  // many of one length
        if (used) used_q.push_back(pick(700) - 100), used_k.push_back(pick(3000) - 100);
      }
      check(cu_q, cu_k, used_q, used_k, cu_q.back(), cu_k.back());
    }
  }
}

TEST_P(PackedTiles, ContentsAreClamped) {
  check({-5, 300, 100, 900, 2000}, {0, 10, 5, 1 << 30, -7}, {}, {}, 1000, 700);
  check({0, 128, 256, 384}, {0, 4, 8, 12}, {-1, 1000, 5}, {1 << 30, -3, 2}, 384, 12);
}

TEST_P(PackedTiles, OverlappingContentsStayInTheList) {
  // Three times the same 1000 queries: more tiles than 1000 queries can have.
  const Tensor cu_q = to_device({0, 1000, 0, 1000, 0, 1000}), cu_k = to_device({0, 1, 2, 3, 4, 5});
  detail::AttentionCall call;
  call.batch = 5;
  call.stream = Stream::standard(device);
  call.q = Tensor::empty({1, 1, 1000, 8}, DType::bf16, call.stream);
  call.keys = 5;
  call.cu_q = cu_q.data<std::int32_t>(), call.cu_k = cu_k.data<std::int32_t>();
  const Tensor memory = Tensor::poisoned({14, PackedTile::numbers}, DType::i32, call.stream), tiles = memory.slice(0, 0, 12);
  packed_tiles(call, 128, tiles);
  call.stream.synchronize();
  for (const std::int32_t number : to_host(memory.slice(0, 12, 14))) EXPECT_EQ(number, -1);
}

INSTANTIATE_TEST_SUITE_P(Ops, PackedTiles, testing::ValuesIn(kDevices), device_name);

}  // namespace
}  // namespace tw::kernels::attention
