// Tensor-core products of weights and tokens: a warp's, 16 rows by 8 tokens, with the loads of their
// operands from shared memory; and a warpgroup's (sm_90a), 64 rows by all tokens, which read shared
// memory themselves.
#pragma once

namespace k3cupy {

// Four 8 x 8 matrices of 16-bit values; lane i names the row that it supplies (16 bytes).
__device__ __forceinline__ void load_matrices(unsigned int (&matrix)[4], unsigned int row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row_address)
               : "memory");
}

// Two of them: the rows of lanes 0 to 15.
__device__ __forceinline__ void load_matrices(unsigned int (&matrix)[2], unsigned int row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(matrix[0]), "=r"(matrix[1])
               : "r"(row_address)
               : "memory");
}

// sum += weights * tokens, in fp32. A lane holds the sums of rows g and g + 8 (g = lane / 4) for
// tokens 2 * (lane % 4) and the next.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned int (&weights)[4],
                                             unsigned int tokens_low, unsigned int tokens_high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(tokens_low),
        "r"(tokens_high));
}

// --- Products of a warpgroup ---------------------------------------------------------------------
// Four warps, of which the first is a multiple of four, issue them together. They run by themselves:
// operands must stay, and sums are not there, until wait_for_products says so. A lane holds the sums
// that multiply_add above gives it, of the warp's 16 rows.

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

// sum += weights (64 x 16) * tokens (16 x 32), in fp32.
__device__ __forceinline__ void multiply_add(float (&sum)[4][4], unsigned long long weights,
                                             unsigned long long tokens) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, 1, 1, 1, 0, 0;"
      : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]),
        "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]), "+f"(sum[2][0]), "+f"(sum[2][1]),
        "+f"(sum[2][2]), "+f"(sum[2][3]), "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]),
        "+f"(sum[3][3])
      : "l"(weights), "l"(tokens));
#endif
}

// sum += weights (64 x 16) * tokens (16 x 64), in fp32.
__device__ __forceinline__ void multiply_add(float (&sum)[8][4], unsigned long long weights,
                                             unsigned long long tokens) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, 1, 1, 1, 0, 0;"
      : "+f"(sum[0][0]), "+f"(sum[0][1]), "+f"(sum[0][2]), "+f"(sum[0][3]), "+f"(sum[1][0]),
        "+f"(sum[1][1]), "+f"(sum[1][2]), "+f"(sum[1][3]), "+f"(sum[2][0]), "+f"(sum[2][1]),
        "+f"(sum[2][2]), "+f"(sum[2][3]), "+f"(sum[3][0]), "+f"(sum[3][1]), "+f"(sum[3][2]),
        "+f"(sum[3][3]), "+f"(sum[4][0]), "+f"(sum[4][1]), "+f"(sum[4][2]), "+f"(sum[4][3]),
        "+f"(sum[5][0]), "+f"(sum[5][1]), "+f"(sum[5][2]), "+f"(sum[5][3]), "+f"(sum[6][0]),
        "+f"(sum[6][1]), "+f"(sum[6][2]), "+f"(sum[6][3]), "+f"(sum[7][0]), "+f"(sum[7][1]),
        "+f"(sum[7][2]), "+f"(sum[7][3])
      : "l"(weights), "l"(tokens));
#endif
}

}  // namespace k3cupy
