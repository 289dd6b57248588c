// The two RMSNorms behind the first projection of an MLA layer, in one launch:
//
//   q[b]           = norm(qkv_a[b, 0:1536]) * q_weight
//   kv_c_normed[b] = norm(qkv_a[b, 1536:2048]) * kv_weight
//
// A token is 4 KB in and 4 KB out: the time is the latency of launch -> one load -> one sum -> one
// store. A block has one token; kQueryWarps warps share its query part, so that a lane has one to six
// chunks, all loaded at once, and one more warp has the latent part, which needs no block barrier.
// Gains are loaded beside the row, or before the wait where they are promised to be older.

#include "common/chunk.cuh"
#include "common/pdl.cuh"
#include "common/strides.cuh"
#include "gemm/pipeline.cuh"
#include "mla/rms_norm.cuh"

namespace k3cupy {

template <typename T, bool kWeightIsStatic, bool kVector, int kQueryWarps>
__global__ void __launch_bounds__(32 * (kQueryWarps + 1))
    q_kv_rms_norms(const char* qkv_a, typename StrideOf<kVector>::Type qkv_a_stride,
                   const char* q_weight, const char* kv_weight, float epsilon, char* q, char* kv) {
  constexpr int kThreads = 32 * kQueryWarps;
  constexpr int kChunks = kQueryChunks / kThreads;
  static_assert(kChunks * kThreads == kQueryChunks, "each lane has the same number of chunks");
  const unsigned int token = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const char* row = qkv_a + offset_of(token, qkv_a_stride);

  // The first kThreads threads have chunks of the query part, the last warp those of the latent one.
  if (thread >= kThreads) {
    constexpr int kStepBytes = 32 * kChunkBytes;
    const int first = (thread - kThreads) * kChunkBytes;
    const char* source = row + 2 * kQueryRank + first;
    Chunk gain[2];
    const auto load_gains = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gain[i] = load_chunk_streaming<kVector>(kv_weight + first + i * kStepBytes);
      }
    };
    if constexpr (kWeightIsStatic) load_gains();
    wait_for_predecessor(source, kv_weight);
    release_dependents();
    Chunk chunk[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) chunk[i] = load_chunk_streaming<kVector>(source + i * kStepBytes);
    if constexpr (!kWeightIsStatic) load_gains();
    norm_latent<T, false>(chunk[0], chunk[1], gain, epsilon);
    char* target = kv + static_cast<unsigned long long>(token) * (2 * kLoraRank) + first;
#pragma unroll
    for (int i = 0; i < 2; ++i) store_chunk<kVector>(target + i * kStepBytes, chunk[i]);
    return;
  }

  Chunk gain[kChunks];
  const auto load_gains = [&] {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      gain[i] = load_chunk_streaming<kVector>(q_weight + (thread + i * kThreads) * kChunkBytes);
    }
  };
  if constexpr (kWeightIsStatic) load_gains();
  wait_for_predecessor(row, q_weight);
  release_dependents();
  Chunk chunk[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunk[i] = load_chunk_streaming<kVector>(row + (thread + i * kThreads) * kChunkBytes);
  }
  if constexpr (!kWeightIsStatic) load_gains();

  // Units of 32 chunks, summed in order: the bits do not depend on the number of warps.
  __shared__ float squares[kQueryUnits];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const float sum = sum_over_lanes(sum_of_squares<T>(chunk[i]));
    if (thread % 32 == 0) squares[thread / 32 + i * kQueryWarps] = sum;
  }
  sync_threads<kThreads>();
  float sum = squares[0];
#pragma unroll
  for (int i = 1; i < kQueryUnits; ++i) sum = add(sum, squares[i]);
  const float scale = norm_scale<kQueryRank>(sum, epsilon);
  char* target = q + static_cast<unsigned long long>(token) * (2 * kQueryRank);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    store_chunk<kVector>(target + (thread + i * kThreads) * kChunkBytes,
                         normed<T>(chunk[i], scale, gain[i]));
  }
}

}  // namespace k3cupy
