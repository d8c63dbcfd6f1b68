// `tilewave bench dequant_gemm`: products with weights in fewer bits, against a read of the same bytes.

#include "benchmarks/memory_bound.hpp"
#include "tilewave/quantized.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::bench;

MemoryOp product_op(std::string name, std::int64_t m, const QuantizedMatrix::Layout& layout) {
  const auto prepare = [=](std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream) -> MemoryOp::Prepared {
    const std::int64_t whole = std::max<std::int64_t>(128, cols / 128 * 128);  // every group
    const QuantizedMatrix w = quantize(Tensor::random({rows, whole}, DType::f32, 1), layout).to(stream.device());
    const Tensor x = random_normal({m, whole}, dtype, stream.device(), 2), y = Tensor::poisoned({m, rows}, dtype, stream);
    return {static_cast<double>(w.bytes()), [=] { tw::dequant_gemm(x, w, y, {.stream = stream}); }};
  };
  return {.name = std::move(name), .dtypes = {DType::bf16}, .prepare = prepare, .yardstick = Yardstick::read};
}

const Family family{"dequant_gemm", "x W^T with W in int8, fp8 and int4, 1 and 8 rows of x: a read of W's bytes", [](Run& run) {
                      std::vector<MemoryOp> ops;
                      for (const std::int64_t m : {1, 8}) {
                        const auto add = [&](const char* format, const QuantizedMatrix::Layout& layout) {
                          ops.push_back(product_op(std::string(format) + "-m" + std::to_string(m), m, layout));
                        };
                        add("int8", {WeightFormat::int8});
                        add("fp8", {WeightFormat::fp8});
                        add("int4-32", {WeightFormat::int4, 32});
                        add("int4-128", {WeightFormat::int4, 128});
                      }
                      run_memory_ops(run, "dequant_gemm", ops);
                    }};

}  // namespace
}  // namespace tw::kernels::dequant_gemm
