// Holds our declarations of the CUDA driver and of NVRTC against NVIDIA's headers, on machines that have them.

#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "runtime/cuda_driver.hpp"
#include "runtime/nvrtc.hpp"

#if __has_include(<cuda.h>) && __has_include(<nvrtc.h>)
#include <cuda.h>
#include <nvrtc.h>
#define TILEWAVE_HAVE_CUDA_HEADERS 1
#elif __has_include("/usr/local/cuda/include/cuda.h") && __has_include("/usr/local/cuda/include/nvrtc.h")
#include "/usr/local/cuda/include/cuda.h"
#include "/usr/local/cuda/include/nvrtc.h"
#define TILEWAVE_HAVE_CUDA_HEADERS 1
#endif

namespace {

#ifndef TILEWAVE_HAVE_CUDA_HEADERS

TEST(CudaDeclarations, AgreeWithTheHeaders) { GTEST_SKIP() << "skipped: no cuda.h"; }

#else

template <class T>
concept complete = requires {
  sizeof(T);
};

/// Whether arguments of the two types are passed alike: numbers of one size and signedness, enumerations of one size, pointers to such, and
/// pointers to structures of one size and alignment, or of unknown size.
template <class A, class B>
constexpr bool same_abi() {
  if constexpr (std::is_same_v<A, B>) {
    return true;
  } else if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>) {
    using X = std::remove_pointer_t<A>;
    using Y = std::remove_pointer_t<B>;
    return std::is_const_v<X> == std::is_const_v<Y> && same_abi<std::remove_cv_t<X>, std::remove_cv_t<Y> >();
  } else if constexpr (std::is_enum_v<A> && std::is_enum_v<B>) {
    return sizeof(A) == sizeof(B);
  } else if constexpr (std::is_integral_v<A> && std::is_integral_v<B>) {
    return sizeof(A) == sizeof(B) && std::is_signed_v<A> == std::is_signed_v<B>;
  } else if constexpr (std::is_class_v<A> && std::is_class_v<B>) {
    if constexpr (complete<A> && complete<B>) {
      return sizeof(A) == sizeof(B) && alignof(A) >= alignof(B);
    } else {
      return !complete<A> && !complete<B>;
    }
  } else {
    return false;
  }
}

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class R, class... A, class S, class... B>
struct SameCall<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return same_abi<R, S>() && (same_abi<A, B>() && ...);
    } else {
      return false;
    }
  }();
};

TEST(CudaDeclarations, CallsAgreeWithTheHeaders) {
#define TILEWAVE_CHECK_CALL(name, symbol, parameters) \
  EXPECT_TRUE((SameCall<decltype(tw::cuda::Driver::name), decltype(&::symbol)>::value)) << #symbol;
  TILEWAVE_CUDA_CALLS(TILEWAVE_CHECK_CALL)
#undef TILEWAVE_CHECK_CALL
#define TILEWAVE_CHECK_CALL(name, symbol, parameters) \
  EXPECT_TRUE((SameCall<decltype(tw::NvrtcCalls::name), decltype(&::symbol)>::value)) << #symbol;
  TILEWAVE_NVRTC_CALLS(TILEWAVE_CHECK_CALL)
#undef TILEWAVE_CHECK_CALL
  EXPECT_TRUE((SameCall<decltype(tw::NvrtcCalls::get_error_string), decltype(&::nvrtcGetErrorString)>::value));
}

// The test itself would say yes to anything if the comparison did.
TEST(CudaDeclarations, ComparisonTellsDifferentCallsApart) {
  EXPECT_FALSE((SameCall<int (*)(int), int (*)(unsigned)>::value));
  EXPECT_FALSE((SameCall<int (*)(int), int (*)(long)>::value));
  EXPECT_FALSE((SameCall<int (*)(int), int (*)(int, int)>::value));
  EXPECT_FALSE((SameCall<int (*)(int*), int (*)(const int*)>::value));
  EXPECT_FALSE((SameCall<int (*)(int*), int (*)(int**)>::value));
  EXPECT_TRUE((SameCall<int (*)(unsigned long), int (*)(unsigned long long)>::value));
}

template <class Ours, class Theirs>
void expect_value(Ours ours, Theirs theirs, const char* name) {
  EXPECT_EQ(static_cast<long long>(ours), static_cast<long long>(theirs)) << name;
}

#define EXPECT_VALUE(ours, theirs) expect_value(ours, theirs, #theirs)

TEST(CudaDeclarations, ValuesAgreeWithTheHeader) {
  using namespace tw::cuda;
  EXPECT_VALUE(Result::success, CUDA_SUCCESS);
  EXPECT_VALUE(Result::invalid_value, CUDA_ERROR_INVALID_VALUE);
  EXPECT_VALUE(Result::out_of_memory, CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_VALUE(Result::not_initialized, CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_VALUE(Result::deinitialized, CUDA_ERROR_DEINITIALIZED);
  EXPECT_VALUE(Result::stub_library, CUDA_ERROR_STUB_LIBRARY);
  EXPECT_VALUE(Result::device_unavailable, CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_VALUE(Result::no_device, CUDA_ERROR_NO_DEVICE);
  EXPECT_VALUE(Result::invalid_device, CUDA_ERROR_INVALID_DEVICE);
  EXPECT_VALUE(Result::invalid_image, CUDA_ERROR_INVALID_IMAGE);
  EXPECT_VALUE(Result::invalid_context, CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_VALUE(Result::no_binary_for_gpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_VALUE(Result::invalid_ptx, CUDA_ERROR_INVALID_PTX);
  EXPECT_VALUE(Result::unsupported_ptx_version, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
  EXPECT_VALUE(Result::not_found, CUDA_ERROR_NOT_FOUND);
  EXPECT_VALUE(Result::not_ready, CUDA_ERROR_NOT_READY);
  EXPECT_VALUE(Result::not_supported, CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_VALUE(Result::unknown, CUDA_ERROR_UNKNOWN);

  EXPECT_VALUE(DeviceAttribute::multiprocessor_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  EXPECT_VALUE(DeviceAttribute::l2_cache_size, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  EXPECT_VALUE(DeviceAttribute::compute_capability_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  EXPECT_VALUE(DeviceAttribute::compute_capability_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  EXPECT_VALUE(DeviceAttribute::max_shared_memory_per_block_optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  EXPECT_VALUE(DeviceAttribute::memory_pools_supported, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);

  EXPECT_VALUE(FunctionAttribute::shared_size_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
  EXPECT_VALUE(FunctionAttribute::local_size_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
  EXPECT_VALUE(FunctionAttribute::num_regs, CU_FUNC_ATTRIBUTE_NUM_REGS);
  EXPECT_VALUE(FunctionAttribute::max_dynamic_shared_size_bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

  EXPECT_VALUE(PoolAttribute::release_threshold, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
  EXPECT_VALUE(PoolAttribute::reserved_mem_current, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
  EXPECT_VALUE(PoolAttribute::used_mem_current, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
  EXPECT_VALUE(MemoryLocation{}.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_VALUE(PoolProperties{}.allocation_type, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_VALUE(PoolProperties{}.handle_types, CU_MEM_HANDLE_TYPE_NONE);

  EXPECT_VALUE(CaptureMode::global, CU_STREAM_CAPTURE_MODE_GLOBAL);
  EXPECT_VALUE(CaptureMode::thread_local_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  EXPECT_VALUE(CaptureMode::relaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_VALUE(CaptureStatus::none, CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_VALUE(CaptureStatus::active, CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_VALUE(CaptureStatus::invalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
  EXPECT_VALUE(kEventDefault, CU_EVENT_DEFAULT);

  EXPECT_VALUE(TensorMapType::u8, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  EXPECT_VALUE(TensorMapType::f16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
  EXPECT_VALUE(TensorMapType::f32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
  EXPECT_VALUE(TensorMapType::bf16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  EXPECT_VALUE(TensorMapInterleave::none, CU_TENSOR_MAP_INTERLEAVE_NONE);
  EXPECT_VALUE(TensorMapSwizzle::none, CU_TENSOR_MAP_SWIZZLE_NONE);
  EXPECT_VALUE(TensorMapSwizzle::bytes32, CU_TENSOR_MAP_SWIZZLE_32B);
  EXPECT_VALUE(TensorMapSwizzle::bytes64, CU_TENSOR_MAP_SWIZZLE_64B);
  EXPECT_VALUE(TensorMapSwizzle::bytes128, CU_TENSOR_MAP_SWIZZLE_128B);
  EXPECT_VALUE(TensorMapPromotion::none, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  EXPECT_VALUE(TensorMapPromotion::bytes256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  EXPECT_VALUE(TensorMapFill::zeros, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);

  EXPECT_VALUE(tw::NvrtcResult::success, NVRTC_SUCCESS);
  EXPECT_VALUE(tw::NvrtcResult::invalid_option, NVRTC_ERROR_INVALID_OPTION);
  EXPECT_VALUE(tw::NvrtcResult::compilation, NVRTC_ERROR_COMPILATION);
}

TEST(CudaDeclarations, StructuresAgreeWithTheHeader) {
  using namespace tw::cuda;
  EXPECT_EQ(sizeof(TensorMap), sizeof(CUtensorMap));
  EXPECT_GE(alignof(TensorMap), alignof(CUtensorMap));

  EXPECT_EQ(sizeof(MemoryLocation), sizeof(CUmemLocation));
  EXPECT_EQ(offsetof(MemoryLocation, id), offsetof(CUmemLocation, id));
  EXPECT_EQ(sizeof(PoolProperties), sizeof(CUmemPoolProps));
  EXPECT_EQ(offsetof(PoolProperties, handle_types), offsetof(CUmemPoolProps, handleTypes));
  EXPECT_EQ(offsetof(PoolProperties, location), offsetof(CUmemPoolProps, location));
  EXPECT_EQ(offsetof(PoolProperties, win32_security_attributes), offsetof(CUmemPoolProps, win32SecurityAttributes));
  EXPECT_EQ(offsetof(PoolProperties, max_size), offsetof(CUmemPoolProps, maxSize));
  EXPECT_EQ(offsetof(PoolProperties, usage), offsetof(CUmemPoolProps, usage));

  EXPECT_EQ(sizeof(LaunchConfig), sizeof(CUlaunchConfig));
  EXPECT_EQ(offsetof(LaunchConfig, grid_x), offsetof(CUlaunchConfig, gridDimX));
  EXPECT_EQ(offsetof(LaunchConfig, block_x), offsetof(CUlaunchConfig, blockDimX));
  EXPECT_EQ(offsetof(LaunchConfig, shared_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
  EXPECT_EQ(offsetof(LaunchConfig, stream), offsetof(CUlaunchConfig, hStream));
  EXPECT_EQ(offsetof(LaunchConfig, attributes), offsetof(CUlaunchConfig, attrs));
  EXPECT_EQ(offsetof(LaunchConfig, attribute_count), offsetof(CUlaunchConfig, numAttrs));
  EXPECT_EQ(sizeof(LaunchAttribute), sizeof(CUlaunchAttribute));
  EXPECT_EQ(offsetof(LaunchAttribute, id), offsetof(CUlaunchAttribute, id));
  EXPECT_EQ(offsetof(LaunchAttribute, value), offsetof(CUlaunchAttribute, value));
  EXPECT_EQ(offsetof(CUlaunchAttributeValue, programmaticStreamSerializationAllowed), 0u);
  EXPECT_EQ(LaunchAttribute::overlap().id, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
  EXPECT_EQ(offsetof(CUlaunchAttributeValue, clusterDim.x), 0u);
  EXPECT_EQ(offsetof(CUlaunchAttributeValue, clusterDim.z), 2 * sizeof(unsigned));
  EXPECT_EQ(LaunchAttribute::cluster(2).id, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
}

#endif

}  // namespace
