// The analyses of the registered kernels, against counts made by hand.

#include "tilewave/analyze.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "kernels/registry.hpp"
#include "runtime/format.hpp"
#include "tests/counted_products.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"

namespace tw::test {
namespace {

const RegisteredKernel& find_registered(const std::vector<RegisteredKernel>& all, const std::string& name) {
  return *std::find_if(all.begin(), all.end(), [&](const RegisteredKernel& kernel) { return kernel.spec.name == name; });
}

TEST(RegisteredKernels, Convolution) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  const RegisteredKernel& kernel = find_registered(all, "convolution_f16_fc_128x256");
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
         begins("moe_dispatch_fp8") || begins("quantize_activations") || begins("gemm_fp8_block_scaled") ||
         begins("gemm_bf16_sum_partials");
}

/// 64 for every extent that has no default, but fewer rows for gemv and skinny products.
std::string shape_text(const RegisteredKernel& kernel) {
  std::string text;
  for (const ShapeKey& key : kernel.shape) {
    if (key.standard) continue;
    const bool rows = std::string(key.name) == "M", few = kernel.spec.name.find("skinny") != std::string::npos;
    const int size = !rows ? 64 : kernel.spec.name.starts_with("gemv") ? 1 : few ? 8 : 64;
    text += tw::format("{}{}={}", text.empty() ? "" : ",", key.name, size);
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
  EXPECT_EQ(families.size(), 29u);
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
    // B, and all rows of A for each of 7 tiles of 32 rows of B.
    {"gemm", "gemm_bf16_skinny_32x8", "M=5,N=200,K=1024", 409600 + 7 * 10240, 2000, 409600 + 10240},
    {"gemm", "gemm_bf16_nt_128x256_stream_k", "M=256,N=512,K=1024", 3145728 + 4 * 131072, 262144 + 4 * 131072 + 4 * 4,
     1572864 + 4 * 131072},
    {"gemm", "gemm_bf16_sum_partials", "M=10,N=200,K=1000", 4 * 8000, 4000, 4 * 8000},
    // One tile of two parts of 128 rows, three steps. With a part's scales come the next four rows', with one of B's its three neighbours.
    {"gemm", "gemm_fp8_block_scaled", "M=200,N=100,K=300", 60000 + 30000 + 3 * 4 * (132 + 72) + 3 * 12, 40000, 60000 + 30000 + 2400 + 12},
    {"attention", "attention_bf16_d64", "seqlen_q=100,seqlen_k=300,heads=2", 2 * (12800 + 2 * 38400), 2 * 12800, 2 * (12800 + 2 * 38400)},
    // One tile: every pixel once for each of 9 taps, less what the padding hides: 3 x 8 rows or columns less two.
    {"convolution", "convolution_bf16_fc_64x128", "N=1,H=8,W=8,C=64,F=64,padding=1", 22 * 22 * 128 + 9 * 8192, 8192, 8192 + 9 * 8192},
    // Two groups of one tile each, and two columns of tiles. For each A's rows, of the first tile also the next group's, B, and the tile's
    // entry of three numbers.
    {"grouped_gemm", "grouped_gemm_bf16_nt_64x128", "M=40,N=256,K=64,groups=2", 2 * 60 * 128 + 2 * 32768 + 4 * 12, 40 * 512,
     5120 + 65536 + 2 * 12},
    {"elementwise", "add_bf16", "rows=7,cols=9", 252, 126, 252},
    {"elementwise", "cast_f32_bf16", "rows=3,cols=1000", 12000, 6000, 12000},
    {"transpose", "transpose_2_bytes", "batch=3,M=100,N=70", 42000, 42000, 42000},
    {"reduce", "sum_rows_bf16", "batch=2,rows=10,cols=100", 4000, 40, 4000},
    {"reduce", "sum_long_rows_f32", "rows=2,cols=20000,splits=2", 160000, 16, 160000},
    {"reduce", "sum_columns_f32", "rows=1000,cols=130,splits=2", 520000, 1040, 520000},
    {"embedding", "embedding_bf16", "vocabulary=50,dim=700,ids=9", 9 * 1400 + 9 * 4, 9 * 1400, 9 * 1400 + 9 * 4},
    {"softmax", "softmax_f16_f32_8x16", "rows=5,cols=3000", 30000, 60000, 30000},
    {"hadamard", "hadamard_bf16_128_factors", "rows=64", 16384 + 2 * 512, 16384, 16384 + 512},
    {"hadamard", "hadamard_bf16_32768", "rows=3", 196608, 196608, 196608},
    {"softmax", "softmax_bf16_chunked", "rows=3,cols=20000", 2 * 120000, 120000, 120000},
    // x, residual and, in each of six blocks, the weight; y and the sum.
    {"norm", "rms_norm_bf16_8x8", "rows=6,cols=1000,residual=1", 24000 + 6 * 2000, 24000, 24000 + 2000},
    {"norm", "layer_norm_bf16_chunked", "rows=1,cols=10000", 3 * 20000 + 40000, 20000, 60000},
    {"swiglu", "swiglu_bf16", "rows=3,cols=3000", 36000, 18000, 36000},
    {"swiglu", "swiglu_interleaved_bf16", "rows=3,cols=3000", 36000, 18000, 36000},
    // Two tiles of 8 heads for each of ten tokens, each with the token's row of both tables.
    // One run of 16 steps: x, the filter and the bias.
    {"causal_conv1d", "causal_conv1d_f32", "seqlen=10,channels=8", 320 + 128 + 32, 320, 320 + 128 + 32},
    // Two runs: 16 steps and 3 of x and dy after them; 3 steps of x before the others. Each has the filter, the bias and five sums.
    {"causal_conv1d", "causal_conv1d_backward_bf16", "seqlen=20,channels=8", 16 * (27 + 24) + 2 * 80, 320 + 2 * 160, 2 * 320 + 80},
    // k, gates and betas; the inverse, the sums of the gates, and the betas again.
    {"gated_delta", "gated_delta_prepare_bf16_128", "seqlen=64,heads=1,dim=128", 16384 + 512, 8192 + 512, 16384 + 512},
    // q, k, v, the inverse, two vectors of each chunk; o and the state.
    {"gated_delta", "gated_delta_walk_bf16_128", "seqlen=128,heads=1,dim=128", 3 * 32768 + 2 * 8192 + 1024, 32768 + 65536,
     3 * 32768 + 2 * 8192 + 1024},
    // q, k, gates and betas; their three products with decays, the chunk's decay, A in f32, P, and the betas again.
    {"gated_delta", "gated_delta_prepare_channels_bf16", "seqlen=64,heads=1,dim=128", 2 * 16384 + 32768 + 256,
     3 * 16384 + 512 + 16384 + 8192 + 256, 2 * 16384 + 32768 + 256},
    // A; its inverse.
    {"gated_delta", "gated_delta_invert_channels_bf16", "seqlen=64,heads=1,dim=128", 16384, 8192, 16384},
    // Three operands with decays, v, the inverse, P, two vectors of each chunk; o and the state.
    {"gated_delta", "gated_delta_walk_channels_bf16_128", "seqlen=128,heads=1,dim=128", 4 * 32768 + 4 * 8192 + 2 * 768, 32768 + 65536,
     4 * 32768 + 4 * 8192 + 2 * 768},
    // k, v, the inverse, two vectors of each chunk; a state of each chunk and U.
    {"gated_delta", "gated_delta_states_bf16", "seqlen=128,heads=1,dim=128", 2 * 32768 + 2 * 8192 + 1024, 2 * 32768 + 32768,
     2 * 32768 + 2 * 8192 + 1024},
    // q, k, dO, the inverse, two vectors of each chunk; a state's gradient of each chunk, Y, and the initial state's gradient.
    {"gated_delta", "gated_delta_state_gradients_bf16", "seqlen=128,heads=1,dim=128", 3 * 32768 + 2 * 8192 + 1024,
     2 * 32768 + 32768 + 65536, 3 * 32768 + 2 * 8192 + 1024},
    // Two operands with decays, v, the inverse, two vectors of each chunk; a state of each chunk and U.
    {"gated_delta", "gated_delta_states_channels_bf16", "seqlen=128,heads=1,dim=128", 3 * 32768 + 2 * 8192 + 2 * 768, 2 * 32768 + 32768,
     3 * 32768 + 2 * 8192 + 2 * 768},
    // Three operands with decays, dO, the inverse, P, two vectors of each chunk; a state's gradient of each chunk, Y, and the initial
    // state's gradient.
    {"gated_delta", "gated_delta_state_gradients_channels_bf16", "seqlen=128,heads=1,dim=128", 4 * 32768 + 4 * 8192 + 2 * 768,
     2 * 32768 + 32768 + 65536, 4 * 32768 + 4 * 8192 + 2 * 768},
    {"rope", "rope_bf16_8x32", "batch=2,seqlen=5,heads=10,dim=64", 12800 + 20 * 128, 12800, 12800 + 5 * 128},
    {"rope", "rope_interleaved_bf16_16x64", "seqlen=5,heads=10,dim=64", 6400 + 5 * 128, 6400, 6400 + 5 * 128},
    {"rope", "rope_table_f32", "seqlen=5,dim=64", 0, 1280, 0},
    {"cast_fp8", "cast_fp8_bf16", "rows=10,cols=256", 5120, 2560 + 80, 5120},
    {"cast_fp8", "cast_fp8_bf16", "rows=10,cols=130", 2600, 1300 + 80, 2600},
    {"cast_fp8", "cast_fp8_heads_rotated_bf16_128", "rows=40,cols=128", 10240 + 2 * (512 + 4), 5120, 10240 + 512 + 4},
    {"cast_fp8", "cast_fp8_grouped_bf16", "rows=40,cols=130,groups=4", 10400, 5200 + 320, 10400},
    {"cast_fp8", "cast_fp8_row_maxima_bf16", "rows=130,cols=200", 52000, 1040, 52000},
    // In each of two groups four tiles with 128 maxima and one with two, each for four warps; a scale for each of four blocks.
    {"cast_fp8", "cast_fp8_blocks_bf16", "rows=130,cols=200", 52000 + 2 * (4 * 2048 + 32), 26000 + 16, 52000 + 1040},
    {"dequant_gemm", "dequantize_int8_bf16", "N=10,K=640", 6400 + 3 * 40, 12800, 6400 + 40},
    {"dequant_gemm", "dequantize_int4_32_bf16", "N=10,K=640", 3200 + 400, 12800, 3200 + 400},
    // A sample of 2048 elements is read, then the row; k values once more, because the analysis has zeros.
    {"topk", "topk_bf16", "rows=4,cols=20000", 4 * 4096 + 160000 + 512, 4 * 64 * 6, 160000},
    // Two tiles of 64 heads, each with its queries and all keys; o and lse.
    {"mla", "mla_decode_bf16_contiguous", "batch=1,heads=128,keys=100", 2 * (64 + 100) * 1152, 128 * (1024 + 4), (128 + 100) * 1152},
    // Four tiles, each with its queries, 100 keys, and the list of these, which is the same for both tokens, for a block of 128 keys and
    // for
    // masks; o and lse.
    {"mla", "mla_sparse_bf16", "batch=2,heads=128,keys=100", 4 * ((64 + 100) * 1152 + 4 * 128 + 4 * 100), 256 * (1024 + 4),
     (256 + 100) * 1152 + 400},
    // Two tiles of four queries with their weights, each with all keys and their scales.
    // Eight tiles of eight tokens read their queries and both blocks of keys and values; the list of each is read by two roles.
    {"nsa", "nsa_selected_bf16_128_16_8", "tokens=64,keys=128,kv_heads=1", 262144 + 8 * 65536 + 8 * (4 + 2 * 8), 262144 + 4096,
     262144 + 65536 + 8 * (4 + 2 * 8)},
    {"indexer", "indexer_fp8_e4m3_64", "queries=8,keys=256", 2 * (32768 + 1024 + 32768 + 1024), 8 * 1024, 65536 + 2048 + 32768 + 1024},
    {"topk", "topk_short_f32", "rows=4,cols=100,k=3", 1600 + 48, 4 * 3 * 8, 1600},  // all are listed
    // A row is read for its histogram and to take what is beyond it.
    {"topk", "topk_part_f32", "rows=1,cols=100000", 2 * 400000, 25 * 256 * 8, 400000},
    {"topk", "argmax_part_f32", "rows=1,cols=100000", 400000, 25 * 8, 400000},
    {"bitnet", "quantize_activations_bf16", "M=5,N=1,K=2560", 25600, 12800 + 20, 25600},
    // W; in each of 16 tiles x and its scales; the scales of rows.
    {"bitnet", "ternary_gemm_bf16_16x8", "N=256,K=2048,M=5", 131072 + 16 * (10240 + 20) + 1024, 2560, 131072 + 10240 + 20 + 1024},
    {"log_mel", "log_mel_scale", "windows=2,frames=64", 2 * (2 * 256 + 32768), 2 * 32768, 2 * (256 + 32768)},
    {"topk", "argmax_merge_f32", "rows=1,cols=100000", 25 * 8 + 4, 4 + 4, 25 * 8 + 4},
    // Values, 12 KB of metadata and B: two tiles read each of them.
    {"sparse_gemm", "sparse_gemm_bf16_nt_192x128", "M=384,N=256,K=256", 2 * (98304 + 12288 + 131072), 196608, 98304 + 12288 + 131072},
    {"sparse_gemm", "sparse_gemm_bf16_nt_192x128_transposed", "M=384,N=256,K=256", 2 * (98304 + 12288 + 131072), 196608,
     98304 + 12288 + 131072},
    // Rows and columns outside the matrix have metadata, too: two blocks of 32 rows.
    {"sparse_gemm", "compress_2_4_16bit", "M=20,N=1,K=132", 5280, 2640 + 2 * 4 * 128, 5280},
    // Four tiles of four steps, each with the number of its block, and the length of its list.
    {"block_sparse_gemm", "block_sparse_gemm_bf16_nt_128x128", "M=256,N=256,K=256", 4 * 2 * 65536 + 4 * 5 * 4, 131072,
     2 * 131072 + 4 * 3 * 4},
    // Eight tiles of two chunks, each with 64 columns of k and of v, the exponents of its steps and its decay; the states before the
    // chunks,
    // and the last one in f32.
    {"linear_attention", "linear_attention_states_bf16", "batch=1,seqlen=128,heads=2,Dk=128,Dv=128", 8 * 2 * (8192 + 8192 + 256 + 4),
     2 * 2 * 32768 + 2 * 65536, 4 * 32768 + 2 * 512 + 8 * 2 * 4},
    // Two chunks of two heads, the second of 36 steps.
    {"linear_attention", "linear_attention_outputs_bf16_d128", "batch=1,seqlen=100,heads=2,Dk=128,Dv=128",
     2 * 3 * 25600 + 4 * (32768 + 256), 2 * 25600, 2 * 3 * 25600 + 4 * (32768 + 256)},
    // The states are read and written once, q, k and the gate in each of four slices of columns.
    {"linear_attention", "linear_attention_step_bf16_d128", "batch=3,seqlen=1,heads=2,Dk=128,Dv=128", 6 * (65536 + 4 * 512 + 256 + 4 * 4),
     6 * (65536 + 256), 6 * (65536 + 3 * 256 + 4)},
    // The states are read and written once, 32 rows by each of two blocks, with their x, z and D for each row, the step size, B and C, and
    // the head's rate and bias.
    {"mamba2", "mamba2_step_bf16_d128", "batch=3,seqlen=1,heads=2", 12 * (16384 + 2 * 64 + 2 + 128 + 2 * 256 + 2 * 4), 6 * (32768 + 128),
     6 * (32768 + 2 * 128 + 2) + 3 * 512 + 2 * (256 + 2 * 4)},
    // Of each of two heads two chunks: B and C, x and z, three exponents of each step; three elements of D, because the analysis follows
    // few calls of a loop over threads; the last state.
    {"mamba2", "mamba2_scan_bf16", "batch=1,seqlen=256,heads=2", 4 * (65536 + 32768 + 3 * 512) + 2 * 12, 4 * 16384 + 2 * 32768,
     131072 + 131072 + 3 * 2048 + 2 * 12},
    // Of each of two heads x and B, two vectors of the chunk, and its last sum; the state.
    {"mamba2", "mamba2_chunk_state_bf16", "batch=1,seqlen=256,heads=2", 2 * (32768 + 65536 + 2 * 1024 + 4), 2 * 32768,
     65536 + 65536 + 4 * 1024 + 2 * 4},
    // Four tiles of each head: two slices of C, the state and the tile's sums; one to four of CB, x and two vectors; the gate and D.
    // At least all of CB: the tiles that are read span it.
    {"mamba2", "mamba2_chunk_scan_bf16", "batch=1,seqlen=256,heads=2",
     2 * (4 * 2 * (8192 + 8192 + 256) + 10 * (16384 + 8192 + 512) + 4 * (8192 + 256)), 65536,
     65536 + 32768 + 16 * 16384 + 65536 + 65536 + 4 * 1024 + 512},
    // In each of two blocks the bias.
    {"moe", "moe_route_f32_256", "tokens=8,experts=256,k=6", 8192 + 2 * 1024, 8 * 6 * 8, 8192 + 1024},
};

/// What a layer adds to a step of one token after 31 others, with four query heads on one head of keys.
TEST(RegisteredKernels, DecodingStep) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  const RegisteredKernel& kernel = find_registered(all, "decode_step_bf16_128_4");
  const auto analyze_layers = [&](int layers) {
    const std::string text = tw::format("length=31,layers={},hidden=128,intermediate=128,heads=4,vocabulary=64", layers);
    return kernel.analyze(ShapeValues(text, kernel.shape));
  };
  const Analysis one = analyze_layers(1), two = analyze_layers(2);
  // In rows of 256 bytes: weights of qkv, out (four of them each), gate_up and down; two norms; 31 keys and values; of the rotation's
  // angles 32 bytes for each of 8 pairs of groups of each of six heads, twice. What tiles hand to others: x before and after attention,
  // queries and what is attended, the new key and value, what is between gate_up and down; of each head the sums of the only split that has
  // keys, in f32, and the maxima and sums of all 32 splits.
  const unsigned weights = 6 * 128 + 4 * 128 + 2 * 128 + 128, handed_over = 2 + 2 * 4 + 2 + 1 + 4 * 2 + 4;
  EXPECT_EQ(two.unique_read - one.unique_read, 256u * (weights + 2 + 2 * 31 + 2 * 6 + handed_over));
  // All of that, and the new key and value in the cache, too.
  EXPECT_EQ(two.global_written - one.global_written, 256u * (handed_over + 2));
  EXPECT_EQ(inside(two, OperandType::bf16) - inside(one, OperandType::bf16), 2u * 128 * 128 * (6 + 4 + 2 + 1));
}

TEST(RegisteredKernels, BytesOfEveryFamily) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  for (const RegisteredKernel& kernel : all)
    EXPECT_TRUE(kernel.family == std::string("decode_step") ||  // in DecodingStep
                std::any_of(std::begin(kBytes), std::end(kBytes), [&](const Bytes& b) { return b.family == kernel.family; }))
        << kernel.family << " has no kernel here";
  for (const Bytes& expected : kBytes) {
    SCOPED_TRACE(tw::format("{}, {}", expected.kernel, expected.shape));
    const RegisteredKernel& kernel = find_registered(all, expected.kernel);
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
    const RegisteredKernel& kernel = find_registered(all, name);
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
  const RegisteredKernel& kernel = find_registered(all, "topk_bf16");
  const auto traffic = [&](const char* text) { return kernel.analyze(ShapeValues(text, kernel.shape)).shared_traffic; };
  // 2048 counters are cleared at the beginning. For the sample and for the list they are searched and cleared again. Each of the sample's
  // 512 groups reads and writes one of them. 2048 elements are listed, then read and replaced by their keys. A key is read and counted,
  // which reads and writes a counter; then it is read and listed again. The list's size is cleared twice and read three times. Sorting 64
  // keys takes 21 steps; each step reads and writes all keys. At the end the keys are read once more.
  EXPECT_EQ(traffic("rows=4,cols=20000"), 4u * (8192 + 2 * 2 * 8192 + 512 * 8 + 2048 * (8 + 16 + 16 + 16) + 5 * 4 + 21 * 64 * 16 + 64 * 8));
  // Few enough to be sorted: each is listed, and read and replaced by its key.
  EXPECT_EQ(traffic("rows=4,cols=100"), 4u * (8192 + 4 + 4 + 100 * 24 + 21 * 64 * 16 + 64 * 8));
}

TEST(RegisteredKernels, ShapesThatAKernelIsNotForAreErrors) {
  const std::vector<RegisteredKernel> all = registered_kernels();
  const auto expect = [&](const char* name, const char* text, const char* part) {
    const RegisteredKernel& kernel = find_registered(all, name);
    expect_error<InvalidArgument>([&] { kernel.analyze(ShapeValues(text, kernel.shape)); }, {part});
  };
  expect("gemv_bf16", "M=2,N=8,K=8", "M is 2; the kernel is for one row");
  expect("gemm_bf16_skinny_32x8", "M=9,N=8,K=64", "up to 8 rows");
  expect("gemm_bf16_skinny_32x8", "M=2,N=8,K=8", "multiples of 64");
  expect("gemm_fp8_block_scaled", "M=2,N=8,K=8,batch=2", "batch is 2");
  expect("gemm_bf16_nt_128x256_stream_k", "M=8,N=8,K=0", "it cannot be split");
  const RegisteredKernel& shares = find_registered(all, "gemm_bf16_nt_128x256_stream_k");
  EXPECT_EQ(shares.analyze(ShapeValues("M=0,N=8,K=8", shares.shape)).tiles, 0) << "no D, no parts of it";
  expect("causal_conv1d_bf16", "seqlen=1,channels=8,width=3", "width is 3; the kernel is for 4");
  expect("nsa_selected_bf16_128_16_8", "tokens=8,keys=7", "tokens is 8, keys 7");
  expect("nsa_lists", "tokens=8,keys=64,slots=17", "slots is 17; this kernel is for up to 16");
  expect("indexer_fp8_e4m3_64", "queries=1,keys=1,heads=65", "heads is 65; this kernel is for 33 to 64");
  expect("gated_delta_walk_bf16_64", "seqlen=1,dim=65", "dim is 65; the kernel supports up to 64");
  expect("softmax_bf16_2x24", "rows=1,cols=1537", "cols is 1537; the kernel supports up to 1536");
  expect("rms_norm_bf16_1x8", "rows=1,cols=257", "cols is 257; the kernel supports up to 256");
  expect("rope_bf16_8x32", "seqlen=1,dim=63", "dim is 63; it must be positive and even");
  expect("cast_fp8_grouped_bf16", "rows=10,cols=8,groups=4", "rows is 10; it must be a multiple of groups, 4");
  expect("cast_fp8_heads_rotated_bf16_128", "rows=10,cols=256", "cols is 256; the kernel supports up to 128");
  expect("topk_short_bf16", "rows=1,cols=4000,k=513", "k is 513; the kernel sorts up to 512");
  expect("topk_bf16", "rows=1,cols=4000,k=0", "k is 0; it must be 1 to 2048");
}

/// They are compiled ahead of time into one pack, which is to stay small.
TEST(RegisteredKernels, AreNotTooMany) { EXPECT_LE(registered_kernels().size(), 250u); }

}  // namespace
}  // namespace tw::test
