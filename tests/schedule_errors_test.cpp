// What would hang or race on a GPU is an error on the CPU.

#include <gtest/gtest.h>

#include <random>

#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw::test {
namespace {

/// A kernel of one ring whose steps, puts per step and `compute` are given: a host type, which only the CPU can run.
template <class Body, int Stages>
struct Scheduled {
  template <class Target>
  struct On {
    using Piece = Shared<Target, float, 64, 32>;
    struct Params {
      Global<Target, const float, Piece> in;
    };
    struct Memory {
      Ring<Target, Piece, Stages> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, float, 64, 64> acc;
    };
    static constexpr int rows = 64;
    static int steps(const Params&, Tile) { return Body::steps; }
    static void load(auto& producer, const Params& p, Tile, int step, Memory& memory) {
      for (int i = 0; i < Body::puts; ++i)
        producer.put(memory.ring, [&](auto copy, Piece& piece) { copy.tile(p.in, piece, Body::first_row, step * 32); });
    }
    static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) { Body::run(block, memory.ring, state.acc); }
    static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

template <int kSteps, int kPuts = 1, int kFirstRow = 0>
struct Steps {
  static constexpr int steps = kSteps;
  static constexpr int puts = kPuts;
  static constexpr int first_row = kFirstRow;
};

class ScheduleErrors : public testing::Test {
 protected:
  void SetUp() override { cpu::set_poison_released_slots(true); }
  void TearDown() override { cpu::set_poison_released_slots(before_); }
  template <class Body, int Stages>
  void run() {
    PlacedTensor in({64, 96}, DType::f32, Device::cpu());
    std::mt19937_64 random = random_engine();
    in.fill_random(random);
    launch<Scheduled<Body, Stages>>(Stream::standard(Device::cpu()), {}, [&](auto& bind, auto& p) { bind(p.in, in); });
  }

 private:
  const bool before_ = cpu::poison_released_slots();
};

struct Correct : Steps<3> {
  static void run(auto& block, auto& ring, auto& acc) {
    for (int step = 0; step < 3; ++step) {
      auto& piece = block.take(ring);
      block.mma(acc, piece, piece, step == 0);
      block.wait(leave<0>, acc);
      block.release(ring);
    }
  }
};

TEST_F(ScheduleErrors, NoneInACorrectKernel) {
  EXPECT_NO_THROW((run<Correct, 1>()));
  EXPECT_NO_THROW((run<Correct, 2>()));
}

struct HoldsTwo : Steps<3> {
  static void run(auto& block, auto& ring, auto&) {
    block.take(ring);
    block.take(ring);
    block.release(ring);
    block.release(ring);
    block.take(ring);
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, PutIntoAFullRing) {
  expect_error<Error>([&] { run<HoldsTwo, 1>(); }, {"schedule", "put into a ring with no free slot"});
  EXPECT_NO_THROW((run<HoldsTwo, 2>()));
}

struct TakesFour : Steps<3> {
  static void run(auto& block, auto& ring, auto&) {
    for (int i = 0; i < 4; ++i) {
      block.take(ring);
      block.release(ring);
    }
  }
};

TEST_F(ScheduleErrors, TakeWithNothingLeft) {
  expect_error<Error>([&] { run<TakesFour, 2>(); }, {"schedule", "empty ring with no step left to load"});
}

struct ReleasesFirst : Steps<1> {
  static void run(auto& block, auto& ring, auto&) { block.release(ring); }
};
struct ReleasesTwice : Steps<2> {
  static void run(auto& block, auto& ring, auto&) {
    block.take(ring);
    block.release(ring);
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, ReleaseWithoutTake) {
  expect_error<Error>([&] { run<ReleasesFirst, 2>(); }, {"schedule", "released, but none is taken"});
  expect_error<Error>([&] { run<ReleasesTwice, 2>(); }, {"schedule", "released, but none is taken"});
}

struct ReleasesUnderProduct : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.mma(acc, piece, piece, true);
    block.release(ring);
  }
};
struct WaitsForTooFew : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.mma(acc, piece, piece, true);
    block.wait(leave<1>, acc);  // the only one
    block.release(ring);
  }
};
struct ReleasesTheOlder : Steps<2> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& first = block.take(ring);
    block.mma(acc, first, first, true);
    auto& second = block.take(ring);
    block.mma(acc, second, second, false);
    block.wait(leave<1>, acc);
    block.release(ring);  // the first: its product is done
    block.wait(leave<0>, acc);
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, ReleaseUnderAProduct) {
  expect_error<Error>([&] { run<ReleasesUnderProduct, 2>(); }, {"schedule", "release of a slot that a product in flight reads"});
  expect_error<Error>([&] { run<WaitsForTooFew, 2>(); }, {"schedule", "release of a slot that a product in flight reads"});
  EXPECT_NO_THROW((run<ReleasesTheOlder, 2>()));
}

template <int kWhat>
struct TouchesUnderProduct : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    cpu::Operand<float, 64, 32> operand{};
    cpu::Fragment<float, 64, 32> other;
    block.fill(other, 1.0f);
    block.mma(acc, operand, piece, true);
    if (kWhat == 1) block.for_each(acc, [](int, int, float& x) { x = 0; });
    if (kWhat == 2) block.rows(acc, [](int, auto row) { row.map([](auto x) { return x; }); });
    if (kWhat == 3) block.map(acc, 2.0f, [](auto x, auto y) { return x * y; });
    if (kWhat == 4) block.convert(operand, other);
    if (kWhat == 5) block.store(other, piece);
    if (kWhat == 6) block.zero_rows(piece, 8);
    if (kWhat == 7) block.fill(other, 2.0f);  // not the product's
    block.wait(leave<0>, acc);
    block.for_each(acc, [](int, int, float& x) { x = 0; });
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, TouchingWhatAProductUses) {
  expect_error<Error>([&] { run<TouchesUnderProduct<1>, 2>(); }, {"schedule", "accumulators are read or written while a product adds"});
  expect_error<Error>([&] { run<TouchesUnderProduct<2>, 2>(); }, {"schedule", "accumulators are read or written while a product adds"});
  expect_error<Error>([&] { run<TouchesUnderProduct<3>, 2>(); }, {"schedule", "accumulators are read or written while a product adds"});
  expect_error<Error>([&] { run<TouchesUnderProduct<4>, 2>(); }, {"schedule", "an operand is written while a product reads it"});
  expect_error<Error>([&] { run<TouchesUnderProduct<5>, 2>(); }, {"schedule", "an operand is written while a product reads it"});
  expect_error<Error>([&] { run<TouchesUnderProduct<6>, 2>(); }, {"schedule", "an operand is written while a product reads it"});
  EXPECT_NO_THROW((run<TouchesUnderProduct<7>, 2>()));
}

struct MultipliesReleased : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.release(ring);
    block.mma(acc, piece, piece, true);
  }
};
struct MultipliesReleasedFromRegisters : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.release(ring);
    cpu::Operand<float, 64, 32> operand{};
    block.mma(acc, operand, piece, true);
  }
};
struct LoadsReleased : Steps<1> {
  static void run(auto& block, auto& ring, auto&) {
    auto& piece = block.take(ring);
    block.release(ring);
    cpu::Fragment<float, 64, 32> x;
    block.load(x, piece);
  }
};

TEST_F(ScheduleErrors, UseAfterRelease) {
  expect_error<Error>([&] { run<MultipliesReleased, 2>(); }, {"schedule", "a product reads a slot that was released"});
  expect_error<Error>([&] { run<MultipliesReleasedFromRegisters, 2>(); }, {"schedule", "a product reads a slot that was released"});
  expect_error<Error>([&] { run<LoadsReleased, 2>(); }, {"schedule", "slot that was released"});
}

struct ManyProducts : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    for (int i = 0; i < 100; ++i) block.mma(acc, piece, piece, i == 0);
  }
};

TEST_F(ScheduleErrors, TooManyProductsInFlight) {
  expect_error<Error>([&] { run<ManyProducts, 1>(); }, {"schedule", "too many products in flight"});
}

struct TakesOne {
  static void run(auto& block, auto& ring, auto&) {
    block.take(ring);
    block.release(ring);
  }
};
struct LeavesAStep : Steps<2>, TakesOne {};
struct LeavesASlot : Steps<1, 2>, TakesOne {};
struct KeepsASlot : Steps<1> {
  static void run(auto& block, auto& ring, auto&) { block.take(ring); }
};

TEST_F(ScheduleErrors, TilesThatLeaveSomethingToTheNext) {
  expect_error<Error>([&] { run<LeavesAStep, 2>(); }, {"schedule", "ends before its last step was loaded"});
  expect_error<Error>([&] { run<LeavesASlot, 2>(); }, {"schedule", "filled and never taken"});
  expect_error<Error>([&] { run<KeepsASlot, 2>(); }, {"schedule", "taken and never released"});
}

struct BeginsBefore : Steps<1, 1, -1>, TakesOne {};

/// A tile wholly before its tensor is zeros, as one wholly behind it is.
struct LiesBefore : Steps<1, 1, -64> {
  static void run(auto& block, auto& ring, auto&) {
    cpu::Fragment<float, 64, 32> x;
    block.load(x, block.take(ring));
    block.for_each(x, [](int, int, float& value) { EXPECT_EQ(value, 0); });
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, TilesThatBeginBeforeTheirTensor) {
  expect_error<Error>([&] { run<BeginsBefore, 2>(); }, {"schedule", "begins before its tensor and ends inside"});
  EXPECT_NO_THROW((run<LiesBefore, 2>()));
}

/// Parts of a tensor of 4 rows, for the CPU and the analysis.
template <class G>
void expect_parts_inside() {
  G tensor{};
  tensor.rows = 4;
  EXPECT_EQ(tensor.part(1, 3).rows, 3);
  EXPECT_EQ(tensor.part(7, 0).rows, 0);
  for (const auto& [first, count] : {std::pair{1, 4}, {-1, 2}, {4, 1}, {0, -1}})
    expect_error<Error>([&] { static_cast<void>(tensor.part(first, count)); }, {"schedule", "a part of a tensor has rows outside of it"});
}

TEST_F(ScheduleErrors, PartsThatLeaveTheirTensor) {
  expect_parts_inside<cpu::Global<const float>>();
  expect_parts_inside<analysis::Global<const float>>();
}

TEST_F(ScheduleErrors, LeaveTheNextLaunchAlone) {
  expect_error<Error>([&] { run<ReleasesUnderProduct, 2>(); }, {"schedule"});
  EXPECT_NO_THROW((run<Correct, 2>()));
}

/// Kernels of a list of four values, and of a histogram in which three things were counted.
struct AppendsFive {
  static void run(auto& block, auto& memory) {
    for (u64 i = 0; i < 5; ++i) block.append(memory.list, i);
  }
};
struct LocatesTheFourth {
  static void run(auto& block, auto& memory) {
    block.clear(memory.counters);
    for (int i = 0; i < 3; ++i) block.count(memory.counters, i);
    block.locate(memory.counters, 4);
  }
};
template <class Body>
struct Shares {
  template <class Target>
  struct On {
    struct Params {};
    struct Memory {
      Histogram<Target, 128> counters;
      List<Target, u64, 4> list;
      explicit constexpr Memory(auto& block) : counters(block), list(block) {}
    };
    static void compute(auto& block, const Params&, Tile, Memory& memory) { Body::run(block, memory); }
  };
};

TEST_F(ScheduleErrors, FullListsAndCountersThatHoldTooLittle) {
  const auto launch_body = [](auto body) { launch<Shares<decltype(body)>>(Stream::standard(Device::cpu()), {}, [](auto&, auto&) {}); };
  expect_error<Error>([&] { launch_body(AppendsFive{}); }, {"schedule", "list is full"});
  expect_error<Error>([&] { launch_body(LocatesTheFourth{}); }, {"schedule", "more than was counted"});
}

/// A kernel whose Buffer is in the slot of its ring.
template <class Body>
struct InTheSlot {
  template <class Target>
  struct On {
    using Piece = Shared<Target, bf16, 64, 64>;
    static constexpr int rows = 64;
    struct Params {
      Global<Target, const bf16, Piece> in;
    };
    struct Memory {
      Ring<Target, Piece, 1> ring;
      Buffer<Target, bf16, 64, 64> buffer;
      explicit constexpr Memory(auto& block) : ring(block), buffer(ring) {}
    };
    struct State {
      Fragment<Target, float, 64, 64> acc;
    };
    static int steps(const Params&, Tile) { return 1; }
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Piece& piece) { copy.tile(p.in, piece, 0, 0); });
    }
    static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) {
      block.fill(state.acc, 1.0f);
      Body::run(block, memory, state.acc);
    }
    static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};
void multiply_buffer(auto& block, auto& memory, auto& acc) {
  block.fence();
  block.sync();
  block.mma(acc, memory.buffer, memory.buffer, true);
}
struct Replaces {
  static void run(auto& block, auto& memory, auto& acc) {
    auto& piece = block.take(memory.ring);
    block.mma(acc, piece, piece, true);
    block.wait(leave<0>, acc);
    block.store(acc, memory.buffer);
    multiply_buffer(block, memory, acc);
    block.wait(leave<0>, acc);
    block.release(memory.ring);
  }
};
struct ReplacesBeforeTaking {
  static void run(auto& block, auto& memory, auto& acc) {
    block.store(acc, memory.buffer);
    block.take(memory.ring);
    block.release(memory.ring);
  }
};
struct ReplacesUnderProduct {
  static void run(auto& block, auto& memory, auto& acc) {
    auto& piece = block.take(memory.ring);
    cpu::Fragment<float, 64, 64> other;
    block.fill(other, 1.0f);
    block.mma(acc, piece, piece, true);
    block.store(other, memory.buffer);
    block.wait(leave<0>, acc);
    block.release(memory.ring);
  }
};
struct ReleasesReplaced {
  static void run(auto& block, auto& memory, auto& acc) {
    block.take(memory.ring);
    block.store(acc, memory.buffer);
    multiply_buffer(block, memory, acc);
    block.release(memory.ring);
    block.wait(leave<0>, acc);
  }
};
struct ReadsReplacedAfterRelease {
  static void run(auto& block, auto& memory, auto& acc) {
    block.take(memory.ring);
    block.store(acc, memory.buffer);
    block.release(memory.ring);
    multiply_buffer(block, memory, acc);
    block.wait(leave<0>, acc);
  }
};

TEST_F(ScheduleErrors, BuffersInTheSlotOfARing) {
  PlacedTensor in({64, 64}, DType::bf16, Device::cpu());
  std::mt19937_64 random = random_engine();
  in.fill_random(random);
  const auto launch_body = [&](auto body) {
    launch<InTheSlot<decltype(body)>>(Stream::standard(Device::cpu()), {}, [&](auto& bind, auto& p) { bind(p.in, in); });
  };
  EXPECT_NO_THROW(launch_body(Replaces{}));
  expect_error<Error>([&] { launch_body(ReplacesBeforeTaking{}); }, {"schedule", "stored to while the slot is not taken"});
  expect_error<Error>([&] { launch_body(ReplacesUnderProduct{}); }, {"schedule", "while a product reads the slot"});
  expect_error<Error>([&] { launch_body(ReleasesReplaced{}); }, {"schedule", "release of a slot that a product in flight reads"});
  expect_error<Error>([&] { launch_body(ReadsReplacedAfterRelease{}); }, {"read before anything was stored"});
}

TEST(HostKernel, IsForTheCpuAlone) {
  // Its text is not embedded, so there is nothing that the run-time compiler could be given. Said before any device is asked.
  expect_error<InvalidArgument>([&] { launch_gpu<Scheduled<Correct, 2>>(Stream::standard(Device::cpu()), {}, [](auto&, auto&) {}); },
                                {"cannot run on a GPU", "Scheduled", "source"});
}

}  // namespace
}  // namespace tw::test
