// What our products are compared with: a kernel of ours in the structure of the public fused-A GEMM
// (DeepSeek-V3's, which TensorRT-LLM, SGLang and vLLM have; the facts are theirs, no line of it).
// out[m, n] = sum over k of x[m, k] * weight[n, k] for one to sixteen tokens m, bf16. What decides
// its speed:
//   - A block of 256 threads computes 16 rows of the weight. Two warps copy the weight, two copy x,
//     four multiply; each of the four has a quarter of K, and a stage a piece of every quarter.
//   - Copies of 16 bytes (cp.async) fill a ring of up to 192 KB. Each reader releases a stage by
//     itself. Before a warp copies into a stage it asks whether the next one is free, and if so does
//     not wait for it later.
//   - The weight is copied before the dependency wait, x behind it. Dependents are released at the
//     end.
//   - Tokens come in eights: one tensor-core product a step for up to 8 of them, two for 16.
//   - N and K are compiled in. So is the row stride of packed x, which kPacked says.
// A part wave is left wherever N / 16 is no multiple of what fits the GPU: that is structure, too.

#include <cuda_bf16.h>

#include "common/pdl.cuh"
#include "gemm/mma.cuh"
#include "gemm/pipeline.cuh"
#include "gemm/ring.cuh"

namespace k3cupy {

constexpr int kRows = 16;
constexpr int kMathWarps = 4;
constexpr int kCopyWarps = 4;  // two for the weight, then two for x
constexpr int kCopyThreads = 32 * kCopyWarps / 2;
constexpr int kPublicThreads = 32 * (kMathWarps + kCopyWarps);
constexpr int kRingBytes = 192 * 1024;
constexpr int kStep = 16;
constexpr int kSumPitch = kRows + 4;  // so that the four tokens of a store hit other banks

template <int kTokens, int kK>
struct PublicTile {
  static constexpr int kColumns = kK % 256 == 0 ? 256 : 128;
  static constexpr int kPiece = kColumns / kMathWarps;
  static constexpr int kRowBytes = 2 * kColumns;
  static constexpr int kWeightBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kRowBytes;
  static constexpr int kCount = kK / kColumns;
  static constexpr int kFit = kRingBytes / kStageBytes;
  static constexpr int kStages = kCount < kFit ? kCount : kFit;
  static constexpr int kBarriersBytes = 1024;
  using Stages = Ring<kStages, kStageBytes>;
  static_assert(kTokens == 8 || kTokens == 16, "tokens come in eights");
  static_assert(kK % kColumns == 0, "whole stages");
  static_assert(Stages::kBarriersBytes <= kBarriersBytes, "the host counts on it");
  static_assert(4 * kMathWarps * kTokens * kSumPitch <= Stages::kBytes,
                "sums are laid over the ring");
};

// Whether the barrier's phase of this parity is over; it may wait a while before it says no.
__device__ __forceinline__ bool is_over(unsigned int barrier, unsigned int parity) {
  unsigned int over = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred over;\n"
      "mbarrier.try_wait.parity.shared.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over; }"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return over != 0;
}

// Copies kMost rows, of which `rows` exist, stage by stage; what is missing stays as it was, and
// reaches no token that is stored.
template <typename Tile, int kK, int kMost>
__device__ __forceinline__ void copy_stages(const typename Tile::Stages& ring, unsigned int offset,
                                            const __nv_bfloat16* source, long long row_stride,
                                            unsigned int rows) {
  constexpr unsigned int kChunks = Tile::kRowBytes / kCopyBytes;
  constexpr unsigned int kPieceChunks = kChunks / kMathWarps;
  const unsigned int thread = threadIdx.x % kCopyThreads;
  RingPosition at;
  bool is_empty = false;
#pragma unroll 1
  for (int i = 0; i < Tile::kCount; ++i) {
    if (!is_empty) ring.wait_until_empty(at);
    RingPosition next = at;
    ring.advance(next);
    if (i + 1 < Tile::kCount) is_empty = is_over(ring.empty(next.stage), next.parity ^ 1);
    const unsigned int target = ring.place(at.stage) + offset;
#pragma unroll
    for (unsigned int j = 0; j < kMost * kChunks / kCopyThreads; ++j) {
      const unsigned int row = (thread + j * kCopyThreads) / kChunks;
      const unsigned int chunk = (thread + j * kCopyThreads) % kChunks;
      const unsigned int column = chunk / kPieceChunks * (kK / kMathWarps) + i * Tile::kPiece +
                                  chunk % kPieceChunks * (kCopyBytes / 2);
      if (kMost == kRows || row < rows) {
        copy_chunk_async(target + row * Tile::kRowBytes + swizzled(chunk, row),
                         source + row * row_stride + column);
      }
    }
    arrive_after_copies(ring.full(at.stage));
    at = next;
  }
}

template <typename Tile, int kTokens>
__device__ __forceinline__ void multiply_stages(const typename Tile::Stages& ring,
                                                unsigned int quarter, unsigned int lane,
                                                float (&sum)[kTokens / 8][4]) {
  constexpr int kSteps = Tile::kPiece / kStep;
  static_assert(kSteps % 2 == 0, "tokens are loaded for two steps at once");
  const unsigned int first_chunk = quarter * (2 * Tile::kPiece / kCopyBytes);
  RingPosition at;
#pragma unroll 1
  for (int i = 0; i < Tile::kCount; ++i) {
    ring.wait_until_full(at);
    const unsigned int stage = ring.place(at.stage);
    unsigned int weights[kSteps][4];
    unsigned int tokens[kTokens / 8][kSteps / 2][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned int row = lane % kRows;
      load_matrices(weights[s], stage + row * Tile::kRowBytes +
                                    swizzled(first_chunk + 2 * s + lane / kRows, row));
    }
#pragma unroll
    for (int t = 0; t < kTokens / 8; ++t) {
#pragma unroll
      for (int s = 0; s < kSteps / 2; ++s) {
        const unsigned int token = 8 * t + lane % 8;
        load_matrices(tokens[t][s], stage + Tile::kWeightBytes + token * Tile::kRowBytes +
                                        swizzled(first_chunk + 4 * s + lane / 8, token));
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int t = 0; t < kTokens / 8; ++t) {
        const unsigned int (&pair)[4] = tokens[t][s / 2];
        multiply_add(sum[t], weights[s], pair[s % 2 * 2], pair[s % 2 * 2 + 1]);
      }
    }
    ring.release(at.stage);
    ring.advance(at);
  }
}

template <int kN, int kK, int kTokens, bool kPacked>
__global__ void __launch_bounds__(kPublicThreads, 1)
    public_gemm(const __nv_bfloat16* weight, const __nv_bfloat16* x, long long x_row_stride,
                __nv_bfloat16* out, int num_tokens) {
  using Tile = PublicTile<kTokens, kK>;
  static_assert(kN % kRows == 0, "whole blocks");
  extern __shared__ __align__(1024) char shared[];
  const typename Tile::Stages ring(shared_address(shared),
                                   shared_address(shared) + Tile::kBarriersBytes);
  const unsigned int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const unsigned int lane = threadIdx.x % 32;
  const unsigned int first_row = blockIdx.x * kRows;

  if (warp == kCopyWarps) ring.init(2 * kCopyThreads, 32 * kMathWarps);
  __syncthreads();

  if (warp < kCopyWarps / 2) {
    copy_stages<Tile, kK, kRows>(ring, 0, weight + static_cast<long long>(first_row) * kK, kK,
                                 kRows);
  } else if (warp < kCopyWarps) {
    wait_for_predecessor(x, out);
    copy_stages<Tile, kK, kTokens>(ring, Tile::kWeightBytes, x, kPacked ? kK : x_row_stride,
                                   num_tokens);
  } else {
    const unsigned int quarter = warp - kCopyWarps;
    float sum[kTokens / 8][4] = {};
    multiply_stages<Tile, kTokens>(ring, quarter, lane, sum);
    // Each warp leaves its sums, by token and row; the first one adds them up.
    float* sums = reinterpret_cast<float*>(shared + Tile::kBarriersBytes);
    sync_threads<32 * kMathWarps>();
#pragma unroll
    for (int t = 0; t < kTokens / 8; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned int token = 8 * t + lane % 4 * 2 + i % 2;
        const unsigned int row = lane / 4 + i / 2 * 8;
        sums[(quarter * kTokens + token) * kSumPitch + row] = sum[t][i];
      }
    }
    sync_threads<32 * kMathWarps>();
    if (quarter == 0) {
#pragma unroll
      for (int j = 0; j < kTokens * kRows / 32; ++j) {
        const unsigned int token = (32 * j + lane) / kRows;
        const unsigned int row = lane % kRows;
        float total = 0.0f;
#pragma unroll
        for (int q = 0; q < kMathWarps; ++q) {
          total += sums[(q * kTokens + token) * kSumPitch + row];
        }
        if (token < num_tokens) {
          out[static_cast<long long>(token) * kN + first_row + row] = __float2bfloat16(total);
        }
      }
    }
  }
  release_dependents();
}

}  // namespace k3cupy
