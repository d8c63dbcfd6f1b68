// What a compiled kernel tells the host: runtime/module.cpp, runtime/parameters.cpp.

#include "runtime/module.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "runtime/bind.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/kernel.hpp"
#include "tilewave/launch.hpp"

namespace tw::test {
namespace {

constexpr char kProduct[] = R"(#pragma once
#include "tilewave/tile/language.tile.hpp"
namespace module_test {
template <int Rows, int Stages>
struct Product {
  template <class Target>
  struct On {
    using A = tw::Shared<Target, tw::bf16, Rows, 64>;
    using D = tw::Staging<Target, tw::bf16, Rows, Rows>;
    static constexpr int rows = Rows;
    static constexpr int cluster = 2;
    using Schedule = tw::Banded<4>;
    struct Params {
      tw::Global<Target, const tw::bf16, A> a;
      tw::Global<Target, const tw::bf16, A, 2> b;
      int depth;
      tw::Global<Target, tw::bf16, D> d;
    };
    struct Memory {
      tw::Ring<Target, A, Stages> ring;
      D out;
      explicit constexpr Memory(auto& block) : ring(block), out(block) {}
    };
    struct State { tw::Fragment<Target, float, Rows, Rows> acc; };
    static int steps(const Params& p, tw::Tile) { return p.depth; }
    static void load(auto& producer, const Params& p, tw::Tile, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, A& a) { copy.tile(p.a, a, 0, 0); });
    }
    static void compute(auto& block, const Params&, tw::Tile, Memory& memory, State& state) {
      A& a = block.take(memory.ring);
      block.mma(state.acc, a, a, true);
      block.wait(tw::leave<0>, state.acc);
      block.release(memory.ring);
    }
    static void finish(auto& block, const Params& p, tw::Tile, Memory& memory, State& state) { block.store(state.acc, memory.out, p.d, 0, 0); }
  };
};
}  // namespace module_test
)";

const bool embedded = [] {
  static const EmbeddedFile file = {"tests/module/product.tile.hpp", kProduct, sizeof(kProduct) - 1};
  return register_embedded(&file, 1);
}();

CompiledKernel product(const char* type) {
  return compile({.name = "product", .type = type, .target = "tw::sm_90a::Target<true, true>", .source = "tests/module/product.tile.hpp"});
}

/// Its Params, as the host would declare them.
template <class A, class D>
struct ProductParams {
  sm_90a::Global<const bf16, A> a;
  sm_90a::Global<const bf16, A, 2> b;
  int depth;
  sm_90a::Global<bf16, D> d;
};
using Tile64 = sm_90a::Shared<bf16, 64, 64, Contract::columns>;
using Staging64 = sm_90a::Staging<bf16, 64, 64>;
using HostParams = ProductParams<Tile64, Staging64>;

template <class P>
void check_layout(const std::string& unbound) {
  P params{};
  detail::require_layout({"module_test::Product", "", &params, sizeof(P), alignof(P), [](void* at) { ::new (at) P{}; }}, unbound);
}

TEST(Modules, SayHowTheyAreLaunched) {
  skip_without_nvrtc();
  ASSERT_TRUE(embedded);
  const CompiledKernel kernel = product("module_test::Product<128, 3>");
  const ModuleInfo& m = kernel.module;
  EXPECT_EQ(m.threads, 3 * 128);
  EXPECT_EQ(m.shared_bytes, 1024 + 3 * 128 * 128 + 2 * 2 * 64 * 128);
  EXPECT_EQ(m.cluster, 2);
  EXPECT_EQ(m.min_blocks, 1);
  EXPECT_TRUE(m.persistent);
  EXPECT_TRUE(m.loads);
  ASSERT_EQ(m.params.size(), sizeof(HostParams));
  const HostParams host{};
  const auto global = [&](const BoundView& member) {
    BoundView view;
    std::memcpy(&view, m.params.data() + (reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&host)), sizeof view);
    EXPECT_EQ(view.stride_j, BoundView::kUnbound);
    return view.map_tile();
  };
  EXPECT_EQ(global(host.a).rows, 128);
  EXPECT_EQ(global(host.a).cols, 64);
  EXPECT_EQ(global(host.a).element, detail::MapElement::bf16);
  EXPECT_EQ(global(host.b).rows, 64) << "a block of the cluster copies half";
  EXPECT_EQ(global(host.d).rows, 64) << "a warpgroup stores its own rows";
}

TEST(Modules, OfOtherTileSizesHaveTheSameParams) {
  skip_without_nvrtc();
  check_layout<HostParams>(product("module_test::Product<128, 3>").module.params);
  check_layout<HostParams>(product("module_test::Product<64, 2>").module.params);
}

TEST(Modules, ParamsThatDifferAreRefused) {
  skip_without_nvrtc();
  const std::string unbound = product("module_test::Product<64, 2>").module.params;
  struct Longer : HostParams {
    alignas(64) int more[16];
  };
  expect_error<InvalidArgument>([&] { check_layout<Longer>(unbound); },
                                {"kernel module_test::Product", "Params differ between host and device", "bytes on the host"});
  struct Moved {
    sm_90a::Global<const bf16, Tile64> a;
    int depth;
    sm_90a::Global<bf16, Staging64> d;
    alignas(64) char rest[sizeof(HostParams) - 2 * sizeof(sm_90a::Global<bf16, Staging64>) - 64];
  };
  static_assert(sizeof(Moved) == sizeof(HostParams));
  expect_error<InvalidArgument>([&] { check_layout<Moved>(unbound); }, {"tensors at bytes"});
  struct Retyped {
    sm_90a::Global<const f16, sm_90a::Shared<f16, 64, 64, Contract::columns>> a;
    sm_90a::Global<const bf16, Tile64, 2> b;
    int depth;
    sm_90a::Global<bf16, Staging64> d;
  };
  expect_error<InvalidArgument>([&] { check_layout<Retyped>(unbound); }, {"the tensor at byte 0 is of another type"});
}

TEST(Modules, DamagedFilesAreNoModules) {
  skip_without_nvrtc();
  const std::string cubin = product("module_test::Product<64, 2>").cubin;
  ASSERT_TRUE(read_module(cubin));
  EXPECT_FALSE(read_module(""));
  EXPECT_FALSE(read_module(std::string(100, 'x')));
  // Nothing is read beyond the end, wherever that is.
  for (std::size_t size = 0; size < cubin.size(); size += 1 + size / 64) static_cast<void>(read_module(std::string(cubin.data(), size)));
  // Nor when a number in the header, the section headers or the symbol table is another.
  for (std::size_t at = 0; at < cubin.size(); at += at < 64 ? 1 : 61) {
    std::string damaged = cubin;
    damaged[at] = static_cast<char>(damaged[at] ^ 0xff);
    static_cast<void>(read_module(damaged));
  }
  std::string renamed = cubin;
  for (std::size_t at = renamed.find(kModuleSymbol); at != std::string::npos; at = renamed.find(kModuleSymbol, at)) renamed[at] = 'x';
  EXPECT_FALSE(read_module(renamed));
}

}  // namespace
}  // namespace tw::test
