#pragma once

// What a device does at best, to hold an op against whose time is the memory's or the launch's: a copy, a read, an empty kernel.

#include <cstdint>
#include <vector>

#include "benchmarks/harness.hpp"
#include "tilewave/tensor.hpp"

namespace tw::bench {

/// Copies half of `bytes` from one place to another: `bytes` are moved, as by an op that reads and writes them. The memory holds random
/// numbers, because a card that moves constants draws less power and runs faster.
class CopyYardstick {
 public:
  CopyYardstick(double bytes, const Stream& stream);

  /// Bytes read plus bytes written by one copy: `bytes`, rounded up to whole rows of 2 KB.
  double bytes() const { return bytes_; }
  /// To be measured along with the op. On a GPU the driver's copy and a kernel of ours: whichever is faster is the yardstick. On the CPU
  /// memcpy in the calling thread. They refer to this object.
  std::vector<Contender> contenders() const;

 private:
  Stream stream_;
  Tensor from_, to_;  ///< [rows, 512] of f32
  double bytes_;
};

/// Reads `bytes` once: on a GPU a kernel that adds them up and writes one number for every 2 KB, on the CPU a loop in the calling thread.
class ReadYardstick {
 public:
  ReadYardstick(double bytes, const Stream& stream);

  /// Bytes read: `bytes`, rounded up to whole rows of 2 KB.
  double bytes() const { return bytes_; }
  /// To be measured along with the op. It refers to this object.
  Contender contender() const;

 private:
  Stream stream_;
  Tensor from_, sums_;  ///< [rows, 512] of f32; room for a number for each row, and no less than 8 bytes
  double bytes_;
};

/// Launches of a kernel of one block that does nothing.
Contender empty_kernel(const Stream& stream);

}  // namespace tw::bench
