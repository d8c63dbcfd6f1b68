#ifndef TILEWAVE_H
#define TILEWAVE_H

/* The C interface. Functions return a status; the message of the last failure on this thread is tw_last_error(). Sizes count elements. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  TW_OK = 0,
  TW_INVALID_ARGUMENT = 1,
  TW_OUT_OF_MEMORY = 2,
  TW_DEVICE_ERROR = 3,
  TW_COMPILE_ERROR = 4,
  TW_FAILURE = 5,
  TW_FILE_ERROR = 6
} tw_status;

typedef enum { TW_F32 = 0, TW_F16 = 1, TW_BF16 = 2 } tw_dtype;

/* A strided tensor on the CPU (cuda_device < 0) or on a GPU. Strides count elements. */
typedef struct {
  void* data;
  tw_dtype dtype;
  int32_t cuda_device;
  int32_t rank; /* 1 to 4 */
  int64_t shape[4];
  int64_t strides[4];
} tw_tensor;

/* "" when nothing failed yet. Valid until the next call on this thread. */
const char* tw_last_error(void);

/* tw::gemm with default options: d = a b. See tilewave/gemm.hpp. `cuda_stream`: a CUstream, or null for the legacy default stream; ignored
 * on the CPU. */
tw_status tw_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* d, void* cuda_stream);

/* tw::attention: see tilewave/attention.hpp. scale 0: 1 / sqrt(head_dim). causal: 0 or 1, the last query sees every key. lse may be null.
 */
tw_status tw_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse, float scale,
                       int32_t causal, void* cuda_stream);

#ifdef __cplusplus
}
#endif

#endif /* TILEWAVE_H */
