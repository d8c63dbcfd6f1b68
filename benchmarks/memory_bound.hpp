#pragma once

// Ops that do little with what they read and write: at large sizes they are held against a copy of the same bytes, at the sizes of one
// model's layer against a launch that does nothing and the time of their bytes.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "benchmarks/harness.hpp"

namespace tw::bench {

/// What an op at a large size is held against.
enum class Yardstick {
  copy,  ///< a copy that moves as many bytes
  read   ///< a kernel that reads as many bytes: for ops that write next to nothing
};

/// One op at one size, ready to run.
struct MemoryCase {
  std::string family;
  std::string case_name;
  DType dtype = DType::f32;
  double bytes = 0;              ///< read plus written by one launch, each tensor counted once
  std::function<void()> launch;  ///< enqueues one execution on the run's stream; always into the same output
  std::string variant;           ///< of ours, for people; may be empty
  Yardstick yardstick = Yardstick::copy;
};

/// Adds a record in GB/s whose peer is "copy" or "read", the yardstick for as many bytes measured in turn with the op, on a GPU hot, on the
/// CPU with one thread each. Copies are on a GPU the driver's or a kernel of ours, whichever is faster, on the CPU memcpy. The bytes should
/// be far more than a cache holds: nothing is done to clear it.
void run_bandwidth(Run& run, const MemoryCase& c);

/// Adds a record in microseconds whose peer is an empty kernel, measured in turn with the op, and whose limit is the empty kernel's time
/// plus that of the op's bytes at the bandwidth of a large copy. On a GPU both are replayed in graphs; the tensors stay in the L2 cache. On
/// the CPU one thread each.
void run_small(Run& run, const MemoryCase& c);

/// Bytes of the elements of all of them.
double bytes_of(std::initializer_list<Tensor> tensors);

/// An op of a family that works on a matrix.
struct MemoryOp {
  /// What one launch does, on tensors that it owns.
  struct Prepared {
    double bytes = 0;              ///< read plus written, each tensor counted once
    std::function<void()> launch;  ///< enqueues one execution
  };
  std::string name;
  std::vector<DType> dtypes = {DType::bf16, DType::f32};  ///< small sizes: the first one only
  std::function<Prepared(std::int64_t rows, std::int64_t cols, DType dtype, const Stream& stream)> prepare;
  Yardstick yardstick = Yardstick::copy;
};

/// y = f(x) with one matrix in and one of the same shape and dtype out.
MemoryOp unary_op(std::string name, std::vector<DType> dtypes, void (*f)(const Tensor& x, const Tensor& y, const Stream& stream));

/// Every op as "name-ROWSxCOLS": on a GPU by run_bandwidth() at 32768x4096, 8192x16384 and 131072x1280 and by run_small() at the sizes of
/// GLM-ASR's layers, 1500x1280, 375x2048 and 1x2048; on the CPU by run_bandwidth() at rows of 4096 and 64 MB for each matrix.
void run_memory_ops(Run& run, const std::string& family, const std::vector<MemoryOp>& ops);

}  // namespace tw::bench
