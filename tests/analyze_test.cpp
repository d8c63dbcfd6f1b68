// The analysis target, against counts made by hand.

#include "tilewave/analyze.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "kernels/gemm/gemm.tile.hpp"
#include "kernels/registry.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_kernels.tile.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/attention.tile.hpp"

namespace tw::test {
namespace {

using kernels::gemm::Gemm;

std::uint64_t inside(const Analysis& a, OperandType type) { return a.operations.inside[static_cast<std::size_t>(type)]; }
std::uint64_t products(const Analysis& a, OperandType type) { return a.operations.products[static_cast<std::size_t>(type)]; }

struct GemmShape {
  int m, n, k, batch = 1;
};

template <int BM, int BN, int Cluster = 1, class Act = Identity, class T = f16>
Analysis analyze_gemm(const GemmShape& s, bool with_bias = false, bool with_residual = false) {
  using Kernel = Gemm<kernels::gemm::Operands<T, Contract::columns, Contract::columns>, kernels::gemm::Finish<T, Act, true>,
                      kernels::gemm::Tiles<BM, BN, 64, 4, Cluster, 8>>;
  const Tensor a = placeholder({s.batch, s.m, s.k}, dtype_of<T>), b = placeholder({s.batch, s.n, s.k}, dtype_of<T>);
  const Tensor d = placeholder({s.batch, s.m, s.n}, dtype_of<T>), bias = placeholder({s.n}, dtype_of<T>);
  return analyze<Kernel>({ceil_div(s.m, BM), ceil_div(s.n, BN), s.batch}, [&](auto& bind, auto& p) {
    bind(p.in.a, a);
    bind(p.in.b, b);
    bind(p.d, d);
    bind(p.c, nullptr);
    bind(p.residual, with_residual ? &d : nullptr);
    p.bias = with_bias ? bias.data<T>() : nullptr;
    p.alpha = 1;
    p.beta = 0;
    p.in.depth = s.k;
    p.in.a_batches = p.in.b_batches = 1;
    p.splits = 1;
    p.has_residual = with_residual;
  });
}

TEST(Analyze, GemmOfWholeTiles) {
  const Analysis a = analyze_gemm<128, 128>({1024, 1024, 1024});
  EXPECT_EQ(a.tiles, 64);
  EXPECT_EQ(a.threads, 384);
  EXPECT_EQ(a.shared_bytes, 4 * (128 + 128) * 64 * 2 + 2 * 2 * 64 * 128);
  EXPECT_EQ(products(a, OperandType::f16), 2147483648u);
  EXPECT_EQ(a.operations.all_products(), 2147483648u);
  EXPECT_EQ(a.global_read, 33554432u);  // each of 8 x 8 tiles reads 128 rows of A and of B
  EXPECT_EQ(a.global_written, 2097152u);
  EXPECT_EQ(a.unique_read, 2u * 1024 * 1024 * 2);
  EXPECT_EQ(a.unique_written, 2097152u);
  // A step brings 32 KB and reads A once, B for each of two warpgroups; the result goes through.
  EXPECT_EQ(a.shared_traffic, 64u * (16 * (32768 + 16384 + 2 * 16384) + 2 * 32768));
  EXPECT_EQ(a.operations.f32, 1024u * 1024);  // alpha
  EXPECT_EQ(a.operations.special, 0u);
  EXPECT_EQ(a.uncounted, 0u);
  EXPECT_EQ(a.largest_tile.all_products(), 2147483648u / 64);
}

TEST(Analyze, GemmMovesOnlyWhatIsInside) {
  const Analysis a = analyze_gemm<128, 128>({1000, 1000, 1000, 2});
  EXPECT_EQ(a.tiles, 128);
  EXPECT_EQ(a.global_read, 2u * 2 * 8 * 2000000);
  EXPECT_EQ(a.global_written, 2u * 2000000);
  EXPECT_EQ(products(a, OperandType::f16), 2 * 2147483648ull);  // products are of whole tiles
  EXPECT_EQ(inside(a, OperandType::f16), 2 * 2 * 1000ull * 1000 * 1000);
  const Analysis none = analyze_gemm<128, 128>({1000, 1000, 0});
  EXPECT_EQ(none.global_read, 0u);
  EXPECT_EQ(none.operations.all_products(), 0u);
  EXPECT_EQ(none.global_written, 2000000u);
}

TEST(Analyze, GemmOfAClusterSharesB) {
  const Analysis a = analyze_gemm<128, 256, 2>({900, 1000, 1000});
  EXPECT_EQ(a.tiles, 8 * 4);
  EXPECT_EQ(a.global_read, 4u * 900 * 1000 * 2 + 4u * 1000 * 1000 * 2);
  const Analysis rounded = analyze_gemm<128, 256, 2>({128, 256, 64});
  EXPECT_EQ(rounded.tiles, 2);  // whole clusters
  EXPECT_EQ(rounded.global_read, 128u * 64 * 2 + 256 * 64 * 2);
}

TEST(Analyze, GemmEpilogue) {
  const Analysis a = analyze_gemm<128, 256, 1, GeluTanh>({1000, 1000, 1000}, true, true);
  const std::uint64_t tile_elements = 1024 * 1024, with_bias = 1024 * 1000;
  // alpha; bias, where there is one; gelu: 6 of its own and 2 of sigmoid; residual.
  EXPECT_EQ(a.operations.f32, tile_elements * (1 + 8 + 1) + with_bias);
  EXPECT_EQ(a.operations.special, tile_elements * 2);
  EXPECT_EQ(a.global_read, 4u * 2000000 + 8u * 2000000 + 8u * 1000 * 2 + 2000000);
  EXPECT_EQ(a.unique_read, 2u * 2000000 + 2000 + 2000000);
}

TEST(Analyze, ManyTilesCountAsAllOfThem) {
  const int m = 128 * 70 + 5, n = 128 * 40 - 3, k = 200;  // 71 x 40 tiles
  const Analysis a = analyze_gemm<128, 128>({m, n, k}, true);
  EXPECT_EQ(a.tiles, 71 * 40);
  EXPECT_EQ(a.global_read, (40ull * m * k + 71ull * n * k + 71ull * n) * 2);
  EXPECT_EQ(a.global_written, 2ull * m * n);
  EXPECT_EQ(a.unique_read, 2ull * (m * k + n * k + n));
  EXPECT_EQ(products(a, OperandType::f16), 71ull * 40 * 4 * 2 * 128 * 128 * 64);
}

struct AttentionShape {
  int batch, heads, kv_heads, seqlen_q, seqlen_k;
};

template <bool kCausal, int BM = 128>
Analysis analyze_attention(const AttentionShape& s, bool with_lse = false) {
  const Tensor q = placeholder({s.batch, s.heads, s.seqlen_q, 128}, DType::bf16);
  const Tensor k = placeholder({s.batch, s.kv_heads, s.seqlen_k, 128}, DType::bf16), v = placeholder(k.shape(), DType::bf16);
  const Tensor o = placeholder(q.shape(), DType::bf16), lse = placeholder({s.batch, s.heads, s.seqlen_q}, DType::f32);
  using Kernel = Attention<bf16, 128, 128, BM, 128, 2, kEqualLengths, Rules<Band<false, kCausal>>>;
  return analyze<Kernel>({ceil_div(s.seqlen_q, BM), s.heads * s.batch, 1}, [&](auto& bind, auto& p) {
    bind(p.q, q);
    bind(p.k, k);
    bind(p.v, v);
    bind(p.o, o);
    bind(p.partial, nullptr);
    p.lse = with_lse ? lse.data<float>() : nullptr;
    p.lse_stride_j = s.heads * s.seqlen_q;
    p.lse_stride_i = s.seqlen_q;
    p.scale_log2 = 0.1f;
    p.heads_per_kv = s.heads / s.kv_heads;
    p.keys = s.seqlen_k;
  });
}

TEST(Analyze, AttentionOfAllKeys) {
  const std::uint64_t b = 2, h = 16, s = 4096, d = 128, tiles = b * h * 32;
  const Analysis a = analyze_attention<false>({2, 16, 16, 4096, 4096}, true);
  EXPECT_EQ(a.tiles, 1024);
  EXPECT_EQ(products(a, OperandType::bf16), 4 * b * h * s * s * d);
  EXPECT_EQ(a.global_read, 2 * (b * h * s * d + tiles * 2 * s * d));
  EXPECT_EQ(a.unique_read, 2 * 3 * b * h * s * d);
  EXPECT_EQ(a.global_written, 2 * b * h * s * d + 4 * b * h * s);
  EXPECT_EQ(a.unique_written, a.global_written);
  // An exponential for each score, and for each row a reciprocal and a logarithm.
  EXPECT_EQ(a.operations.special, b * h * s * (s + 1 + 1));
  EXPECT_EQ(a.uncounted, 0u);
}

TEST(Analyze, AttentionUnderACausalMask) {
  const std::uint64_t block = 2 * 2 * 128 * 128 * 128;  // two products
  const Analysis a = analyze_attention<true>({1, 4, 4, 1024, 1024});
  EXPECT_EQ(products(a, OperandType::bf16), 4 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) * block);
  EXPECT_EQ(a.global_read, 4u * 2 * (1024 * 128 + 36 * 2 * 128 * 128));
  EXPECT_EQ(a.largest_tile.all_products(), 8 * block);

  // 100 queries, the last of which sees all of 300 keys; two heads share a key head.
  const Analysis odd = analyze_attention<true>({1, 2, 1, 100, 300}, true);
  EXPECT_EQ(odd.tiles, 2);
  EXPECT_EQ(products(odd, OperandType::bf16), 2u * 3 * block);
  EXPECT_EQ(inside(odd, OperandType::bf16), 2u * 2 * (100 + 128) * 300 * 128);  // weights are whole tiles of 128 queries
  EXPECT_EQ(odd.global_read, 2u * 2 * (100 * 128 + 2 * 300 * 128));
  EXPECT_EQ(odd.unique_read, 2u * (2 * 100 * 128 + 2 * 300 * 128));
  EXPECT_EQ(odd.global_written, 2u * (100 * 128 * 2 + 100 * 4));
}

// Kernels of one statement.

template <class F>
struct Statement {
  template <class Target>
  struct On {
    struct Params {
      Global<Target, const float> in;
      Global<Target, float> out;
      Pointer<Target, const float> table, weight;
      Pointer<Target, float> result;
      Pointer<Target, const i32> lengths;
      int cols = 0;
    };
    static void compute(auto& block, const Params& p, Tile t) { F::template compute<Target>(block, p, t); }
  };
};

template <class F>
Analysis analyze_statement(TileGrid grid, const Tensor& in, const Tensor& out, auto set) {
  return analyze<Statement<F>>(grid, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.out, out);
    set(p);
  });
}

struct Tables {
  template <class Target>
  static void compute(auto& block, const auto& p, Tile t) {
    Rows<Target, float, 16, 128> x;
    block.load(x, p.in, t.m * 16, t.n * 128);
    block.for_each(x, [&](int row, int col, auto& y) {
      if (t.n * 128 + col >= p.cols) return;
      y = y * p.weight[t.n * 128 + col] + p.table[(t.m * 16 + row) * p.cols + t.n * 128 + col];
      p.result[(t.m * 16 + row) * p.cols + t.n * 128 + col] = y;
    });
  }
};

TEST(Analyze, ArraysCountWhatIsDistinctInATile) {
  const Tensor x = placeholder({64, 200}, DType::f32), weight = placeholder({200}, DType::f32);
  const Analysis a = analyze_statement<Tables>({4, 2}, x, x, [&](auto& p) {
    p.weight = weight.data<float>();
    p.table = x.data<float>();
    p.result = placeholder({64, 200}, DType::f32).template data<float>();
    p.cols = 200;
  });
  EXPECT_EQ(a.global_read, 4u * (2 * 64 * 200 + 4 * 200));  // weight once in each tile, not once a row
  EXPECT_EQ(a.unique_read, 4u * (2 * 64 * 200 + 200));
  EXPECT_EQ(a.global_written, 4u * 64 * 200);
  EXPECT_EQ(a.operations.f32, 2u * 64 * 200);  // none where there is no column
}

struct Lengths {
  template <class Target>
  static void compute(auto& block, const auto& p, Tile t) {
    Rows<Target, float, 16, 128> x;
    for (int col = 0; col < p.lengths[t.m]; col += 128) block.load(x, p.in, t.m * 16, col);
  }
};

TEST(Analyze, IntegersSteerTheKernel) {
  const std::array<std::int32_t, 3> lengths{100, 0, 300};
  const Tensor x = placeholder({48, 512}, DType::f32);
  const Analysis a = analyze_statement<Lengths>({3}, x, x, [&](auto& p) { p.lengths = lengths.data(); });
  EXPECT_EQ(a.global_read, 4u * 16 * 128 * (1 + 0 + 3) + 4 * (2 + 1 + 4));  // and a length each time that it is asked for
}

struct PlainFloat {
  template <class Target>
  static void compute(auto& block, const auto& p, Tile t) {
    Rows<Target, float, 16, 128> x;
    block.load(x, p.in, t.m * 16, 0);
    block.for_each(x, [](int, int, float& y) { y *= 2; });
    block.rows(x, [](int, auto row) { row.map([](float y) { return exp2(y); }); });
    block.map(x, 3.0f, [](auto y, auto z) { return y * z / 7.0f; });
    block.store(x, p.out, t.m * 16, 0);
  }
};

TEST(Analyze, FunctionsOfFloatAreReported) {
  const Tensor x = placeholder({32, 128}, DType::f32);
  const Analysis a = analyze_statement<PlainFloat>({2}, x, x, [](auto&) {});
  EXPECT_EQ(a.uncounted, 2u * 32 * 128);
  EXPECT_EQ(a.operations.f32, 2u * 32 * 128);
  EXPECT_EQ(a.operations.special, 1u * 32 * 128);  // a division's reciprocal
  EXPECT_EQ(a.global_read, 4u * 32 * 128);
}

struct LowerTriangle {
  template <class Target>
  static void compute(auto& block, const auto& p, Tile t) {
    if (t.n > t.m) return;
    Rows<Target, float, 4, 128> x;
    block.load(x, p.in, t.m * 4, t.n * 128);
    block.atomic_add(x, p.out, t.m * 4, t.n * 128);
  }
};

TEST(Analyze, GridsWhoseTilesDifferInNoDimensionAlone) {
  const Tensor x = placeholder({256, 8192}, DType::f32);
  const Analysis a = analyze_statement<LowerTriangle>({64, 64}, x, x, [](auto&) {});
  const std::uint64_t bytes = 64 * 65 / 2 * 4 * 128 * 4;
  EXPECT_EQ(a.global_read, 2 * bytes);
  EXPECT_EQ(a.global_written, bytes);
}

struct RowsAndColumns {
  template <class Target>
  static void compute(auto& block, const auto& p, Tile t) {
    using X = Rows<Target, float, 16, 128>;
    X x;
    RowVector<Target, float, X> sums;
    ColumnVector<Target, float, X> weights;
    block.load(x, p.in, t.m * 16, 0, Fill{-kInfinity});
    block.load(weights, p.in, 0, 0);
    block.rows(x, [&](int i, auto row) { sums[i] = row.sum([](auto y) { return y * y; }) + row.max(); });
    block.for_rows(sums, [](int, int, auto& y) { y = rsqrt(y); });
    block.map(x, sums, weights, [](auto y, auto s, auto w) { return y * s * w; });
    block.store(x, p.out, t.m * 16, 0);
  }
};

TEST(Analyze, RowsAndVectors) {
  const Tensor x = placeholder({16, 100}, DType::f32);
  const Analysis a = analyze_statement<RowsAndColumns>({1}, x, x, [](auto&) {});
  EXPECT_EQ(a.global_read, 4u * (16 * 100 + 100));
  EXPECT_EQ(a.operations.f32, 16u * (128 + 127 + 127 + 1) + 16 * 128 * 2);
  EXPECT_EQ(a.operations.special, 16u);
}

TEST(Analyze, LanguageKernels) {
  const Tensor q = placeholder({128, 64}, DType::bf16), k = placeholder({200, 64}, DType::bf16), out = placeholder({128, 64}, DType::f32);
  const Analysis chain = analyze<Chain<bf16, 64, 64, 64>>({2}, [&](auto& bind, auto& p) {
    bind(p.q, q);
    bind(p.k, k);
    bind(p.v, k);
    bind(p.out, out);
  });
  EXPECT_EQ(products(chain, OperandType::bf16), 2u * 4 * 2 * 2 * 64 * 64 * 64);
  EXPECT_EQ(chain.global_read, 2u * (128 * 64 + 2 * 2 * 200 * 64));
  EXPECT_EQ(chain.global_written, 4u * 128 * 64);
}

struct NewOperations {
  template <class Target>
  static void compute(auto& block, const auto& p, Tile) {
    using X = Rows<Target, float, 16, 128>;
    X x;
    Rows<Target, float, 128, 16> turned;
    Fragment<Target, float, 64, 128> gates;
    Fragment<Target, float, 64, 64> halves;
    RowVector<Target, float, X> sums;
    ColumnVector<Target, float, X> columns;
    block.load(x, p.in, 0, 0);
    block.load(sums, p.in, 0, 3);
    block.load(columns, p.in, 1, 0);
    const float number = block.value(p.in, 2, 2);
    block.add_products(sums, x, columns);
    block.rows(x, [&](int i, auto row) { sums[i] = row.fold([](auto a, auto b) { return a + b; }) * number; });
    block.column_fold(x, columns, [](auto a, auto b) { return max(a, b); });
    block.fill(gates, 1.0f);
    block.pairs(halves, gates, [](auto a, auto b) { return SwiGlu::apply(a, b); });
    block.transpose(x, turned);
    block.store(sums, p.out, 0, 5);
    block.store(turned, p.out, 0, 0);
  }
};

TEST(Analyze, FoldsPairsAndSingleColumns) {
  const Tensor in = placeholder({10, 100}, DType::f32), out = placeholder({100, 10}, DType::f32);
  const Analysis a = analyze_statement<NewOperations>({1}, in, out, [](auto&) {});
  EXPECT_EQ(a.global_read, 4u * (10 * 100 + 10 + 100 + 1));
  EXPECT_EQ(a.global_written, 4u * (16 + 100 * 10));
  // SwiGLU: the sigmoid's two, the product with x, the product with up.
  EXPECT_EQ(a.operations.f32, 2u * 16 * 128 + 16 * (127 + 1) + 15 * 128 + 64 * 64 * 4);
  EXPECT_EQ(a.operations.special, 2u * 64 * 64);
}

struct TakesTooMuch {
  template <class Target>
  struct On {
    using A = Shared<Target, f16, 64, 64>;
    static constexpr int rows = 64;
    struct Params {
      Global<Target, const f16, A> a;
    };
    struct Memory {
      Ring<Target, A, 2> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    static int steps(const Params&, Tile) { return 1; }
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, A& a) { copy.tile(p.a, a, 0, 0); });
    }
    static void compute(auto& block, const Params&, Tile, Memory& memory, detail::NoState&) {
      block.take(memory.ring);
      block.take(memory.ring);
    }
    static void finish(auto&, const Params&, Tile, Memory&, detail::NoState&) {}
  };
};

TEST(Analyze, ATakeThatNothingFollowsThrows) {
  const Tensor a = placeholder({64, 64}, DType::f16);
  expect_error<Error>([&] { analyze<TakesTooMuch>({1}, [&](auto& bind, auto& p) { bind(p.a, a); }); }, {"no step left to load"});
}

TEST(Analyze, BindChecksTensors) {
  const Tensor wrong = placeholder({64, 64}, DType::bf16);
  expect_error<InvalidArgument>([&] { analyze<TakesTooMuch>({1}, [&](auto& bind, auto& p) { bind(p.a, wrong); }); }, {"bf16[64, 64]"});
}

TEST(Analyze, Placeholders) {
  const Tensor large = placeholder({1 << 20, 1 << 20}, DType::u8);  // a terabyte
  EXPECT_EQ(large.numel(), std::int64_t{1} << 40);
  EXPECT_EQ(large.at({(1 << 20) - 1, 5}), 0);
  EXPECT_EQ(placeholder({3, 0}, DType::f32).numel(), 0);
  expect_error<InvalidArgument>([] { placeholder({2, -1}, DType::f32); }, {"-1"});
  expect_error<InvalidArgument>([] { placeholder({1 << 30, 1 << 30}, DType::u8); }, {"more than the system has addresses for"});
}

// Rooflines.

Analysis with_products(std::int64_t tiles, std::uint64_t each) {
  Analysis a;
  a.tiles = tiles;
  a.operations.products[static_cast<std::size_t>(OperandType::f16)] = static_cast<std::uint64_t>(tiles) * each;
  a.largest_tile.products[static_cast<std::size_t>(OperandType::f16)] = each;
  return a;
}

TEST(Roofline, TilesAreNotDivided) {
  DeviceModel device{"two units", "made up", 2, 100, {}, 10, 5, 0};
  device.products.fill(20);
  EXPECT_DOUBLE_EQ(roofline(with_products(4, 30), device).seconds, 6);  // two on each, at 10 a second
  EXPECT_DOUBLE_EQ(roofline(with_products(5, 30), device).seconds, 9);  // one has three
  EXPECT_DOUBLE_EQ(roofline(with_products(1, 30), device).seconds, 3);  // the other has none
  Analysis unequal = with_products(4, 30);
  unequal.largest_tile.products[static_cast<std::size_t>(OperandType::f16)] = 90;
  EXPECT_DOUBLE_EQ(roofline(unequal, device).seconds, 9);
  device.skips_padding = true;
  EXPECT_DOUBLE_EQ(roofline(unequal, device).seconds, 0);
}

TEST(Roofline, TheSlowestResourceBounds) {
  DeviceModel device{"one unit", "made up", 1, 100, {}, 10, 5, 0};
  device.products.fill(20);
  Analysis a = with_products(1, 20);
  EXPECT_STREQ(roofline(a, device).bound, "products");
  a.unique_read = 150;
  a.unique_written = 150;
  EXPECT_DOUBLE_EQ(roofline(a, device).seconds, 3);
  EXPECT_STREQ(roofline(a, device).bound, "memory");
  a.operations.f32 = a.largest_tile.f32 = 50;
  EXPECT_STREQ(roofline(a, device).bound, "f32");
  a.operations.special = a.largest_tile.special = 50;
  EXPECT_DOUBLE_EQ(roofline(a, device).seconds, 10);
  EXPECT_STREQ(roofline(a, device).bound, "special functions");
}

TEST(Roofline, DeviceModels) {
  ASSERT_NE(find_device_model("H200"), nullptr);
  EXPECT_EQ(find_device_model("NVIDIA H200"), find_device_model("H200"));
  EXPECT_EQ(find_device_model("NVIDIA GeForce RTX 4090")->units, 128);
  EXPECT_EQ(find_device_model("H100"), nullptr);
  EXPECT_EQ(find_device_model(""), nullptr);
  Analysis fp8;
  fp8.tiles = 1;
  fp8.operations.products[static_cast<std::size_t>(OperandType::fp8)] = 1;
  expect_error<InvalidArgument>([&] { roofline(fp8, *find_device_model("A100")); }, {"has no products of fp8"});
}

// What families offer.

const RegisteredKernel& registered(const std::vector<RegisteredKernel>& all, const std::string& name) {
  return *std::find_if(all.begin(), all.end(), [&](const RegisteredKernel& kernel) { return kernel.spec.name == name; });
}

TEST(RegisteredKernels, Convolution) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  const RegisteredKernel& kernel = registered(all, "convolution_f16_fc_128x256");
  const auto analyze_shape = [&](const char* text) { return kernel.analyze(ShapeValues(text, kernel.shape)); };
  // 64 images of 512 x 512 pixels and 256 channels to 512, 3 x 3. What the padding multiplies is not inside: of the 1536 taps of a
  // dimension's pixels two meet it.
  const Analysis large = analyze_shape("N=64,H=512,W=512,C=256,F=512,K=3,padding=1");
  EXPECT_EQ(products(large, OperandType::f16), 39582418599936u);
  EXPECT_EQ(inside(large, OperandType::f16), 2ull * 64 * 1534 * 1534 * 256 * 512);
  EXPECT_EQ(large.global_written, 2ull * 64 * 512 * 512 * 512);
  EXPECT_EQ(large.unique_read, 2ull * (64ull * 512 * 512 * 256 + 9 * 256 * 512));

  // Without padding every tap of every pixel is inside; two columns of tiles read the image, as many tiles as there are windows the
  // weights.
  const Analysis odd = analyze_shape("N=3,H=9,W=12,C=65,F=300,K=2,stride=2");
  const std::uint64_t pixels = 3 * 4 * 6;
  EXPECT_EQ(inside(odd, OperandType::f16), 2 * pixels * 4 * 65 * 300);
  EXPECT_EQ(odd.global_written, 2 * pixels * 300);
  EXPECT_EQ(odd.global_read, 2 * (2 * pixels * 4 * 65 + static_cast<std::uint64_t>(odd.tiles) / 2 * 4 * 65 * 300));
}

/// Kernels whose element functions take floats, which are not counted but reported.
bool takes_floats(const RegisteredKernel& kernel) {
  const auto begins = [&](const char* prefix) { return kernel.spec.name.starts_with(prefix); };
  return kernel.family == "norm" || kernel.family == "rope" || kernel.family == "cast_fp8" || begins("swiglu_interleaved") ||
         begins("gemm_fp8_block_scaled") || begins("gemm_bf16_sum_partials");
}

/// 64 for every extent that has no default, but one row for gemv.
std::string shape_text(const RegisteredKernel& kernel) {
  std::string text;
  for (const ShapeKey& key : kernel.shape) {
    if (key.standard) continue;
    const bool one_row = kernel.spec.name.starts_with("gemv") && std::string(key.name) == "M";
    text += tw::format("{}{}={}", text.empty() ? "" : ",", key.name, one_row ? 1 : 64);
  }
  return text;
}

TEST(RegisteredKernels, AreAnalysed) {
  for (const RegisteredKernel& kernel : registered_kernels()) {
    SCOPED_TRACE(kernel.spec.name);
    ASSERT_NE(kernel.analyze, nullptr);
    ASSERT_FALSE(kernel.shape.empty());
    const Analysis a = kernel.analyze(ShapeValues(shape_text(kernel), kernel.shape));
    EXPECT_GT(a.tiles, 0);
    EXPECT_EQ(a.unique_read > 0, !kernel.spec.name.starts_with("rope_table"));
    EXPECT_GT(a.global_written, 0u);
    EXPECT_GE(a.global_read, a.unique_read);
    EXPECT_GE(a.global_written, a.unique_written);
    if (!takes_floats(kernel)) {
      EXPECT_EQ(a.uncounted, 0u);
    }
  }
}

TEST(RegisteredKernels, AnalysesAgreeWithTheCompiledModules) {
  skip_without_nvrtc();
  std::set<std::string> families;
  for (const RegisteredKernel& kernel : registered_kernels()) {
    if (kernel.analyze == nullptr || !families.insert(kernel.family).second) continue;
    SCOPED_TRACE(kernel.spec.name);
    const Analysis a = kernel.analyze(ShapeValues(shape_text(kernel), kernel.shape));
    const ModuleInfo module = compile(kernel.spec).module;
    EXPECT_EQ(a.threads, module.threads);
    EXPECT_EQ(a.operations.all_products() > 0, module.loads);
    // The GPU's layout adds barriers and padding.
    EXPECT_LE(a.shared_bytes, module.shared_bytes);
    EXPECT_GE(a.shared_bytes + 8192, module.shared_bytes);
  }
  EXPECT_EQ(families.size(), 13u);
}

/// Bytes by hand: what blocks read and write, and what of it is read at least.
struct Bytes {
  const char* family;
  const char* kernel;
  const char* shape;
  std::uint64_t read, written, unique_read;
};

const Bytes kBytes[] = {
    // 8 x 8 tiles with 128 rows of A and of B each.
    {"gemm", "gemm_bf16_nt_128x128", "M=1024,N=1024,K=1024", 33554432, 2097152, 4194304},
    // B, the row for each of 13 tiles of 8 rows of B, and the bias.
    {"gemm", "gemv_bf16", "M=1,N=100,K=3000,bias=1", 600000 + 13 * 6000 + 200, 200, 600000 + 6000 + 200},
    // Two tiles of B's rows in each of four parts of K, with all rows of A.
    {"gemm", "gemm_bf16_turned_partial", "M=10,N=200,K=1000", 400000 + 2 * 20000, 4 * 8000, 420000},
    {"gemm", "gemm_bf16_sum_partials", "M=10,N=200,K=1000", 4 * 8000, 4000, 4 * 8000},
    // Two tiles of 128 rows, three steps: A and its scales once, B and its scales twice.
    {"gemm", "gemm_fp8_block_scaled", "M=200,N=100,K=300", 60000 + 2 * 30000 + 2400 + 2 * 12, 40000, 60000 + 30000 + 2400 + 12},
    {"attention", "attention_bf16_d64", "seqlen_q=100,seqlen_k=300,heads=2", 2 * (12800 + 2 * 38400), 2 * 12800, 2 * (12800 + 2 * 38400)},
    // One tile: every pixel once for each of 9 taps, less what the padding hides: 3 x 8 rows or columns less two.
    {"convolution", "convolution_bf16_fc_64x128", "N=1,H=8,W=8,C=64,F=64,padding=1", 22 * 22 * 128 + 9 * 8192, 8192, 8192 + 9 * 8192},
    {"elementwise", "add_bf16", "rows=7,cols=9", 252, 126, 252},
    {"elementwise", "cast_f32_bf16", "rows=3,cols=1000", 12000, 6000, 12000},
    {"transpose", "transpose_2_bytes", "batch=3,M=100,N=70", 42000, 42000, 42000},
    {"reduce", "sum_rows_bf16", "batch=2,rows=10,cols=100", 4000, 40, 4000},
    {"reduce", "sum_long_rows_f32", "rows=2,cols=20000,splits=2", 160000, 16, 160000},
    {"reduce", "sum_columns_f32", "rows=1000,cols=130,splits=2", 520000, 1040, 520000},
    {"embedding", "embedding_bf16", "vocabulary=50,dim=700,ids=9", 9 * 1400 + 9 * 4, 9 * 1400, 9 * 1400 + 9 * 4},
    {"softmax", "softmax_f16_f32_8x16", "rows=5,cols=3000", 30000, 60000, 30000},
    {"softmax", "softmax_bf16_chunked", "rows=3,cols=20000", 2 * 120000, 120000, 120000},
    // x, residual and, in each of six blocks, the weight; y and the sum.
    {"norm", "rms_norm_bf16_8x8", "rows=6,cols=1000,residual=1", 24000 + 6 * 2000, 24000, 24000 + 2000},
    {"norm", "layer_norm_bf16_chunked", "rows=1,cols=10000", 3 * 20000 + 40000, 20000, 60000},
    {"swiglu", "swiglu_bf16", "rows=3,cols=3000", 36000, 18000, 36000},
    {"swiglu", "swiglu_interleaved_bf16", "rows=3,cols=3000", 36000, 18000, 36000},
    // Two tiles of 8 heads for each of ten tokens, each with the token's row of both tables.
    {"rope", "rope_bf16_8x32", "batch=2,seqlen=5,heads=10,dim=64", 12800 + 20 * 128, 12800, 12800 + 5 * 128},
    {"rope", "rope_interleaved_bf16_16x64", "seqlen=5,heads=10,dim=64", 6400 + 5 * 128, 6400, 6400 + 5 * 128},
    {"rope", "rope_table_f32", "seqlen=5,dim=64", 0, 1280, 0},
    {"cast_fp8", "cast_fp8_bf16", "rows=10,cols=256", 5120, 2560 + 80, 5120},
    {"cast_fp8", "cast_fp8_bf16", "rows=10,cols=130", 2600, 1300 + 80, 2600},
    {"cast_fp8", "cast_fp8_grouped_bf16", "rows=40,cols=130,groups=4", 10400, 5200 + 320, 10400},
    {"cast_fp8", "cast_fp8_row_maxima_bf16", "rows=130,cols=200", 52000, 1040, 52000},
    // In each of two groups four tiles with 128 maxima and one with two, each for four warps; a scale for each of four blocks.
    {"cast_fp8", "cast_fp8_blocks_bf16", "rows=130,cols=200", 52000 + 2 * (4 * 2048 + 32), 26000 + 16, 52000 + 1040},
    // A row is read for its histogram and to take what is beyond it; k values are read once more.
    {"topk", "topk_bf16", "rows=4,cols=20000", 2 * 160000 + 512, 4 * 64 * 6, 160000},
    {"topk", "topk_short_f32", "rows=4,cols=100,k=3", 1600 + 48, 4 * 3 * 8, 1600},  // as many as can be sorted at once
    {"topk", "topk_part_f32", "rows=1,cols=100000", 2 * 400000, 25 * 256 * 8, 400000},
    {"topk", "argmax_part_f32", "rows=1,cols=100000", 400000, 25 * 8, 400000},
    {"topk", "argmax_merge_f32", "rows=1,cols=100000", 25 * 8 + 4, 4 + 4, 25 * 8 + 4},
};

TEST(RegisteredKernels, BytesOfEveryFamily) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  for (const RegisteredKernel& kernel : all)
    EXPECT_TRUE(std::any_of(std::begin(kBytes), std::end(kBytes), [&](const Bytes& b) { return b.family == kernel.family; }))
        << kernel.family << " has no kernel here";
  for (const Bytes& expected : kBytes) {
    SCOPED_TRACE(tw::format("{}, {}", expected.kernel, expected.shape));
    const RegisteredKernel& kernel = registered(all, expected.kernel);
    EXPECT_EQ(kernel.family, expected.family);
    const Analysis a = kernel.analyze(ShapeValues(expected.shape, kernel.shape));
    EXPECT_EQ(a.global_read, expected.read);
    EXPECT_EQ(a.global_written, expected.written);
    EXPECT_EQ(a.unique_read, expected.unique_read);
    EXPECT_EQ(a.unique_written, expected.written);
  }
}

TEST(RegisteredKernels, OperationsOfRows) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  const auto analyze_shape = [&](const char* name, const char* text) {
    const RegisteredKernel& kernel = registered(all, name);
    return kernel.analyze(ShapeValues(text, kernel.shape));
  };
  // Of a block's 4096 columns: the maximum, difference, scale, the exponential, the sum, the product; and the reciprocal of the sum.
  const Analysis softmax = analyze_shape("softmax_f16_f32_8x16", "rows=5,cols=3000");
  EXPECT_EQ(softmax.operations.special, 5u * (4096 + 1));
  EXPECT_EQ(softmax.operations.f32, 5u * (4095 + 2 * 4096 + 4095 + 1 + 4096));
  // Rows of 4 x 1024 columns, 4 of them a tile: every element is added, then a row's places, then the result is divided.
  const Analysis sum = analyze_shape("sum_rows_bf16", "rows=10,cols=100");
  EXPECT_EQ(sum.operations.f32, 12u * (1024 + 1023) + 10);
  EXPECT_EQ(sum.operations.special, 10u);
}

TEST(RegisteredKernels, SharedMemoryOfTopk) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  const RegisteredKernel& kernel = registered(all, "topk_bf16");
  const auto traffic = [&](const char* text) { return kernel.analyze(ShapeValues(text, kernel.shape)).shared_traffic; };
  // 2048 counters are cleared and searched, one is read and written for every element; the list's size is cleared; 64 keys are sorted in 21
  // steps, each of which reads and writes all, and read.
  EXPECT_EQ(traffic("rows=4,cols=20000"), 4u * (2 * 8192 + 20000 * 8 + 4 + 21 * 64 * 16 + 64 * 8));
  // Few enough to be sorted: each key is appended with the list's size.
  EXPECT_EQ(traffic("rows=4,cols=100"), 4u * (4 + 100 * 16 + 21 * 64 * 16 + 64 * 8));
}

TEST(RegisteredKernels, ShapesThatAKernelIsNotForAreErrors) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  const auto expect = [&](const char* name, const char* text, const char* part) {
    const RegisteredKernel& kernel = registered(all, name);
    expect_error<InvalidArgument>([&] { kernel.analyze(ShapeValues(text, kernel.shape)); }, {part});
  };
  expect("gemv_bf16", "M=2,N=8,K=8", "M is 2; the kernel is for one row");
  expect("gemm_bf16_turned_partial", "M=2,N=8,K=0", "K is 0");
  expect("gemm_fp8_block_scaled", "M=2,N=8,K=8,batch=2", "batch is 2");
  expect("softmax_bf16_2x24", "rows=1,cols=1537", "cols is 1537; the kernel is for rows of up to 1536");
  expect("rms_norm_bf16_1x8", "rows=1,cols=257", "cols is 257; the kernel is for rows of up to 256");
  expect("rope_bf16_8x32", "seqlen=1,dim=63", "dim is 63; it must be positive and even");
  expect("cast_fp8_grouped_bf16", "rows=10,cols=8,groups=4", "rows is 10; it must be a multiple of groups, 4");
  expect("topk_short_bf16", "rows=1,cols=4000,k=513", "k is 513; the kernel sorts up to 512");
  expect("topk_bf16", "rows=1,cols=4000,k=0", "k is 0; it must be 1 to 2048");
}

/// They are compiled ahead of time into one pack, which is to stay small.
TEST(RegisteredKernels, AreNotTooMany) { EXPECT_LE(registered_kernels().size(), 150u); }

constexpr ShapeKey kKeys[] = {{"M", "rows"}, {"N", "columns"}, {"batch", "how many", 1}};

TEST(ShapeValues, AreParsed) {
  const ShapeValues shape("N=7,M=1073741824", kKeys);
  EXPECT_EQ(shape["M"], 1 << 30);
  EXPECT_EQ(shape["N"], 7);
  EXPECT_EQ(shape["batch"], 1);
  EXPECT_EQ(shape.text(), "M=1073741824,N=7,batch=1");
}

TEST(ShapeValues, ErrorsNameTheKeys) {
  const auto parse = [](std::string text) { return [text] { ShapeValues(text, kKeys); }; };
  expect_error<InvalidArgument>(parse("M=1,N=2,K=3"), {"there is no \"K\"; the names are: M, N, batch (1)"});
  expect_error<InvalidArgument>(parse("M=1"), {"N is missing (columns)"});
  expect_error<InvalidArgument>(parse(""), {"M is missing"});
  expect_error<InvalidArgument>(parse("M=1,N"), {"\"N\" is not NAME=NUMBER"});
  expect_error<InvalidArgument>(parse("M=1,,N=2"), {"\"\" is not NAME=NUMBER"});
  expect_error<InvalidArgument>(parse("M=1,M=1,N=2"), {"M is given twice"});
  for (const char* number : {"", "-1", "x", "1x", "1.5", "1073741825", "99999999999999999999"})
    expect_error<InvalidArgument>(parse(std::string("N=1,M=") + number), {"it must be a number from 0 to 1073741824"});
}

}  // namespace
}  // namespace tw::test
