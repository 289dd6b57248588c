// What our kernel is compared with beside public_structure.cu: a kernel of ours in the structure of
// SGLang's decode epilogue (`set_mla_kv_concat_q`, whose facts these are; no line of it): one warp a
// row, the cache rows before the query rows, everything behind the dependency wait, and the trigger by
// each warp after its own stores, which leaves the stores of the block's other warps to the consumer's
// wait. 16-bit rows are copied by 16 bytes a lane and 4 in the RoPE part. Codes are cast without a
// scale, 16 values of a lane into one store, and a cache row of codes leaves shared memory by one bulk
// copy. No RoPE, no padding, aligned rows, 64-bit slots: only for the benchmark.

#include "common/chunk.cuh"
#include "common/fp8.cuh"
#include "common/pdl.cuh"
#include "mla/latent_row.cuh"

namespace k3cupy {

// `codes` is where the 512-wide part of a row goes as e4m3, 64 codes of the RoPE part behind it.
template <typename T>
__device__ __forceinline__ void cast_row(char* codes, const char* nope, const char* rope,
                                         int lane) {
  const uint4* source = reinterpret_cast<const uint4*>(nope) + 2 * lane;
  uint2 half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 v = source[i];
    float value[kChunkElements];
    widen<T>(Chunk{{v.x, v.y, v.z, v.w}}, value);
    half[i] = to_e4m3(value, 1.0f);
  }
  float low;
  float high;
  widen_pair(reinterpret_cast<const unsigned int*>(rope)[lane], low, high, T{});
  reinterpret_cast<uint4*>(codes)[lane] = make_uint4(half[0].x, half[0].y, half[1].x, half[1].y);
  reinterpret_cast<unsigned short*>(codes + kLoraRank)[lane] =
      static_cast<unsigned short>(to_e4m3x2(low, high));
}

__device__ __forceinline__ void copy_row(char* target, const char* nope, const char* rope,
                                         int lane) {
  const uint4* source = reinterpret_cast<const uint4*>(nope);
  const uint4 first = source[lane];
  const uint4 second = source[32 + lane];
  const unsigned int last = reinterpret_cast<const unsigned int*>(rope)[lane];
  reinterpret_cast<uint4*>(target)[lane] = first;
  reinterpret_cast<uint4*>(target)[32 + lane] = second;
  reinterpret_cast<unsigned int*>(target + 2 * kLoraRank)[lane] = last;
}

template <typename T, bool kFp8, int kWarps>
__global__ void sglang_structure(const char* ql_nope, long long ql_nope_token_stride,
                                 long long ql_nope_head_stride, const char* q_pe,
                                 long long q_pe_token_stride, long long q_pe_head_stride,
                                 const char* kv_c, long long kv_c_stride, const char* k_pe,
                                 long long k_pe_stride, char* mqa_q, char* kv_cache,
                                 long long cache_row_stride, const long long* slot_mapping,
                                 unsigned int num_tokens, unsigned int num_heads) {
  constexpr int kRowBytes = kLatentDim * (kFp8 ? 1 : 2);
  __shared__ alignas(16) char staged[kFp8 ? kWarps : 1][kLatentDim];
  const unsigned int warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  wait_for_predecessor(nullptr, nullptr);
  if (warp < num_tokens) {
    const char* nope = kv_c + warp * kv_c_stride;
    const char* rope = k_pe + warp * k_pe_stride;
    char* target = kv_cache + slot_mapping[warp] * cache_row_stride;
    if constexpr (kFp8) {
      char* row = staged[threadIdx.x / 32];
      cast_row<T>(row, nope, rope, lane);
      __syncwarp();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      if (lane == 0) {
        const unsigned int source = static_cast<unsigned int>(__cvta_generic_to_shared(row));
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                     "r"(source), "n"(kRowBytes)
                     : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
    } else {
      copy_row(target, nope, rope, lane);
    }
  } else if (warp - num_tokens < num_tokens * num_heads) {
    const unsigned int row = warp - num_tokens;
    const unsigned int token = row / num_heads;
    const unsigned int head = row % num_heads;
    const char* nope = ql_nope + token * ql_nope_token_stride + head * ql_nope_head_stride;
    const char* rope = q_pe + token * q_pe_token_stride + head * q_pe_head_stride;
    char* target = mqa_q + static_cast<long long>(row) * kRowBytes;
    if constexpr (kFp8) {
      cast_row<T>(target, nope, rope, lane);
    } else {
      copy_row(target, nope, rope, lane);
    }
  }
  release_dependents();
}

}  // namespace k3cupy
