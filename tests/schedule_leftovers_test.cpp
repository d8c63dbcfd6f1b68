// What a kernel leaves in its rings at the end of a tile: on a GPU the next tile goes on with it, on the CPU it is reported.

#include <gtest/gtest.h>

#include "tests/expect_error.hpp"
#include "tilewave/launch.hpp"

namespace tw::test {
namespace {

/// Two rings; `steps` steps, each of which puts into both. Takes and releases as many slots of either as it is told.
struct Leftovers {
  template <class Target>
  struct On {
    using Piece = Shared<Target, float, 16, 16>;
    static constexpr int rows = 64;
    struct Params {
      Global<Target, const float, Piece> in;
      int steps;
      int taken[2];
      int released[2];
      int from_tile;  ///< tiles before this one leave nothing
    };
    struct Memory {
      Ring<Target, Piece, 4> first;
      Ring<Target, Piece, 4> second;
      explicit constexpr Memory(auto& block) : first(block), second(block) {}
    };
    static int steps(const Params& p, Tile) { return p.steps; }
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      const auto fill = [&](auto copy, Piece& piece) { copy.tile(p.in, piece, 0, 0); };
      producer.put(memory.first, fill);
      producer.put(memory.second, fill);
    }
    static void compute(auto& block, const Params& p, Tile t, Memory& memory, auto&) {
      const auto use = [&](auto& ring, int taken, int released) {
        for (int i = 0; i < taken; ++i) {
          block.take(ring);
          if (i < released) block.release(ring);
        }
      };
      const bool all = t.m < p.from_tile;
      use(memory.first, all ? p.steps : p.taken[0], all ? p.steps : p.released[0]);
      use(memory.second, all ? p.steps : p.taken[1], all ? p.steps : p.released[1]);
    }
    static void finish(auto&, const Params&, Tile, Memory&, auto&) {}
  };
};

/// What a kernel whose Memory is a ring holds at the end: nothing, or the slot that it took last.
template <bool kRelease>
struct RingAlone {
  template <class Target>
  struct On {
    using Piece = Shared<Target, float, 16, 16>;
    using Memory = Ring<Target, Piece, 2>;
    struct Params {
      Global<Target, const float, Piece> in;
    };
    static int steps(const Params&, Tile) { return 3; }
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      producer.put(memory, [&](auto copy, Piece& piece) { copy.tile(p.in, piece, 0, 0); });
    }
    static void compute(auto& block, const Params&, Tile, Memory& memory, auto&) {
      for (int step = 0; step < 3; ++step) {
        block.take(memory);
        if (step < 2 || kRelease) block.release(memory);
      }
    }
    static void finish(auto&, const Params&, Tile, Memory&, auto&) {}
  };
};

/// A kernel with teams. Each of its steps fills `slots` slots.
struct TeamSteps {
  template <class Target>
  struct On {
    using Piece = Shared<Target, float, 16, 16>;
    static constexpr int rows = 128, teams = 2;
    struct Params {
      Global<Target, const float, Piece> in;
      int slots;
    };
    struct Memory {
      Ring<Target, Piece, 4> all;
      explicit constexpr Memory(auto& block) : all(block) {}
    };
    static auto& ring(Memory& memory) { return memory.all; }
    static int steps(const Params&, Tile) { return 2; }
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      for (int i = 0; i < p.slots; ++i) producer.put(memory.all, [&](auto copy, Piece& piece) { copy.tile(p.in, piece, 0, 0); });
    }
    static void compute(auto& block, const Params& p, Tile, Memory& memory, auto&) {
      for (int i = 0; i < 2 * p.slots; ++i) {
        block.take(memory.all);
        block.release(memory.all);
      }
    }
    static void finish(auto&, const Params&, Tile, Memory&, auto&) {}
  };
};

void run(int steps, int first_taken, int first_released, int second_taken, int second_released, int from_tile = 0) {
  const Tensor in = Tensor::zeros({16, 16}, DType::f32);
  launch<Leftovers>(Stream::standard(Device::cpu()), {.m = 3}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    p.steps = steps;
    p.taken[0] = first_taken;
    p.released[0] = first_released;
    p.taken[1] = second_taken;
    p.released[1] = second_released;
    p.from_tile = from_tile;
  });
}

TEST(ScheduleLeftovers, NoneInACorrectKernel) {
  EXPECT_NO_THROW(run(0, 0, 0, 0, 0));
  EXPECT_NO_THROW(run(1, 1, 1, 1, 1));
  EXPECT_NO_THROW(run(4, 4, 4, 4, 4));
}

TEST(ScheduleLeftovers, AStepNeverLoaded) {
  expect_error<Error>([] { run(1, 0, 0, 0, 0); }, {"schedule", "before its last step was loaded"});
  expect_error<Error>([] { run(4, 3, 3, 3, 3); }, {"schedule", "before its last step was loaded"});
}

TEST(ScheduleLeftovers, ASlotNeverTaken) {
  expect_error<Error>([] { run(2, 2, 2, 1, 1); }, {"schedule", "filled and never taken"});
  expect_error<Error>([] { run(2, 0, 0, 2, 2); }, {"schedule", "filled and never taken"});
}

TEST(ScheduleLeftovers, ASlotNeverReleased) {
  expect_error<Error>([] { run(2, 2, 2, 2, 1); }, {"schedule", "taken and never released"});
  expect_error<Error>([] { run(2, 2, 0, 2, 2); }, {"schedule", "taken and never released"});
}

TEST(ScheduleLeftovers, OfTheLastTileToo) {
  expect_error<Error>([] { run(2, 2, 1, 2, 2, 2); }, {"schedule", "taken and never released"});
}

TEST(ScheduleLeftovers, LeaveTheNextLaunchAlone) {
  expect_error<Error>([] { run(2, 2, 1, 2, 2); }, {"schedule"});
  EXPECT_NO_THROW(run(2, 2, 2, 2, 2));
}

TEST(ScheduleLeftovers, OfAMemoryThatIsARing) {
  const Tensor in = Tensor::zeros({16, 16}, DType::f32);
  const auto bind = [&](auto& binder, auto& p) { binder(p.in, in); };
  EXPECT_NO_THROW(launch<RingAlone<true>>(Stream::standard(Device::cpu()), {.m = 2}, bind));
  expect_error<Error>([&] { launch<RingAlone<false>>(Stream::standard(Device::cpu()), {.m = 2}, bind); },
                      {"schedule", "taken and never released"});
}

TEST(ScheduleLeftovers, AStepOfTeamsFillsOneSlot) {
  const Tensor in = Tensor::zeros({16, 16}, DType::f32);
  const auto run_with = [&](int slots) {
    launch<TeamSteps>(Stream::standard(Device::cpu()), {.m = 3}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      p.slots = slots;
    });
  };
  run_with(1);
  expect_error<Error>([&] { run_with(2); }, {"schedule", "another number of slots than one"});
}

}  // namespace
}  // namespace tw::test
