// What a kernel's author can get wrong without noticing: each is an error that says what it is. Mistakes that a compiler can see are also
// in tests/rejected/, for the host's compiler.

#include <gtest/gtest.h>

#include <string>

#include "runtime/jit.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"

namespace tw::test {

// A product whose kernel the tests spoil: `Faulty` says how.
enum class Fault { none, rows, accumulators, steps };

namespace {

constexpr char kProduct[] = R"(#pragma once
#include "tilewave/tile/language.tile.hpp"
namespace tw::test {
enum class Fault { none, rows, accumulators, steps };
template <Fault fault>
struct Rows128 { static constexpr int rows = 128; };
template <>
struct Rows128<Fault::rows> {};
template <class Params, Fault fault>
struct Steps { TW_INLINE static int steps(const Params&, Tile) { return 1; } };
template <class Params>
struct Steps<Params, Fault::steps> { TW_INLINE static int step(const Params&, Tile) { return 1; } };
template <Fault fault, int Stages = 2>
struct Product {
  template <class Target>
  struct Parts {
    using A = Shared<Target, bf16, 128, 64>;
    struct Params {
      Global<Target, const bf16, A> a;
      Global<Target, float> d;
    };
  };
  template <class Target>
  struct On : Rows128<fault>, Steps<typename Parts<Target>::Params, fault> {
    using A = typename Parts<Target>::A;
    using Params = typename Parts<Target>::Params;
    struct Memory {
      Ring<Target, A, Stages> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, conditional<fault == Fault::accumulators, double, float>, 128, 128> acc;
    };
    TW_INLINE static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, A& a) { copy.tile(p.a, a, 0, 0); });
    }
    TW_INLINE static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) {
      A& a = block.take(memory.ring);
      block.mma(state.acc, a, a, true);
      block.wait(leave<0>, state.acc);
      block.release(memory.ring);
    }
    TW_INLINE static void finish(auto& block, const Params& p, Tile, Memory&, State& state) { block.store(state.acc, p.d, 0, 0); }
  };
};
}  // namespace tw::test
)";

constexpr char kIncludes[] = R"(#pragma once
#include <cmath>
#include "tilewave/tile/language.tile.hpp"
namespace tw::test {
struct Includes {
  template <class Target>
  struct On {
    struct Params { float* out; };
    static void compute(auto&, const Params& p, Tile) { *p.out = std::sqrt(2.0f); }
  };
};
}  // namespace tw::test
)";

constexpr char kScale[] = R"(#pragma once
namespace tw::test {
struct Other { struct Params { Global<Target, int> wrong; }; };
struct Scale {
  struct Params {
    Global<Target, const float, X> x, weight;  // Global<Target, int> comment;
    float factor;
    tw::Global<Target, float> y; /* the result */
  };
};
}  // namespace tw::test
)";

const bool embedded = [] {
  static const EmbeddedFile files[] = {{"tests/authoring/product.tile.hpp", kProduct, sizeof(kProduct) - 1},
                                       {"tests/authoring/includes.tile.hpp", kIncludes, sizeof(kIncludes) - 1},
                                       {"tests/authoring/scale.tile.hpp", kScale, sizeof(kScale) - 1}};
  return register_embedded(files, std::size(files));
}();

KernelSpec spec_of(const std::string& type, const std::string& file) {
  KernelSpec spec;
  spec.name = "faulty";
  spec.type = type;
  spec.target = "tw::sm_90a::Target<true, true>";
  spec.source = "tests/authoring/" + file;
  return spec;
}

/// What the GPU's compiler says of Product<fault>; empty if it compiles.
std::string compiled_for_the_gpu(const std::string& fault) {
  try {
    compile(spec_of("tw::test::Product<tw::test::Fault::" + fault + ">", "product.tile.hpp"), "sm_90a", false);
  } catch (const CompileError& error) {
    return error.what();
  }
  return "";
}

TEST(AuthoringErrors, OnTheGpuCompilerNamesThem) {
  ASSERT_TRUE(embedded);
  skip_without_nvrtc();
  EXPECT_EQ(compiled_for_the_gpu("none"), "");
  const auto expect = [](const char* fault, const char* text) {
    EXPECT_NE(compiled_for_the_gpu(fault).find(text), std::string::npos) << compiled_for_the_gpu(fault);
  };
  expect("rows", "a Fragment has as many rows as the kernel");
  expect("accumulators", "a Fragment holds accumulators: float, or i32");
  expect("steps", "is that missing or misspelled?");
}

TEST(AuthoringErrors, AHeaderThatTheGpuDoesNotHave) {
  skip_without_nvrtc();
  KernelSpec spec = spec_of("tw::test::Includes", "includes.tile.hpp");
  expect_error<CompileError>(
      [&] { compile(spec, "sm_90a", false); },
      {"tests/authoring/includes.tile.hpp includes <cmath>, which the GPU's compiler does not have", "math.tile.hpp"});
}

TEST(AuthoringErrors, MoreSharedMemoryThanABlockHas) {
  skip_without_nvrtc();
  const KernelSpec spec = spec_of("tw::test::Product<tw::test::Fault::none, 20>", "product.tile.hpp");
  expect_error<InvalidArgument>([&] { compile(spec); },
                                {"kernel faulty", "328704 bytes of shared memory", "allowed: 232448 on sm_90a", "stages"});
}

TEST(AuthoringErrors, MoreBarriersThanABlockKeeps) {
  skip_without_nvrtc();
  const KernelSpec spec = spec_of("tw::test::Product<tw::test::Fault::none, 31>", "product.tile.hpp");
  expect_error<CompileError>([&] { compile(spec); }, {"kernel faulty", "the rings have too many stages"});
}

TEST(AuthoringErrors, ASourceThatIsNotEmbedded) {
  const KernelSpec spec = spec_of("tw::test::Product<tw::test::Fault::none>", "prodct.tile.hpp");
  expect_error<InvalidArgument>([&] { compile(spec); },
                                {"kernel faulty", "tests/authoring/prodct.tile.hpp", "tests/authoring/product.tile.hpp",
                                 "tilewave/tile/language.tile.hpp", "tilewave_embed"});
}

}  // namespace

/// y = factor x weight, whose text is kScale where `kWithText`.
template <bool kWithText>
struct ScaleOn {
  template <class Target>
  struct On {
    using X = Rows<Target, float, 4, 32>;
    struct Params {
      Global<Target, const float> x, weight;
      float factor;
      Global<Target, float> y;
    };
    static void compute(auto& block, const Params& p, Tile) {
      X x, weight;
      block.load(x, p.x, 0, 0);
      block.load(weight, p.weight, 0, 0);
      block.map(x, weight, [&](auto a, auto w) { return p.factor * a * w; });
      block.store(x, p.y, 0, 0);
    }
  };
};
struct Scale : ScaleOn<true> {
  static constexpr const char* source = "tests/authoring/scale.tile.hpp";
};
struct WithoutText : ScaleOn<false> {};

namespace {

class Binding : public testing::Test {
 protected:
  const Tensor x_ = Tensor::zeros({4, 32}, DType::f32), weight_ = Tensor::zeros({4, 32}, DType::f32),
               y_ = Tensor::poisoned({4, 32}, DType::f32);

  template <class Kernel>
  void run(const Tensor* x, const Tensor* weight, bool bind_weight = true) {
    launch<Kernel>(Stream::standard(Device::cpu()), {}, [&](auto& bind, auto& p) {
      bind(p.x, *x);
      if (bind_weight) bind(p.weight, weight);
      p.factor = 1;
      bind(p.y, y_);
    });
  }
};

TEST_F(Binding, EveryTensorIsBoundOrLeftOutOnPurpose) {
  EXPECT_NO_THROW(run<Scale>(&x_, &weight_));
  EXPECT_NO_THROW(run<Scale>(&x_, nullptr));
}

TEST_F(Binding, AForgottenTensorIsNamed) {
  expect_error<InvalidArgument>([&] { run<Scale>(&x_, nullptr, false); },
                                {"kernel tw::test::Scale: params.weight was not bound", "null pointer"});
  expect_error<InvalidArgument>([&] { run<WithoutText>(&x_, nullptr, false); },
                                {"kernel tw::test::WithoutText: tensor 2 of 3 in its Params was not bound"});
}

TEST_F(Binding, AWrongTensorIsNamed) {
  const Tensor wrong = Tensor::zeros({4, 32}, DType::f16);
  expect_error<InvalidArgument>([&] { run<Scale>(&x_, &wrong); },
                                {"kernel tw::test::Scale: params.weight: the tensor has another dtype", "f16"});
  expect_error<InvalidArgument>([&] { run<WithoutText>(&wrong, &weight_); },
                                {"kernel tw::test::WithoutText: tensor 1 of 3 in its Params: "});
}

}  // namespace
}  // namespace tw::test
