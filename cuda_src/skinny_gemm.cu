// The skinny GEMM: out[m, n] = sum over k of x[m, k] * weight[n, k] (+ residual[m, n]), for one to
// eight tokens m, as dot products.
//
// The time is that of reading the weight once, at the speed of memory. No tensor core and no staging
// in shared memory: a thread loads weights straight into registers, 16 bytes at a time, and
// multiplies them there. What that asks for:
//   - Bytes in flight. A block computes kOutputs rows of the weight; its threads walk along K side by
//     side, each with kUnroll vectors of every row in flight. As soon as a vector has been used, the
//     one of the next round is requested into the same registers, so that loads never pause inside a
//     block, and while one block sums up, the multiprocessor's other blocks load.
//   - Few instructions a byte. Widening bf16 is one shift or one mask a value, and a value of x, once
//     widened, serves all kOutputs rows. x comes through L1, where the blocks of a multiprocessor
//     share it; the weight leaves no trace there.
//   - Under programmatic dependent launch the first round of the weight does not wait for the
//     predecessor where the caller promised that it is older (kWeightIsStatic): it is on its way
//     while the predecessor ends. Dependents are released behind the wait, never earlier: one to
//     which only its own predecessor was vouched for would overtake ours.
//
// The sum of an element is taken in one fixed order: a thread's vectors along K, then over the lanes
// of a warp, then over the warps. The order depends on kBlockSize and kVectorWidth only, neither on
// the number of tokens nor on kOutputs nor on kUnroll. The residual comes last, in fp32, before the
// only rounding; where Out is float, nothing is rounded. A lane without a column left adds nothing:
// NaN stays in its row.

#include "common/chunk.cuh"
#include "common/float32.cuh"
#include "common/pdl.cuh"
#include "common/vector.cuh"
#include "gemm/warp_sum.cuh"

namespace k3cupy {

template <typename T, int kNumRows, int kBlockSize, int kOutputs, int kUnroll, int kVectorWidth,
          int kBlocksPerSm, bool kAlignedX, bool kHasResidual, bool kWeightIsStatic,
          typename Out = T>
__global__ void __launch_bounds__(kBlockSize, kBlocksPerSm)
    skinny_gemm(const T* weight, unsigned int n, unsigned int k, const T* x, long long x_row_stride,
                const T* residual, long long residual_row_stride, Out* out,
                long long out_row_stride) {
  constexpr int kSums = kNumRows * kOutputs;
  constexpr int kWarps = kBlockSize / kLanes;
  constexpr unsigned int kVectorBytes = 2 * kVectorWidth;
  constexpr unsigned int kRound = kBlockSize * kUnroll;
  static_assert(kBlockSize % kLanes == 0, "blocks are whole warps");
  static_assert(kSums <= kBlockSize, "each output has a thread that finishes it");
  static_assert(kUnroll >= 1, "at least one vector of a row in flight");

  const unsigned int vectors = k / kVectorWidth;
  const unsigned int first_row = blockIdx.x * kOutputs;
  const char* weight_row[kOutputs];
  const char* x_row[kNumRows];
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    // Past the last row the last one is computed again, and not stored.
    const long long offset = static_cast<long long>(min(first_row + o, n - 1)) * k;
    weight_row[o] = reinterpret_cast<const char*>(weight + offset);
  }
#pragma unroll
  for (int m = 0; m < kNumRows; ++m) {
    x_row[m] = reinterpret_cast<const char*>(x + m * x_row_stride);
  }

  Vector<kVectorWidth> weights[kUnroll][kOutputs];
  Vector<kVectorWidth> tokens[kUnroll][kNumRows];
  const auto load_weights = [&](int u, unsigned int place) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      load_streaming(weights[u][o], weight_row[o] + static_cast<long long>(place) * kVectorBytes);
    }
  };
  const auto load_tokens = [&](int u, unsigned int place) {
#pragma unroll
    for (int m = 0; m < kNumRows; ++m) {
      const char* source = x_row[m] + static_cast<long long>(place) * kVectorBytes;
      if constexpr (kAlignedX) {
        load_shared_with_others(tokens[u][m], source);
      } else {
        load_elements(tokens[u][m], source);
      }
    }
  };
  const auto for_first_round = [&](const auto& load) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const unsigned int place = threadIdx.x + u * kBlockSize;
      if (place < vectors) load(u, place);
    }
  };

  if constexpr (kWeightIsStatic) for_first_round(load_weights);
  wait_for_predecessor(x, weight_row[0]);
  release_dependents();
  if constexpr (!kWeightIsStatic) for_first_round(load_weights);
  for_first_round(load_tokens);

  // The thread that finishes an output also fetches what is added to it, early, and before anything
  // is stored: the residual may be `out` itself.
  const unsigned int token = threadIdx.x / kOutputs;
  const unsigned int row = first_row + threadIdx.x % kOutputs;
  const bool finishes = threadIdx.x < kSums && row < n;
  float addend = 0.0f;
  if constexpr (kHasResidual) {
    if (finishes) addend = static_cast<float>(residual[token * residual_row_stride + row]);
  }

  float sum[kSums] = {};
  const auto multiply = [&](int u) {
#pragma unroll
    for (int i = 0; i < kVectorWidth / 2; ++i) {
      float low[kNumRows];
      float high[kNumRows];
#pragma unroll
      for (int m = 0; m < kNumRows; ++m) widen_pair(tokens[u][m].word[i], low[m], high[m], T{});
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        float weight_low;
        float weight_high;
        widen_pair(weights[u][o].word[i], weight_low, weight_high, T{});
#pragma unroll
        for (int m = 0; m < kNumRows; ++m) {
          float& total = sum[m * kOutputs + o];
          total = multiply_add(weight_low, low[m], total);
          total = multiply_add(weight_high, high[m], total);
        }
      }
    }
  };
#pragma unroll 1  // the registers of a round are what the host counts on
  for (unsigned int begin = threadIdx.x; begin < vectors; begin += kRound) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const unsigned int place = begin + u * kBlockSize;
      if (place < vectors) multiply(u);
      if (place + kRound < vectors) {
        load_weights(u, place + kRound);
        load_tokens(u, place + kRound);
      }
    }
  }

  __shared__ float sums[kWarps][kSums];
  const unsigned int lane = threadIdx.x % kLanes;
  unsigned int first = 0;
  unsigned int end = kSums;
  sum_over_warp<kSums>(sum, lane, first, end);
  if (lane % WarpSums<kSums>::kCopies == 0) {
#pragma unroll
    for (int i = 0; i < WarpSums<kSums>::kPerLane; ++i) {
      if (first + i < end) sums[threadIdx.x / kLanes][first + i] = sum[i];
    }
  }
  __syncthreads();
  if (finishes) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total = add(total, sums[w][threadIdx.x]);
    if constexpr (kHasResidual) total = add(total, addend);
    out[token * out_row_stride + row] = static_cast<Out>(total);
  }
}

}  // namespace k3cupy
