// The analysis target, against counts made by hand.

#include "tilewave/analyze.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>

#include "kernels/variant.hpp"
#include "runtime/format.hpp"
#include "tests/counted_products.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_kernels.tile.hpp"
#include "tests/product_kernels.tile.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/attention.tile.hpp"
#include "tilewave/tile/gemm.tile.hpp"

namespace tw::test {
namespace {

using kernels::gemm::Gemm;

struct GemmShape {
  int m, n, k, batch = 1;
};

template <int BM, int BN, int Cluster = 1, class Act = Identity, class T = f16>
Analysis analyze_gemm(const GemmShape& s, bool with_bias = false, bool with_residual = false) {
  using Kernel = Gemm<kernels::gemm::Operands<T, Contract::columns, Contract::columns>, Linear<T, Act, LinearOptions{.addends = true}>,
                      kernels::gemm::Tiles<BM, BN, 64, 4, Cluster, 8>>;
  const Tensor a = placeholder({s.batch, s.m, s.k}, dtype_of<T>), b = placeholder({s.batch, s.n, s.k}, dtype_of<T>);
  const Tensor d = placeholder({s.batch, s.m, s.n}, dtype_of<T>), bias = placeholder({s.n}, dtype_of<T>);
  return analyze<Kernel>({ceil_div(s.m, BM), ceil_div(s.n, BN), s.batch}, [&](auto& bind, auto& p) {
    bind(p.in.a, a);
    bind(p.in.b, b);
    bind(p.epilogue.d, d);
    bind(p.epilogue.c, nullptr);
    bind(p.epilogue.residual, with_residual ? &d : nullptr);
    p.epilogue.bias = with_bias ? bias.data<T>() : nullptr;
    p.epilogue.has_bias = with_bias;
    p.epilogue.alpha = 1;
    p.in.depth = s.k;
    p.in.a_batches = p.in.b_batches = 1;
    p.splits = 1;
    p.epilogue.has_residual = with_residual;
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
  constexpr AttentionConfig config{.head_dim = 128, .value_dim = 128, .rows = BM, .keys = 128, .stages = 2};
  using Kernel = Attention<bf16, config, Rules<Band<false, kCausal>>>;
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
  const Tensor q = placeholder({128, 64}, DType::bf16), k = placeholder({200, 64}, DType::bf16), out = placeholder({128, 64}, DType::f32),
               scores = placeholder({128, 200}, DType::f32);
  const Analysis chain = analyze<Chain<bf16, 64, 64, 64>>({2}, [&](auto& bind, auto& p) {
    bind(p.q, q);
    bind(p.k, k);
    bind(p.v, k);
    bind(p.scores, scores);
    bind(p.out, out);
  });
  EXPECT_EQ(products(chain, OperandType::bf16), 2u * 4 * 2 * 2 * 64 * 64 * 64);
  EXPECT_EQ(chain.global_read, 2u * (128 * 64 + 2 * 2 * 200 * 64));
  EXPECT_EQ(chain.global_written, 4u * (128 * 200 + 128 * 64));
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
    block.map_row_pairs(gates, [](auto a, auto b) { return SwiGlu::apply(a, b); });
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
  // SwiGLU of columns and of rows: the sigmoid's two, the product with x, the product with up.
  EXPECT_EQ(a.operations.f32, 2u * 16 * 128 + 16 * (127 + 1) + 15 * 128 + 2 * 64 * 64 * 4);
  EXPECT_EQ(a.operations.special, 2u * 2 * 64 * 64);
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
    static void compute(auto& block, const Params&, Tile, Memory& memory, auto&) {
      block.take(memory.ring);
      block.take(memory.ring);
    }
    static void finish(auto&, const Params&, Tile, Memory&, auto&) {}
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
  expect_error<InvalidArgument>([] { placeholder({1 << 30, 1 << 30}, DType::u8); }, {"do not fit into the address space"});
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
