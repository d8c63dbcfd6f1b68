// Launching on a GPU: grids, streams, graphs and errors. The kernel counts, for each tile of the launch, how often it was done.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/launch_blocks.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tile/grid.tile.hpp"

namespace tw::test {
namespace {

constexpr char kCount[] = R"(#pragma once
#include "tilewave/tile/language.tile.hpp"
namespace launch_test {
template <int Step, bool kPersistent>
struct Count {
  template <class Target>
  struct On {
    using Schedule = tw::conditional<kPersistent, tw::Banded<4>, tw::RowMajor>;
    struct Params {
      tw::u32* hits;
      int m, n;
    };
    static void compute(auto&, const Params& p, tw::Tile t) {
      if (tw::sm_90a::ptx::thread_index() == 0) tw::sm_90a::ptx::fetch_add(p.hits + (t.batch * p.m + t.m) * p.n + t.n, Step);
    }
  };
};
struct Greedy {
  template <class Target>
  struct On : Count<1, true>::On<Target> {
    struct Memory {
      tw::List<Target, float, 1 << 18> list;
      explicit constexpr Memory(auto& block) : list(block) {}
    };
    static void compute(auto&, const typename Count<1, true>::On<Target>::Params&, tw::Tile, Memory&) {}
  };
};
}  // namespace launch_test
)";

TEST(LaunchBlocks, OfPersistentLaunchesLeaveAMargin) {
  const RoomForBlocks one{.at_once = 132, .per_sm = 1, .sms = 132}, two{.at_once = 264, .per_sm = 2, .sms = 132};
  EXPECT_EQ(launch_blocks(1000, true, 1, one, 0), 132);
  EXPECT_EQ(launch_blocks(1000, true, 1, one, 8), 124);
  EXPECT_EQ(launch_blocks(1000, true, 1, two, 8), 248);
  EXPECT_EQ(launch_blocks(100, true, 1, one, 8), 100);
  EXPECT_EQ(launch_blocks(1000, true, 1, one, 131), 1);
  EXPECT_EQ(launch_blocks(1000, true, 1, one, 500), 1) << "one SM at least";
  EXPECT_EQ(launch_blocks(1000, false, 1, one, 8), 1000) << "a block for each tile";
  // Clusters leave SMs empty, which are margin enough; and stay whole.
  const RoomForBlocks clusters{.at_once = 120, .per_sm = 1, .sms = 132};
  EXPECT_EQ(launch_blocks(1000, true, 2, clusters, 0), 120);
  EXPECT_EQ(launch_blocks(1000, true, 2, clusters, 8), 120);
  EXPECT_EQ(launch_blocks(1000, true, 2, clusters, 21), 110);
  EXPECT_EQ(launch_blocks(1000, true, 4, clusters, 131), 4);
}

const bool registered = [] {
  static const EmbeddedFile file = {"tests/launch/count.tile.hpp", kCount, sizeof(kCount) - 1};
  return register_embedded(&file, 1);
}();

/// Count's Params, as the device sees them.
struct Params {
  std::uint32_t* hits;
  int m, n;
};

KernelSpec count_spec(int step, bool persistent) {
  KernelSpec spec;
  spec.name = "count";
  spec.type = "launch_test::Count<" + std::to_string(step) + (persistent ? ", true>" : ", false>");
  spec.target = "tw::sm_90a::Target<true, true>";
  spec.source = "tests/launch/count.tile.hpp";
  return spec;
}

void expect_all(const Tensor& hits, std::int64_t expected) {
  const Tensor host = hits.to(Device::cpu());
  for (std::int64_t i = 0; i < host.numel(); ++i) ASSERT_EQ(host.data<std::int32_t>()[i], expected) << "tile " << i;
}

/// The words that a launch over `grid` counts in, zeros.
Tensor words_for(const TileGrid& grid, const Stream& stream) {
  return Tensor::zeros({std::int64_t{grid.m} * grid.n * grid.batch}, DType::i32, stream);
}

Params params_for(const Tensor& hits, const TileGrid& grid) { return {static_cast<std::uint32_t*>(hits.data()), grid.m, grid.n}; }

TEST(Launch, OnTheCpuIsRefused) {
  ASSERT_TRUE(registered);
  const Params params{};
  EXPECT_THROW(launch_on_gpu(count_spec(1, true), &params, TileGrid{}, Stream::standard(Device::cpu())), InvalidArgument);
}

TEST(Launch, cuda_DoesEveryTileOnce) {
  skip_without_cuda();
  skip_without_nvrtc();
  const Stream stream(Device::cuda());
  for (bool persistent : {false, true}) {
    const KernelSpec spec = count_spec(1, persistent);
    for (const TileGrid& grid : {TileGrid{1, 1, 1}, TileGrid{3, 5, 7}, TileGrid{1, 131, 1}, TileGrid{133, 1, 1}, TileGrid{1000, 3, 11}}) {
      const Tensor hits = words_for(grid, stream);
      const Params params = params_for(hits, grid);
      launch_on_gpu(spec, &params, grid, stream);
      launch_on_gpu(spec, &params, grid, stream);
      stream.synchronize();
      expect_all(hits, 2);
    }
  }
}

TEST(Launch, cuda_EmptyGridsLaunchNothing) {
  skip_without_cuda();
  skip_without_nvrtc();
  const Stream stream = Stream::standard(Device::cuda());
  const Tensor hits = Tensor::zeros({1}, DType::i32, stream);
  const Params params = params_for(hits, {});
  for (const TileGrid& grid : {TileGrid{0, 1, 1}, TileGrid{1, 0, 1}, TileGrid{1, 1, 0}})
    launch_on_gpu(count_spec(1, true), &params, grid, stream);
  stream.synchronize();
  expect_all(hits, 0);
}

TEST(Launch, cuda_SpecsAtOneAddressAreToldApart) {
  skip_without_cuda();
  skip_without_nvrtc();
  const Stream stream = Stream::standard(Device::cuda());
  const TileGrid grid{4, 4, 1};
  const Tensor hits = words_for(grid, stream);
  const Params params = params_for(hits, grid);
  KernelSpec spec;
  for (int step : {1, 10, 100, 10, 1}) {
    spec = count_spec(step, true);
    launch_on_gpu(spec, &params, grid, stream);
  }
  stream.synchronize();
  expect_all(hits, 122);
}

TEST(Launch, cuda_InAGraph) {
  skip_without_cuda();
  skip_without_nvrtc();
  const Stream stream(Device::cuda());
  const TileGrid grid{9, 9, 2};
  const Tensor hits = words_for(grid, stream);
  const Params params = params_for(hits, grid);
  stream.synchronize();
  // A kernel that was never launched before: it is compiled and loaded during the capture.
  const KernelSpec spec = count_spec(7, true);
  const Graph graph = Graph::capture(stream, [&] { launch_on_gpu(spec, &params, grid, stream); });
  expect_all(hits, 0);
  for (int i = 0; i < 3; ++i) graph.replay(stream);
  stream.synchronize();
  expect_all(hits, 21);
}

TEST(Launch, cuda_OnTheLegacyStream) {
  skip_without_cuda();
  skip_without_nvrtc();
  const Stream stream = Stream::borrow(Device::cuda(), nullptr);
  const TileGrid grid{5, 2, 1};
  const Tensor hits = words_for(grid, stream);
  const Params params = params_for(hits, grid);
  launch_on_gpu(count_spec(1, true), &params, grid, stream);
  stream.synchronize();
  expect_all(hits, 1);
}

TEST(Launch, cuda_ErrorsNameTheKernel) {
  skip_without_cuda();
  skip_without_nvrtc();
  const Stream stream = Stream::standard(Device::cuda());
  const Tensor hits = Tensor::zeros({1}, DType::i32, stream);
  const Params params = params_for(hits, {});
  const KernelSpec good = count_spec(1, true);
  EXPECT_THROW(launch_on_gpu(good, nullptr, {}, stream), InvalidArgument);
  EXPECT_THROW(launch_on_gpu(good, &params, {-1, 1, 1}, stream), InvalidArgument);
  EXPECT_THROW(launch_on_gpu(good, &params, {1 << 30, 1 << 30, 1 << 30}, stream), InvalidArgument);

  KernelSpec greedy = count_spec(1, true);
  greedy.name = "greedy_kernel";
  greedy.type = "launch_test::Greedy";
  try {
    launch_on_gpu(greedy, &params, {}, stream);
    FAIL() << "launched with 1 MB of shared memory";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("greedy_kernel"), std::string::npos) << text;
    EXPECT_NE(text.find("1050624"), std::string::npos) << text;
  }
  KernelSpec broken = count_spec(1, true);
  broken.name = "broken_kernel";
  broken.type = "launch_test::NoSuchKernel";
  EXPECT_THROW(launch_on_gpu(broken, &params, {}, stream), CompileError);
  // The process goes on.
  launch_on_gpu(good, &params, {}, stream);
  stream.synchronize();
  expect_all(hits, 1);
}

}  // namespace
}  // namespace tw::test
