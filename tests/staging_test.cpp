// The stores through which tiles leave are asynchronous on a GPU. Its order of waits, writes and stores is one function for all targets,
// and those without a copy engine check it: here that the check sees what a GPU would do wrong, and that the order passes.

#include <gtest/gtest.h>

#include <string>

#include "kernels/registry.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tilewave/launch.hpp"

namespace tw::test {
namespace {

template <int kSlots, int kPanels>
struct Pieces {
  static constexpr int slots = kSlots;
  static constexpr int panels = kPanels;
};

/// Lets three tiles leave, one after the other; true if no slot is written under a store.
template <class Order>
bool passes(Order order) {
  UnreadStores unread;
  u8 slots[8] = {};
  bool ok = true;
  for (int tile = 0; tile < 3; ++tile)
    order([&](auto left) { unread.wait(left.value); }, [&](int, int slot) { ok = unread.issue(slots + slot) && ok; });
  return ok;
}

template <class P>
bool order_passes() {
  return passes([](auto wait, auto panel) { for_panels<P>(wait, panel); });
}

/// Always all but one store read, every tile from slot 0 on.
template <class P>
bool careless_order_passes() {
  return passes([](auto wait, auto panel) {
    for (int p = 0; p < P::panels; ++p) {
      wait(Constant<P::slots - 1>{});
      panel(p, p % P::slots);
    }
  });
}

TEST(Staging, NoSlotIsWrittenUnderAStore) {
  EXPECT_TRUE((order_passes<Pieces<2, 1>>()));
  EXPECT_TRUE((order_passes<Pieces<2, 2>>()));
  EXPECT_TRUE((order_passes<Pieces<2, 3>>()));
  EXPECT_TRUE((order_passes<Pieces<2, 4>>()));
  EXPECT_TRUE((order_passes<Pieces<3, 1>>()));
  EXPECT_TRUE((order_passes<Pieces<3, 2>>()));
  EXPECT_TRUE((order_passes<Pieces<3, 4>>()));
  EXPECT_TRUE((order_passes<Pieces<3, 5>>()));
  EXPECT_TRUE((order_passes<Pieces<1, 2>>()));
}

TEST(Staging, TheCheckSeesATileThatOvertakesTheLastPanelOfTheOneBefore) {
  EXPECT_FALSE((careless_order_passes<Pieces<2, 1>>()));
  EXPECT_FALSE((careless_order_passes<Pieces<2, 3>>()));
  EXPECT_FALSE((careless_order_passes<Pieces<3, 1>>()));
  EXPECT_FALSE((careless_order_passes<Pieces<3, 4>>()));
  EXPECT_TRUE((careless_order_passes<Pieces<2, 2>>()));
  EXPECT_TRUE((careless_order_passes<Pieces<3, 6>>()));
}

TEST(Staging, AnUnreadSlotIsKnownUntilAWaitCoversIt) {
  UnreadStores unread;
  const u8 slots[3] = {};
  EXPECT_TRUE(unread.issue(slots));
  EXPECT_FALSE(unread.issue(slots));
  EXPECT_TRUE(unread.issue(slots + 1));
  unread.wait(1);
  EXPECT_TRUE(unread.issue(slots));
  EXPECT_FALSE(unread.issue(slots + 1));
  unread.wait(0);
  EXPECT_TRUE(unread.issue(slots + 1));
}

/// A tile of two panels leaves while a store of the slot that it begins with was just issued.
struct Overtakes {
  template <class Target>
  struct On {
    using Out = tw::Staging<Target, bf16, 64, 128>;
    struct Params {
      Global<Target, bf16, Out> out;
      bool overtakes;
    };
    struct Memory {
      Out out;
      explicit constexpr Memory(auto& block) : out(block) {}
    };
    static void compute(auto& block, const Params& p, Tile, Memory& memory) {
      Fragment<Target, float, 64, 128> x;
      block.fill(x, 1.0f);
      if (p.overtakes) cpu::unread_stores.issue(memory.out.slot);
      block.store(x, memory.out, p.out, 0, 0);
    }
  };
};

TEST(Staging, AWrongOrderIsAScheduleErrorOnTheCpu) {
  const Tensor out = Tensor::poisoned({64, 128}, DType::bf16);
  const auto run = [&](bool overtakes) {
    launch_cpu<Overtakes>({}, [&](auto& bind, auto& p) {
      bind(p.out, out);
      p.overtakes = overtakes;
    });
  };
  EXPECT_NO_THROW(run(false));
  expect_error<Error>([&] { run(true); }, {"schedule", "staging slot is written while a store may still read it"});
  EXPECT_NO_THROW(run(false)) << "a launch begins with nothing unread";
}

/// Analysis runs tiles as one block would, with the tile sizes that ship.
TEST(Staging, EveryRegisteredKernelKeepsTheOrder) {
  int with_staging = 0;
  for (const RegisteredKernel& kernel : registered_kernels()) {
    std::string shape;
    const bool few_rows = kernel.spec.name.find("gemv") != std::string::npos || kernel.spec.name.find("skinny") != std::string::npos;
    if (kernel.family == "gemm" && !few_rows) {
      const bool turned = kernel.spec.name.find("turned") != std::string::npos;
      shape = turned ? "M=8,N=1024,K=64" : "M=1024,N=512,K=64";
    } else if (kernel.family == "attention" && kernel.spec.name.find("_d") != std::string::npos) {
      const bool decode = kernel.spec.name.find("decode") != std::string::npos;
      shape = decode ? "batch=4,heads=8,kv_heads=8,seqlen_q=1,seqlen_k=300,splits=1" : "batch=1,heads=3,seqlen_q=700,seqlen_k=300";
    } else if (kernel.family == "convolution") {
      shape = "N=4,H=32,W=32,C=64,F=256,K=1";
    } else {
      continue;
    }
    EXPECT_NO_THROW(kernel.analyze(ShapeValues(shape, kernel.shape))) << kernel.spec.name;
    ++with_staging;
  }
  EXPECT_GE(with_staging, 50);
}

}  // namespace
}  // namespace tw::test
