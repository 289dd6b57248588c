// Tensor-core products of a warpgroup (wgmma, sm_90a), which read their operands from shared memory.
//
// Four warps, of which the first is a multiple of four, issue them together. They run by themselves:
// operands must stay, and sums are not there, until wait_for_products says so. A lane holds the sums
// that a warp's product gives it, of the warp's 16 rows of the wide side.
#pragma once

namespace k3cupy {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif

// Describes an operand to the tensor cores: rows of 128 bytes (64 values along K), one behind the
// other from a multiple of 1024 bytes, chunks swizzled as `swizzled` does. One more says 16 bytes
// further; 32 bytes further are the next 16 values along K.
constexpr unsigned int kOperandUnit = 16;

__device__ __forceinline__ unsigned long long operand_at(unsigned int address) {
  constexpr unsigned long long kSwizzle128Bytes = 1ull << 62;
  constexpr unsigned long long kBytesOfEightRows = 1024 / kOperandUnit;
  return kSwizzle128Bytes | kBytesOfEightRows << 32 | 1ull << 16 |
         (address & 0x3ffff) / kOperandUnit;
}

// What other threads have written into shared memory, and this one has seen arrive, will be seen by
// products too.
__device__ __forceinline__ void show_to_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Before the first product, and whenever other code has touched the sums.
__device__ __forceinline__ void begin_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Those since the last call become a group.
__device__ __forceinline__ void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Returns when all groups but the last kPending are done.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Keeps the compiler from moving a use of the sums to before this place.
template <int kTiles>
__device__ __forceinline__ void keep_in_order(float (&sum)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    asm volatile("" : "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])::"memory");
  }
}

// sum += wide (64 x 16) * narrow (16 x N), in fp32, for each N that a tile may have. The assembler
// wants every sum named, eight columns of them more from one N to the next.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define K3CUPY_SUM(j) "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
#define K3CUPY_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define K3CUPY_SUMS_16 K3CUPY_SUM(0), K3CUPY_SUM(1)
#define K3CUPY_NAMES_24 K3CUPY_NAMES_16 ", %8, %9, %10, %11"
#define K3CUPY_SUMS_24 K3CUPY_SUMS_16, K3CUPY_SUM(2)
#define K3CUPY_NAMES_32 K3CUPY_NAMES_24 ", %12, %13, %14, %15"
#define K3CUPY_SUMS_32 K3CUPY_SUMS_24, K3CUPY_SUM(3)
#define K3CUPY_NAMES_40 K3CUPY_NAMES_32 ", %16, %17, %18, %19"
#define K3CUPY_SUMS_40 K3CUPY_SUMS_32, K3CUPY_SUM(4)
#define K3CUPY_NAMES_48 K3CUPY_NAMES_40 ", %20, %21, %22, %23"
#define K3CUPY_SUMS_48 K3CUPY_SUMS_40, K3CUPY_SUM(5)
#define K3CUPY_NAMES_56 K3CUPY_NAMES_48 ", %24, %25, %26, %27"
#define K3CUPY_SUMS_56 K3CUPY_SUMS_48, K3CUPY_SUM(6)
#define K3CUPY_NAMES_64 K3CUPY_NAMES_56 ", %28, %29, %30, %31"
#define K3CUPY_SUMS_64 K3CUPY_SUMS_56, K3CUPY_SUM(7)
#define K3CUPY_NAMES_72 K3CUPY_NAMES_64 ", %32, %33, %34, %35"
#define K3CUPY_SUMS_72 K3CUPY_SUMS_64, K3CUPY_SUM(8)
#define K3CUPY_NAMES_80 K3CUPY_NAMES_72 ", %36, %37, %38, %39"
#define K3CUPY_SUMS_80 K3CUPY_SUMS_72, K3CUPY_SUM(9)
#define K3CUPY_NAMES_88 K3CUPY_NAMES_80 ", %40, %41, %42, %43"
#define K3CUPY_SUMS_88 K3CUPY_SUMS_80, K3CUPY_SUM(10)
#define K3CUPY_NAMES_96 K3CUPY_NAMES_88 ", %44, %45, %46, %47"
#define K3CUPY_SUMS_96 K3CUPY_SUMS_88, K3CUPY_SUM(11)
#define K3CUPY_NAMES_104 K3CUPY_NAMES_96 ", %48, %49, %50, %51"
#define K3CUPY_SUMS_104 K3CUPY_SUMS_96, K3CUPY_SUM(12)
#define K3CUPY_NAMES_112 K3CUPY_NAMES_104 ", %52, %53, %54, %55"
#define K3CUPY_SUMS_112 K3CUPY_SUMS_104, K3CUPY_SUM(13)
#define K3CUPY_NAMES_120 K3CUPY_NAMES_112 ", %56, %57, %58, %59"
#define K3CUPY_SUMS_120 K3CUPY_SUMS_112, K3CUPY_SUM(14)
#define K3CUPY_NAMES_128 K3CUPY_NAMES_120 ", %60, %61, %62, %63"
#define K3CUPY_SUMS_128 K3CUPY_SUMS_120, K3CUPY_SUM(15)
#define K3CUPY_PRODUCT(N, WIDE, NARROW)                                                         \
  __device__ __forceinline__ void multiply_add(float (&sum)[N / 8][4], unsigned long long wide, \
                                               unsigned long long narrow) {                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" K3CUPY_NAMES_##N  \
                 "}, %" #WIDE ", %" #NARROW ", 1, 1, 1, 0, 0;"                                  \
                 : K3CUPY_SUMS_##N                                                              \
                 : "l"(wide), "l"(narrow));                                                     \
  }
K3CUPY_PRODUCT(16, 8, 9)
K3CUPY_PRODUCT(24, 12, 13)
K3CUPY_PRODUCT(32, 16, 17)
K3CUPY_PRODUCT(40, 20, 21)
K3CUPY_PRODUCT(48, 24, 25)
K3CUPY_PRODUCT(56, 28, 29)
K3CUPY_PRODUCT(64, 32, 33)
K3CUPY_PRODUCT(72, 36, 37)
K3CUPY_PRODUCT(80, 40, 41)
K3CUPY_PRODUCT(88, 44, 45)
K3CUPY_PRODUCT(96, 48, 49)
K3CUPY_PRODUCT(104, 52, 53)
K3CUPY_PRODUCT(112, 56, 57)
K3CUPY_PRODUCT(120, 60, 61)
K3CUPY_PRODUCT(128, 64, 65)
#else
template <int kTiles>
__device__ __forceinline__ void multiply_add(float (&)[kTiles][4], unsigned long long,
                                             unsigned long long) {}
#endif

}  // namespace k3cupy
