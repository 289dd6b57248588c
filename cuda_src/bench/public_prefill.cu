// What the prefill kernels are compared with: kernels of ours in the structure of the public ones
// (vLLM's, whose facts these are; no line of them): blocks of 256 threads, one warp a row, the rows of
// a token's heads and then its cache row, everything behind the dependency wait, a chunk a lane, and no
// look at other slots. No RoPE, aligned rows, 64-bit slots: only for the benchmark.

#include "common/chunk.cuh"
#include "common/fp8.cuh"
#include "common/pdl.cuh"
#include "mla/latent_copy.cuh"

namespace k3cupy {

constexpr int kNopeOfHead = 128 / kChunkElements;
constexpr int kRopeOfHead = 64 / kChunkElements;

// One chunk a lane, as it is, as a code with a scale, or as a framework casts it.
template <typename T, bool kCodes, bool kScaled>
__device__ __forceinline__ void move_chunk(char* row, int place, const char* source,
                                           const float* scale_inv) {
  const Chunk chunk = *reinterpret_cast<const Chunk*>(source);
  if constexpr (!kCodes) {
    store_chunk<true>(row + place * kChunkBytes, chunk);
  } else if constexpr (!kScaled) {
    store_codes<true>(row + place * kChunkElements, cast_e4m3<T>(chunk));
  } else {
    float value[kChunkElements];
    widen<T>(chunk, value);
    store_codes<true>(row + place * kChunkElements, to_e4m3(value, *scale_inv));
  }
}

// kRows rows a head: k; k and v; k, v and q. kInserts: and a cache row a token.
template <typename T, int kRows, bool kCodes, bool kInserts, CacheFormat kCache>
__global__ void public_prefill(
    const char* k_nope, long long k_nope_token_stride, long long k_nope_head_stride,
    const char* k_pe, long long k_pe_stride, char* k, const char* v, long long v_token_stride,
    long long v_head_stride, char* v8, const char* q, long long q_token_stride,
    long long q_head_stride, char* q8, const char* kv_c, long long kv_c_stride,
    const long long* slot_mapping, char* kv_cache, long long cache_block_stride,
    long long cache_token_stride, const float* k_scale_inv, const float* v_scale_inv,
    const float* q_scale_inv, const float* cache_scale_inv, unsigned int num_tokens,
    unsigned int num_heads, unsigned int block_size) {
  constexpr bool kScaled = kCodes && kInserts;
  constexpr int kBytes = kCodes ? 1 : 2;
  const unsigned int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const unsigned int rows_of_token = num_heads * kRows + (kInserts ? 1 : 0);
  const unsigned int token = warp / rows_of_token;
  const unsigned int row = warp % rows_of_token;
  wait_for_predecessor(nullptr, nullptr);
  if (token < num_tokens) {
    if (kInserts && row == num_heads * kRows) {
      const long long slot = slot_mapping[token];
      if (slot >= 0) {
        const RowChunks map = {token, lane, 32};
        Chunk chunk[kWarpChunks];
        load_row<kCache, true>(chunk, map, kv_c + token * kv_c_stride, k_pe + token * k_pe_stride);
        char* target = kv_cache + (slot / block_size) * cache_block_stride +
                       (slot % block_size) * cache_token_stride;
        const float scale = kCache == CacheFormat::kFp8 ? *cache_scale_inv : 1.0f;
        store_row<T, kCache, false, true>(chunk, map, target, true, scale, nullptr);
      }
    } else {
      const unsigned int head = row / kRows;
      const unsigned int part = row % kRows;
      const long long place = static_cast<long long>(token) * num_heads + head;
      if (part == 1) {
        if (lane < kNopeOfHead) {
          move_chunk<T, kCodes, kScaled>(
              v8 + place * 128 * kBytes, lane,
              v + token * v_token_stride + head * v_head_stride + lane * kChunkBytes, v_scale_inv);
        }
      } else if (lane < kNopeOfHead + kRopeOfHead) {
        const char* source = k_nope + token * k_nope_token_stride + head * k_nope_head_stride;
        if (part == 2) source = q + token * q_token_stride + head * q_head_stride;
        source += lane * kChunkBytes;
        if (part == 0 && lane >= kNopeOfHead) {
          source = k_pe + token * k_pe_stride + (lane - kNopeOfHead) * kChunkBytes;
        }
        move_chunk<T, kCodes, kScaled>((part == 2 ? q8 : k) + place * 192 * kBytes, lane, source,
                                       part == 2 ? q_scale_inv : k_scale_inv);
      }
    }
  }
  __syncthreads();
  release_dependents();
}

}  // namespace k3cupy
