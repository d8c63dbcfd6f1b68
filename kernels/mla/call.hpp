#pragma once

#include "tilewave/mla.hpp"
#include "tilewave/tensor.hpp"

namespace tw::kernels::mla {

/// The parts of a cache whose rows have 656 bytes, as tensors of the same first two dimensions.
struct Fp8Parts {
  Tensor codes;   ///< e4m3, 512 columns
  Tensor scales;  ///< f32, 4
  Tensor rotary;  ///< of q's dtype, 64

  static Fp8Parts of(const Tensor& kv, DType dtype);
  /// Tensors of one row each in some other tensor's memory, which has as many bytes.
  static Fp8Parts of_memory(const Tensor& memory);
};

/// A checked call whose output has elements. Rows of q and o are the heads of a sequence's tokens.
struct Call {
  Tensor q = {};        ///< [batch, seqlen_q * heads, 576]
  Tensor kv = {};       ///< [batch, capacity, 576] or [pages, page_size, 576]; or bytes, 656
  Tensor o = {};        ///< [batch, seqlen_q * heads, 512], unless the keys are split
  Tensor partial = {};  ///< f32 [splits * batch, heads * seqlen_q, 512], if they are
  float* lse = nullptr;
  int heads = 0, seqlen_q = 0, capacity = 0, splits = 1;
  bool causal = true;
  float scale = 0;
  const std::int32_t* seqlens = nullptr;
  const std::int32_t* pages = nullptr;
  std::int64_t pages_stride = 0;
  const Tensor* indices =
      nullptr;  ///< of mla_sparse(): [batch, capacity], where a sequence is one query; `capacity` and `seqlens` are of the lists
  const float* sink = nullptr;
  float* max_logits = nullptr;
  Stream stream = Stream::standard(Device::cpu());

  int batch() const { return static_cast<int>(q.shape(0)); }
  bool fp8() const { return size_of(kv.dtype()) == 1; }
  int page_size() const { return static_cast<int>(kv.shape(1)); }
};

/// Whether a cache's pages are a whole number of tokens apart, so that tokens of all pages are rows of one matrix.
inline bool tokens_apart(const Tensor& kv) {
  return kv.shape(1) == 1 || (kv.stride(1) > 0 && kv.stride(0) > 0 && kv.stride(0) % kv.stride(1) == 0);
}

void run(const Call& call);

/// What is asked of the splits of a call.
struct Splits {
  int count = 0;                       ///< 0: mla_splits()
  std::int64_t longest = 0;            ///< no sequence has more keys
  const Tensor* lse = nullptr;         ///< f32 [batch, heads, seqlen_q]
  const Tensor* sink = nullptr;        ///< f32 [heads]: not in lse
  const Tensor* max_logits = nullptr;  ///< f32 [batch, heads, seqlen_q]
};
/// Runs a checked call with q [batch, seqlen_q, heads, 576] and o [batch, seqlen_q, heads, 512], and combines the results of splits.
void run_in_splits(Call call, const Tensor& q, const Tensor& o, const Splits& splits);

// Checks that the public functions share. They throw InvalidArgument.

/// Of a sequence: the number of blocks of keys times the number of splits is an int.
inline constexpr std::int64_t kMostTokens = std::int64_t{1} << 27;
inline constexpr int kMostSplits = 128;

/// The last dimension is contiguous, and no extent is too large.
void check_columns(const char* op, const char* name, const Tensor& t);

/// Whether a cache's rows have 656 bytes.
bool is_fp8_cache(const Tensor& kv);

/// What a call's tensors have in common.
struct Common {
  std::int64_t batch;
  DType dtype;
  Device device;
};
/// A cache with its lengths and pages, all that the host knows of it.
struct CacheOf {
  std::int64_t batch = 0;
  int capacity = 0;  ///< tokens of a sequence, at most
  const std::int32_t* seqlens = nullptr;
  const std::int32_t* pages = nullptr;
  std::int64_t pages_stride = 0;
};
/// A cache's dtype, device and columns. `dims`: what messages call its first two dimensions.
void check_rows(const char* op, const char* name, const Tensor& kv, const Common& common, const char* dims);
/// The softmax scale that an option asks for.
float check_scale(const char* op, float scale);
void check_num_splits(const char* op, int num_splits);
CacheOf check_cache(const char* op, const Tensor& kv, const Common& common, const Tensor* seqlens, const Tensor* block_table);
/// Reads lengths, and page numbers of the tokens in use; `added` tokens follow those of seqlens, or begin the cache if it is null.
void check_cache_contents(const char* op, const Tensor& kv, const CacheOf& cache, const Tensor* seqlens, const Tensor* block_table,
                          std::int64_t added);

}  // namespace tw::kernels::mla
