// CPU kernels keep tiles on the stack; a thread that has little of it must be able to call them all the same.

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/bitnet.hpp"
#include "tilewave/block_sparse_gemm.hpp"
#include "tilewave/cast_fp8.hpp"
#include "tilewave/causal_conv1d.hpp"
#include "tilewave/convolution.hpp"
#include "tilewave/detail/parallel.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/embedding.hpp"
#include "tilewave/error.hpp"
#include "tilewave/gated_delta.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/grouped_gemm.hpp"
#include "tilewave/hadamard.hpp"
#include "tilewave/indexer.hpp"
#include "tilewave/linear_attention.hpp"
#include "tilewave/mamba2.hpp"
#include "tilewave/mamba2_chunks.hpp"
#include "tilewave/mla.hpp"
#include "tilewave/moe.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/nsa.hpp"
#include "tilewave/reduce.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/softmax.hpp"
#include "tilewave/sparse_gemm.hpp"
#include "tilewave/swiglu.hpp"
#include "tilewave/topk.hpp"
#include "tilewave/transpose.hpp"
#include "tilewave/vertical_slash.hpp"

namespace tw::test {
namespace {

/// Runs `work` in a thread with so much stack; what it throws is thrown here.
void in_thread(std::size_t stack_bytes, const std::function<void()>& work) {
  struct Call {
    const std::function<void()>& work;
    std::exception_ptr failure;
  } call{work, {}};
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, stack_bytes), 0);
  pthread_t thread;
  const auto start = [](void* argument) -> void* {
    Call& here = *static_cast<Call*>(argument);
    try {
      here.work();
    } catch (...) {
      here.failure = std::current_exception();
    }
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, start, &call), 0);
  pthread_attr_destroy(&attributes);
  pthread_join(thread, nullptr);
  if (call.failure) std::rethrow_exception(call.failure);
}

Tensor random_values(Shape shape, DType dtype) {
  const Tensor random = Tensor::random(std::move(shape), DType::f32, 7);
  return dtype == DType::f32 ? random : random.to(dtype);
}

/// An operation with its largest tiles: a call of `run` with a new output.
struct StackCase {
  const char* name;
  Shape shape;
  DType dtype;
  std::function<void(const Tensor& output)> run;
};

std::vector<StackCase> stack_cases() {
  std::vector<StackCase> all;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Tensor a = random_values({520, 96}, dtype), b = random_values({96, 600}, dtype);
    all.push_back({"gemm", {520, 600}, dtype, [=](const Tensor& y) { gemm(a, b, y, {.activation = Activation::gelu_erf}); }});
    all.push_back({"swiglu in gemm", {520, 300}, dtype, [=](const Tensor& y) { gemm(a, b, y, {.activation = Activation::swiglu}); }});
    const std::vector<std::int32_t> numbers{0, 100, 520};
    const Tensor offsets = Tensor::from(std::span<const std::int32_t>(numbers), {3});
    const Tensor weights = random_values({2, 96, 300}, dtype), sides = random_values({300, 520}, dtype);
    all.push_back({"grouped_gemm", {520, 300}, dtype, [=](const Tensor& y) { grouped_gemm(a, weights, offsets, y); }});
    all.push_back({"k_grouped_gemm", {2, 300, 96}, dtype, [=](const Tensor& y) { k_grouped_gemm(sides, a, offsets, y); }});
    if (dtype != DType::f32) {
      const Tensor w = random_values({300, 96}, dtype);
      prune_2_4(w, w);
      const SparseMatrix sparse = SparseMatrix::allocate(300, 96, dtype);
      compress_2_4(w, sparse);
      all.push_back({"sparse_linear", {520, 300}, dtype, [=](const Tensor& y) { sparse_linear(a, sparse, y); }});
      all.push_back({"sparse_gemm", {300, 520}, dtype, [=](const Tensor& y) { sparse_gemm(sparse, a.transpose(0, 1), y); }});
      const Tensor queries = random_values({1, 1, 16, 576}, dtype), cache = random_values({1, 130, 576}, dtype);
      all.push_back({"mla_append", {1, 3, 576}, dtype, [=](const Tensor& y) {
                       mla_append(cache.slice(1, 0, 2).slice(2, 0, 512), cache.slice(1, 0, 2).slice(2, 0, 64), y);
                     }});
      all.push_back({"mla_decode", {1, 1, 16, 512}, dtype, [=](const Tensor& y) { mla_decode(queries, cache, y, {.num_splits = 2}); }});
      const Tensor lists = Tensor::zeros({1, 100}, DType::i32);
      all.push_back({"mla_sparse", {1, 16, 512}, dtype, [=](const Tensor& y) {
                       mla_sparse(queries.select(0, 0), cache.select(0, 0), lists, y, {.num_splits = 2});
                     }});
      const Tensor indexer_q = random_values({9, 64, 128}, dtype), indexer_k = random_values({300, 128}, dtype);
      const Tensor indexer_weights = random_values({9, 64}, DType::f32);
      all.push_back(
          {"indexer_scores", {9, 300}, DType::f32, [=](const Tensor& y) { indexer_scores(indexer_q, indexer_k, indexer_weights, y); }});
      const Tensor nsa_q = random_values({1, 70, 16, 128}, dtype), nsa_k = random_values({1, 70, 1, 128}, dtype);
      const Tensor blocks = Tensor::zeros({1, 70, 1, 2}, DType::i32), of_heads = random_values({1, 70, 16}, DType::f32);
      const Tensor first = Tensor::zeros({1, 16, 2}, DType::i32);
      all.push_back({"vertical_slash_attention", nsa_q.shape(), dtype,
                     [=](const Tensor& y) { vertical_slash_attention(nsa_q, nsa_k, nsa_k, first, first, y); }});
      all.push_back({"nsa_selected", nsa_q.shape(), dtype, [=](const Tensor& y) { nsa_selected(nsa_q, nsa_k, nsa_k, blocks, y); }});
      all.push_back({"nsa_selected_backward", nsa_q.shape(), dtype, [=](const Tensor& y) {
                       const Tensor dk = Tensor::zeros(nsa_k.shape(), dtype), dv = Tensor::zeros(nsa_k.shape(), dtype);
                       nsa_selected_backward(nsa_q, nsa_k, nsa_k, blocks, nsa_q, of_heads, nsa_q, y, dk, dv);
                     }});
      all.push_back({"nsa_select", {1, 70, 1, 2}, DType::i32, [=](const Tensor& y) {
                       nsa_select(nsa_q, nsa_k.slice(1, 0, 2), of_heads, y, {.block_size = 32});
                     }});
      all.push_back({"block_sparse_gemm", {520, 600}, dtype, [=](const Tensor& y) { block_sparse_gemm(a, b, y, {}); }});
      all.push_back({"prune_2_4", {300, 96}, dtype, [=](const Tensor& y) { prune_2_4(w, y); }});
    }
    const Tensor image = random_values({1, 20, 20, 40}, dtype), filters = random_values({300, 3, 3, 40}, dtype);
    all.push_back({"conv2d", {1, 18, 18, 300}, dtype, [=](const Tensor& y) { conv2d(image, filters, y); }});
    for (const std::int64_t dim : {64, 128, 192, 256}) {
      const Tensor q = random_values({1, 512, 2, dim}, dtype), k = random_values({1, 512, 2, dim}, dtype);
      all.push_back(
          {"attention", {1, 512, 2, dim}, dtype, [=](const Tensor& y) { attention(q, k, k, y, {.causal = true, .softcap = 5}); }});
      all.push_back({"attention_decode", {1, 4, 2, dim}, dtype, [=](const Tensor& y) { attention_decode(q.slice(1, 0, 4), k, k, y, {}); }});
    }
    for (const std::int64_t cols : {200, 1200, 4000, 9000}) {
      const Tensor x = random_values({40, cols}, dtype), weight = random_values({cols}, dtype);
      const Tensor long_rows = random_values({2, 2 * cols}, dtype);
      all.push_back({"softmax", {40, cols}, dtype, [=](const Tensor& y) { softmax(x, y); }});
      all.push_back({"layer_norm", {40, cols}, dtype, [=](const Tensor& y) { layer_norm(x, y, {.weight = &weight, .bias = &weight}); }});
      all.push_back({"rms_norm", {40, cols}, dtype, [=](const Tensor& y) { rms_norm(x, y, {.weight = &weight, .residual = &x}); }});
      all.push_back({"add", {40, cols}, dtype, [=](const Tensor& y) { add(x, x, y); }});
      all.push_back({"cast", {40, cols}, DType::f32, [=](const Tensor& y) { cast(x, y); }});
      all.push_back({"swiglu", {40, cols}, dtype, [=](const Tensor& y) { swiglu(x, x, y); }});
      all.push_back({"swiglu_interleaved", {2, cols}, dtype, [=](const Tensor& y) { swiglu_interleaved(long_rows, y); }});
      all.push_back({"reduce", {40}, dtype, [=](const Tensor& y) { reduce(Reduction::sum, x, y); }});
      all.push_back({"reduce columns", {cols}, dtype, [=](const Tensor& y) { reduce(Reduction::max, x, y, {.dim = 0}); }});
      all.push_back({"transpose", {cols, 40}, dtype, [=](const Tensor& y) { transpose(x, y); }});
      all.push_back({"argmax", {40}, DType::i64, [=](const Tensor& y) { argmax(x, y); }});
      all.push_back({"topk", {40, 150}, DType::i64, [=](const Tensor& y) { topk(x, 150, Tensor::empty({40, 150}, dtype), y); }});
      all.push_back({"cast_fp8", {40, cols}, DType::fp8_e4m3, [=](const Tensor& y) {
                       cast_fp8(x, y, Tensor::empty({40, (cols + 127) / 128}, DType::f32));
                     }});
      const Tensor ids = Tensor::zeros({50}, DType::i32);
      all.push_back({"embedding", {50, cols}, dtype, [=](const Tensor& y) { embedding(x, ids, y); }});
    }
    for (const std::int64_t cols : {4096, 32768, 28672}) {
      const Tensor x = random_values({4, cols}, dtype);
      all.push_back({"hadamard", {4, cols}, dtype, [=](const Tensor& y) { hadamard(x, y); }});
    }
    const Tensor tokens = random_values({90, 64}, dtype), logits = random_values({90, 512}, dtype);
    const Tensor gate_up = random_values({512, 32, 64}, dtype), down = random_values({512, 64, 16}, dtype);
    all.push_back({"fused_moe", {90, 64}, dtype, [=](const Tensor& y) { fused_moe(tokens, logits, 16, gate_up, down, y); }});
    const TernaryMatrix ternary = quantize_ternary(random_values({64, 512}, dtype));
    for (const std::int64_t m : {3, 30}) {
      const Tensor rows = random_values({m, 512}, dtype);
      all.push_back({"bit_linear", {m, 64}, dtype, [=](const Tensor& y) { bit_linear(rows, ternary, y); }});
    }
    const Tensor steps = random_values({1, 70, 2, 200}, dtype);
    all.push_back({"linear_attention", steps.shape(), dtype, [=](const Tensor& y) { linear_attention(steps, steps, steps, y); }});
    all.push_back({"linear_attention_backward", steps.shape(), dtype, [=](const Tensor& y) {
                     const Tensor dk = Tensor::empty(steps.shape(), dtype), dv = Tensor::empty(steps.shape(), dtype);
                     linear_attention_backward(steps, steps, steps, steps, y, dk, dv);
                   }});
    const Tensor sizes = random_values({1, 70, 2}, dtype), rates = random_values({2}, DType::f32);
    all.push_back({"mamba2", steps.shape(), dtype, [=](const Tensor& y) {
                     mamba2(steps, sizes, rates, steps, steps, y, {.d = &rates, .z = &steps, .dt_softplus = true});
                   }});
    all.push_back({"mamba2_step", steps.shape(), dtype, [=](const Tensor& y) {
                     const Tensor states = Tensor::zeros({1, 2, 200, 200}, dtype);
                     mamba2_step(steps, sizes, rates, steps, steps, states, y, {.z = &steps, .dt_softplus = true});
                   }});
    all.push_back({"mamba2_backward", steps.shape(), dtype, [=](const Tensor& dx) {
                     const Tensor d_sizes = Tensor::empty(sizes.shape(), dtype), dz = Tensor::empty(steps.shape(), dtype);
                     const Tensor db = Tensor::empty(steps.shape(), dtype), dc = Tensor::empty(steps.shape(), dtype);
                     const Tensor da = Tensor::empty({2}, DType::f32), dd = Tensor::empty({2}, DType::f32);
                     mamba2_backward(steps, sizes, rates, steps, steps, steps, dx, d_sizes, db, dc,
                                     {.d = &rates, .z = &steps, .dt_softplus = true, .da = &da, .dd = &dd, .dz = &dz});
                   }});
    if (dtype != DType::f32) {
      all.push_back(
          {"mamba2 in five steps", steps.shape(), dtype, [=](const Tensor& y) {
             const Tensor sums = Tensor::empty({1, 2, 1, 256}, DType::f32), of_steps = Tensor::empty({1, 2, 1, 256}, DType::f32);
             const Tensor added = Tensor::empty({1, 1, 2, 200, 200}, DType::f32), states = Tensor::empty({1, 1, 2, 200, 200}, dtype);
             const Tensor cb = Tensor::empty({1, 1, 2, 256, 256}, DType::f32);
             mamba2_chunk_cumsum(sizes, rates, sums, of_steps, {.dt_softplus = true});
             mamba2_chunk_state(steps, steps, of_steps, sums, added);
             mamba2_state_passing(added, sums.select(3, 255), states);
             mamba2_bmm_chunk(steps, steps, cb);
             mamba2_chunk_scan(cb, steps, of_steps, sums, steps, states, y, {.d = &rates, .z = &steps});
           }});
      all.push_back({"the gradients of mamba2 in five steps", steps.shape(), dtype, [=](const Tensor& dx) {
                       const Shape of_steps{1, 2, 1, 256}, of_states{1, 1, 2, 200, 200}, of_products{1, 1, 2, 256, 256};
                       const Tensor given = random_values(of_steps, DType::f32), states = random_values(of_states, dtype);
                       const Tensor d_states = random_values(of_states, DType::f32), cb = random_values(of_products, DType::f32);
                       const Tensor d_steps = Tensor::empty(of_steps, DType::f32), d_sums = Tensor::empty(of_steps, DType::f32);
                       const Tensor d_added = Tensor::empty(of_states, DType::f32), d_cb = Tensor::empty(of_products, DType::f32);
                       const Tensor d_decays = Tensor::empty({1, 2, 1}, DType::f32), da = Tensor::empty({2}, DType::f32);
                       const Tensor db = Tensor::empty(steps.shape(), dtype), dc = Tensor::empty(steps.shape(), dtype);
                       const Tensor dz = Tensor::empty(steps.shape(), dtype), d_sizes = Tensor::empty(sizes.shape(), sizes.dtype());
                       mamba2_chunk_scan_backward(cb, steps, given, given, steps, states, steps, d_cb, dx, d_steps, d_sums, dc, d_added,
                                                  {.d = &rates, .z = &steps, .ungated = &steps, .dd = &da, .dz = &dz});
                       mamba2_bmm_chunk_backward(steps, steps, cb, dc, db);
                       mamba2_state_passing_backward(states, given.select(3, 255), d_states, d_added, d_decays);
                       mamba2_chunk_state_backward(steps, steps, given, given, d_states, db, dx, d_steps, d_sums);
                       mamba2_chunk_cumsum_backward(sizes, rates, given, given, d_sizes, {.dt_softplus = true, .da = &da});
                     }});
    }
    const Tensor heads = random_values({1, 30, 20, 128}, dtype), angles = random_values({30, 64}, dtype);
    all.push_back({"rope", heads.shape(), dtype, [=](const Tensor& y) { rope(heads, angles, angles, y); }});
    all.push_back({"rope interleaved", heads.shape(), dtype,
                   [=](const Tensor& y) { rope(heads, angles, angles, y, {.pairing = RopePairing::interleaved}); }});
    const Tensor series = random_values({1, 90, 700}, dtype), filter = random_values({700, 4}, dtype);
    all.push_back({"causal_conv1d", series.shape(), dtype, [=](const Tensor& y) { causal_conv1d(series, filter, y, {.silu = true}); }});
    all.push_back({"causal_conv1d_backward", series.shape(), dtype, [=](const Tensor& dx) {
                     const Tensor d_weight = Tensor::empty(filter.shape(), dtype);
                     causal_conv1d_backward(series, series, filter, dx, {.silu = true, .d_weight = &d_weight});
                   }});
    for (const std::int64_t dim : {64, 128, 256}) {
      const Tensor q = random_values({1, 90, 2, dim}, dtype), betas = random_values({1, 90, 2}, dtype);
      const Tensor gates = Tensor::zeros(q.shape(), DType::f32);
      if (dim <= 128) {
        all.push_back({"gated_delta_rule with gates of channels", q.shape(), dtype,
                       [=](const Tensor& o) { gated_delta_rule(q, q, q, betas, o, {.g = &gates, .normalise_qk = true}); }});
        all.push_back({"gated_delta_rule_backward with gates of channels", q.shape(), dtype, [=](const Tensor& dq) {
                         const Tensor dk = Tensor::empty(q.shape(), dtype), dv = Tensor::empty(q.shape(), dtype);
                         gated_delta_rule_backward(q, q, q, betas, q, dq, dk, dv, Tensor::empty(betas.shape(), dtype),
                                                   {.g = &gates, .normalise_qk = true});
                       }});
      }
      all.push_back(
          {"gated_delta_rule", q.shape(), dtype, [=](const Tensor& o) { gated_delta_rule(q, q, q, betas, o, {.normalise_qk = true}); }});
      all.push_back({"gated_delta_rule_backward", q.shape(), dtype, [=](const Tensor& dq) {
                       const Tensor dk = Tensor::empty(q.shape(), dtype), dv = Tensor::empty(q.shape(), dtype);
                       gated_delta_rule_backward(q, q, q, betas, q, dq, dk, dv, Tensor::empty(betas.shape(), dtype),
                                                 {.normalise_qk = true});
                     }});
      all.push_back({"gated_delta_rule_step", q.shape(), dtype, [=](const Tensor& o) {
                       const Tensor state = Tensor::zeros({1, 2, dim, dim}, DType::f32);
                       gated_delta_rule_step(q, q, q, betas, state, o, {.normalise_qk = true});
                     }});
    }
    all.push_back({"rope_table", {300, 64}, dtype, [=](const Tensor& y) { rope_table(y, Tensor::empty({300, 64}, dtype)); }});
  }
  const Tensor a = random_values({300, 300}, DType::fp8_e4m3), b = random_values({300, 600}, DType::fp8_e4m3);
  const Tensor a_scale = random_values({300, 3}, DType::f32), b_scale = random_values({3, 5}, DType::f32);
  all.push_back({"gemm of fp8", {300, 600}, DType::bf16, [=](const Tensor& y) { gemm(a, b, y); }});
  all.push_back({"gemm with block scales", {300, 600}, DType::bf16, [=](const Tensor& y) {
                   gemm(a, b, y, {.a_scale = &a_scale, .b_scale = &b_scale});
                 }});
  const Tensor i = random_values({300, 300}, DType::i8), j = random_values({300, 600}, DType::i8);
  all.push_back({"gemm of i8", {300, 600}, DType::i32, [=](const Tensor& y) { gemm(i, j, y); }});
  return all;
}

TEST(SmallStack, EveryOperationRunsOn256KiB) {
  const std::vector<StackCase> all = stack_cases();
  const int before = cpu_threads();
  for (const int threads : {1, 2}) {
    set_cpu_threads(threads);
    for (const StackCase& each : all) {
      SCOPED_TRACE(each.name);
      const Tensor expected = Tensor::poisoned(each.shape, each.dtype), y = Tensor::poisoned(each.shape, each.dtype);
      in_thread(std::size_t{16} << 20, [&] { each.run(expected); });
      in_thread(std::size_t{256} << 10, [&] { each.run(y); });
      const auto bytes = static_cast<std::size_t>(y.numel()) * size_of(y.dtype());
      EXPECT_EQ(std::memcmp(y.data(), expected.data(), bytes), 0);
      if (HasFatalFailure()) break;
    }
  }
  set_cpu_threads(before);
}

TEST(SmallStack, CallerOnlyWaits) {
  const int before = cpu_threads();
  for (const int threads : {1, 3}) {
    set_cpu_threads(threads);
    std::mutex mutex;
    std::set<std::thread::id> workers;
    std::thread::id caller;
    std::vector<std::atomic<int>> hits(500);
    in_thread(std::size_t{128} << 10, [&] {
      caller = std::this_thread::get_id();
      for (int round = 0; round < 20; ++round) {
        detail::parallel_for(500, [&](long i) {
          ++hits[static_cast<std::size_t>(i)];
          const std::lock_guard lock(mutex);
          workers.insert(std::this_thread::get_id());
        });
      }
    });
    EXPECT_FALSE(workers.contains(caller));
    for (const std::atomic<int>& hit : hits) EXPECT_EQ(hit, 20);
    expect_error<InvalidArgument>(
        [] {
          in_thread(std::size_t{128} << 10, [] {
            detail::parallel_for(100, [](long i) {
              if (i >= 7) throw InvalidArgument(std::to_string(i));
            });
          });
        },
        {"7"});
  }
  set_cpu_threads(before);
}

TEST(SmallStack, ManyCallersAtOnce) {
  std::atomic<long> sum = 0;
  std::vector<std::thread> callers;
  for (int n = 0; n < 6; ++n) {
    callers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        const auto work = [&] { detail::parallel_for(50, [&](long i) { sum += i; }); };
        in_thread(std::size_t{128} << 10, work);
        work();  // these have stack enough
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 6 * 20 * 2 * (49 * 50 / 2));
}

}  // namespace
}  // namespace tw::test
