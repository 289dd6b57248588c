// Tensor-core products of a warp, 16 rows of the weight by 8 tokens, and the loads of their operands
// from shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace k3cupy {

// Four 8 x 8 matrices of 16-bit values; lane i names the row that it supplies (16 bytes).
__device__ __forceinline__ void load_matrices(unsigned int (&matrix)[4], unsigned int row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row_address)
               : "memory");
}

// The same four matrices, each transposed.
__device__ __forceinline__ void load_matrices_transposed(unsigned int (&matrix)[4],
                                                         unsigned int row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
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

// The same where tokens are the side of 16: the sums of a lane are those of tokens g and g + 8 for
// rows 2 * (lane % 4) and the next. The last argument names the type of the operands.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned int (&tokens)[4],
                                             unsigned int weights_low, unsigned int weights_high,
                                             __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(tokens[0]), "r"(tokens[1]), "r"(tokens[2]), "r"(tokens[3]), "r"(weights_low),
        "r"(weights_high));
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned int (&tokens)[4],
                                             unsigned int weights_low, unsigned int weights_high,
                                             __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(tokens[0]), "r"(tokens[1]), "r"(tokens[2]), "r"(tokens[3]), "r"(weights_low),
        "r"(weights_high));
}

}  // namespace k3cupy
