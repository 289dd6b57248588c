// What our kernel is compared with: a kernel of ours in the structure of the public decode epilogue
// (vLLM's, whose facts these are; no line of it): blocks of 256 threads, kSplit warps a row, the heads
// of a token and then its cache row, slot and scales read before the dependency wait, cache warps that
// skip the wait, and the completion trigger behind the block's last store. No RoPE, aligned rows, 64-bit slots: only for the benchmark.

#include "common/chunk.cuh"
#include "common/fp8.cuh"
#include "common/pdl.cuh"
#include "mla/latent_row.cuh"

namespace k3cupy {

// All loads before the first store, which is what the compiler makes of the public loop.
template <typename T, bool kFp8, int kSplit>
__device__ __forceinline__ void copy_row(char* target, const T* nope, const T* rope, int first,
                                         float scale_inv) {
  constexpr int kStep = kSplit * 32;
  constexpr int kCount = (kRowChunks + kStep - 1) / kStep;
  Chunk chunk[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = first + i * kStep;
    if (c < kRowChunks) {
      chunk[i] = *reinterpret_cast<const Chunk*>(
          c < kNopeChunks ? nope + c * kChunkElements : rope + (c - kNopeChunks) * kChunkElements);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = first + i * kStep;
    if (c >= kRowChunks) continue;
    if constexpr (kFp8) {
      float value[kChunkElements];
      widen<T>(chunk[i], value);
      store_codes<true>(target + c * kChunkElements, to_e4m3(value, scale_inv));
    } else {
      store_chunk<true>(target + c * kChunkBytes, chunk[i]);
    }
  }
}

template <typename T, bool kQueryFp8, bool kCacheFp8, int kSplit>
__global__ void public_structure(
    const T* ql_nope, long long ql_nope_token_stride, long long ql_nope_head_stride, const T* q_pe,
    long long q_pe_token_stride, long long q_pe_head_stride, const T* kv_c, long long kv_c_stride,
    const T* k_pe, long long k_pe_stride, char* mqa_q, char* kv_cache, long long cache_block_stride,
    long long cache_token_stride, const long long* slot_mapping, const float* q_scale_inv,
    const float* cache_scale_inv, int num_tokens, int num_heads, int block_size) {
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int row = warp / kSplit;
  const int rows_per_token = num_heads + 1;
  const int token = row / rows_per_token;
  const int head = row % rows_per_token;
  const int first = (warp % kSplit) * 32 + threadIdx.x % 32;
  if (token < num_tokens) {
    if (head < num_heads) {
      const float scale_inv = kQueryFp8 ? *q_scale_inv : 1.0f;
      wait_for_predecessor(ql_nope, q_pe);
      constexpr int kRowBytes = kLatentDim * (kQueryFp8 ? 1 : 2);
      char* target = mqa_q + (static_cast<long long>(token) * num_heads + head) * kRowBytes;
      copy_row<T, kQueryFp8, kSplit>(
          target, ql_nope + token * ql_nope_token_stride + head * ql_nope_head_stride,
          q_pe + token * q_pe_token_stride + head * q_pe_head_stride, first, scale_inv);
    } else {
      const long long slot = slot_mapping[token];
      if (slot >= 0) {
        char* target = kv_cache + (slot / block_size) * cache_block_stride +
                       (slot % block_size) * cache_token_stride;
        copy_row<T, kCacheFp8, kSplit>(target, kv_c + token * kv_c_stride,
                                       k_pe + token * k_pe_stride, first,
                                       kCacheFp8 ? *cache_scale_inv : 1.0f);
      }
    }
  }
  __syncthreads();
  release_dependents();
}

}  // namespace k3cupy
