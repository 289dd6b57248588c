// A product with a matrix of each head: the value up-projection behind MLA attention, with its gate,
//
//   out[b, h * 128 + n] = (latent[b, h] @ w_uv[h])[n] * sigmoid(gate[b, h * 128 + n])
//
// and, with other widths and no gate, the absorbed query q_nope[b, h] @ w_uk[h] of a layer in separate
// kernels.
//
// A head's matrix is 128 KB and is read once for a tile of tokens: the time is a latency, and that of
// reading 1.6 MB for twelve heads. A block has kTileN columns of one head, few enough that all
// multiprocessors have a share and that the whole share is in flight at once, before the dependency
// wait where the weight is promised to be older. The warps split K, or K and the columns, and sum up
// in shared memory; gate and rounding come there.
//
// The weight lies in one of two orders. With kTransposed its K is contiguous: a lane loads 16 bytes of
// a column straight into the registers of the operand. Otherwise columns are contiguous, and 16-byte
// copies bring rows to shared memory, from where the operand is loaded transposed. Rows are stored
// there in the order in which the operand takes them, which is that of 16-byte loads of x.
//
// An element is summed over a warp's steps, then over the warps: its bits depend on kWarps, neither on
// the number of tokens nor on the tiles.

#include "common/chunk.cuh"
#include "common/fast_divide.cuh"
#include "common/float32.cuh"
#include "common/pdl.cuh"
#include "common/strides.cuh"
#include "gemm/mma.cuh"
#include "gemm/pipeline.cuh"

namespace k3cupy {

constexpr int kStepChunks = 4;  // a step is 32 columns of x: a lane has 8 of them
constexpr int kStep = kStepChunks * kChunkElements;

// Where row k of the weight is stored, among the 32 of its step: word j of chunk c, element e.
__device__ __forceinline__ unsigned int operand_row(unsigned int k) {
  const unsigned int c = k / kChunkElements % kStepChunks;
  const unsigned int j = k % kChunkElements / 2;
  return k / kStep * kStep + 8 * j + 2 * c + k % 2;
}

// Where a 16-byte chunk of a stored row is: the same chunk of eight rows touches all banks.
template <int kRowChunks>
__device__ __forceinline__ unsigned int operand_place(unsigned int row, unsigned int chunk) {
  constexpr int kAround = kRowChunks < 8 ? kRowChunks : 8;
  const unsigned int turn = row * kAround / 8 % kAround;
  return (row * kRowChunks + (chunk ^ turn)) * kCopyBytes;
}

template <typename T, int kK, int kN, bool kTransposed, bool kHasGate, bool kWeightIsStatic,
          bool kVector, int kTileM, int kTileN, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    head_product(const char* weight, typename StrideOf<kVector>::Type weight_head_stride,
                 typename StrideOf<kVector>::Type weight_row_stride, unsigned int num_heads,
                 unsigned int num_heads_magic, unsigned int num_heads_shift,
                 unsigned int num_tokens, const char* x,
                 typename StrideOf<kVector>::Type x_token_stride,
                 typename StrideOf<kVector>::Type x_head_stride,
                 //
                 const char* gate, typename StrideOf<kVector>::Type gate_stride, char* out) {
  constexpr int kThreads = 32 * kWarps;
  constexpr int kAllSteps = kK / kStep;
  constexpr int kWarpsOfK = kWarps < kAllSteps ? kWarps : kAllSteps;
  constexpr int kWarpsOfN = kWarps / kWarpsOfK;
  constexpr int kSteps = kAllSteps / kWarpsOfK;
  constexpr int kGroups = kTileN / 8 / kWarpsOfN;
  constexpr int kRowChunks = kTileN / kChunkElements;
  constexpr int kPanels = (kTileM + 15) / 16;
  constexpr int kHalves = kTileM / 8;
  constexpr int kPitch =
      8 * (kTileN / 8 | 1);  // of sums: lanes that store together touch all banks
  static_assert(kSteps * kWarpsOfK == kAllSteps, "warps have the same number of steps");
  static_assert(kGroups * kWarpsOfN * 8 == kTileN, "columns are shared out in eights");
  static_assert(kN % kTileN == 0, "whole tiles of columns");
  static_assert(kTileM == 8 || kTileM % 16 == 0, "the product has 16 tokens");

  extern __shared__ __align__(128) char shared[];
  const unsigned int warp = threadIdx.x / 32;
  const unsigned int lane = threadIdx.x % 32;
  const unsigned int warp_k = warp % kWarpsOfK;
  const unsigned int first_group = warp / kWarpsOfK * kGroups;
  const unsigned int tile = blockIdx.x / (kN / kTileN);
  const unsigned int column = blockIdx.x % (kN / kTileN) * kTileN;
  const unsigned int tile_of_tokens = quotient(tile, num_heads_magic, num_heads_shift);
  const unsigned int head = tile - tile_of_tokens * num_heads;
  const unsigned int first_token = tile_of_tokens * kTileM;

  // A lane's 16 bytes of each of its steps, of its columns where these are rows in memory.
  Chunk weights[kTransposed ? kSteps : 1][kTransposed ? kGroups : 1];
  const unsigned int k_of_lane = (warp_k * kStepChunks + lane % 4) * kChunkElements;
  const char* matrix = weight + offset_of(head, weight_head_stride);
  const auto load_weights = [&] {
    if constexpr (kTransposed) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const unsigned int n = column + (first_group + i) * 8 + lane / 4;
        const char* row = matrix + offset_of(n, weight_row_stride) + 2 * k_of_lane;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          weights[s][i] = load_chunk_streaming<kVector>(row + s * kWarpsOfK * kStep * 2);
        }
      }
    } else {
      constexpr int kChunks = kK * kRowChunks;
      static_assert(kChunks % kThreads == 0, "threads copy the same number of chunks");
#pragma unroll
      for (int first = 0; first < kChunks; first += kThreads) {
        const unsigned int k = (first + threadIdx.x) / kRowChunks;
        const unsigned int chunk = (first + threadIdx.x) % kRowChunks;
        const char* source =
            matrix + offset_of(k, weight_row_stride) + 2 * column + chunk * kChunkBytes;
        const unsigned int place = operand_place<kRowChunks>(operand_row(k), chunk);
        if constexpr (kVector) {
          copy_chunk_async(shared_address(shared) + place, source);
        } else {
          *reinterpret_cast<Chunk*>(shared + place) = load_chunk_streaming<false>(source);
        }
      }
      if constexpr (kVector) commit_copies();
    }
  };
  if constexpr (kWeightIsStatic) load_weights();
  wait_for_predecessor(x, matrix);
  release_dependents();
  if constexpr (!kWeightIsStatic) load_weights();

  // Tokens past the last one repeat it; what comes of them is not stored.
  Chunk tokens[kSteps][kHalves];
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    const unsigned int token = min(first_token + 8 * j + lane / 4, num_tokens - 1);
    const char* row = x + offset_of(token, x_token_stride) + offset_of(head, x_head_stride);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      tokens[s][j] = load_chunk_streaming<kVector>(row + 2 * (k_of_lane + s * kWarpsOfK * kStep));
    }
  }

  // A thread finishes pairs of columns, and fetches their gates early.
  constexpr unsigned int kPairs = kTileM * kTileN / 2;
  constexpr unsigned int kVisits = (kPairs + kThreads - 1) / kThreads;
  unsigned int gates[kHasGate ? kVisits : 1];
  const auto for_pairs = [&](const auto& visit) {
#pragma unroll
    for (unsigned int i = 0; i < kVisits; ++i) {
      const unsigned int pair = threadIdx.x + i * kThreads;
      const unsigned int row = pair / (kTileN / 2);
      if (pair < kPairs && first_token + row < num_tokens) {
        visit(row, pair % (kTileN / 2) * 2, gates[kHasGate ? i : 0]);
      }
    }
  };
  if constexpr (kHasGate) {
    for_pairs([&](unsigned int row, unsigned int n, unsigned int& word) {
      const char* source =
          gate + offset_of(first_token + row, gate_stride) + 2 * (head * kN + column + n);
      if constexpr (kVector) {
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(word) : "l"(source));
      } else {
        const unsigned short* element = reinterpret_cast<const unsigned short*>(source);
        word = __ldcg(element) | static_cast<unsigned int>(__ldcg(element + 1)) << 16;
      }
    });
  }
  if constexpr (!kTransposed) {
    if constexpr (kVector) wait_copies<0>();
    __syncthreads();
  }

  float sum[kPanels][kGroups][4] = {};
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      unsigned int word[4];
      if constexpr (kTransposed) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = weights[s][g].word[i];
      } else {
        const unsigned int row = (warp_k + s * kWarpsOfK) * kStep + lane;
        load_matrices_transposed(
            word, shared_address(shared) + operand_place<kRowChunks>(row, first_group + g));
      }
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const Chunk& low = tokens[s][2 * p];
        const Chunk& high = tokens[s][kHalves > 1 ? 2 * p + 1 : 0];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const unsigned int operand[4] = {low.word[i], kHalves > 1 ? high.word[i] : 0u,
                                           low.word[i + 1], kHalves > 1 ? high.word[i + 1] : 0u};
          multiply_add(sum[p][g], operand, word[i], word[i + 1], T{});
        }
      }
    }
  }

  constexpr int kWeightBytes = kTransposed ? 0 : 2 * kK * kTileN;
  float* sums = reinterpret_cast<float*>(shared + kWeightBytes);
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float* place = sums + (warp_k * kTileM + 8 * j + lane / 4) * kPitch + (first_group + g) * 8 +
                     lane % 4 * 2;
      const float* own = sum[j / 2][g] + j % 2 * 2;
      *reinterpret_cast<float2*>(place) = make_float2(own[0], own[1]);
    }
  }
  __syncthreads();
  for_pairs([&](unsigned int row, unsigned int n, unsigned int word) {
    const float* part = sums + row * kPitch + n;
    float low = part[0];
    float high = part[1];
#pragma unroll
    for (int w = 1; w < kWarpsOfK; ++w) {
      const float2 more = *reinterpret_cast<const float2*>(part + w * kTileM * kPitch);
      low = add(low, more.x);
      high = add(high, more.y);
    }
    if constexpr (kHasGate) {
      float gate_low;
      float gate_high;
      widen_pair(word, gate_low, gate_high, T{});
      low = multiply(low, __fdividef(1.0f, 1.0f + __expf(-gate_low)));
      high = multiply(high, __fdividef(1.0f, 1.0f + __expf(-gate_high)));
    }
    const unsigned long long of_row =
        (static_cast<unsigned long long>(first_token + row) * num_heads + head) * kN + column + n;
    const unsigned int result = narrow_pair(low, high, T{});
    if constexpr (kVector) {
      *reinterpret_cast<unsigned int*>(out + 2 * of_row) = result;
    } else {
      unsigned short* target = reinterpret_cast<unsigned short*>(out) + of_row;
      target[0] = static_cast<unsigned short>(result);
      target[1] = static_cast<unsigned short>(result >> 16);
    }
  });
}

}  // namespace k3cupy
