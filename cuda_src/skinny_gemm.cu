// The skinny GEMM: out[m, n] = sum over k of x[m, k] * weight[n, k] (+ residual[m, n]), for few
// tokens m: up to eight as dot products (skinny_gemm), up to 16 on tensor cores (skinny_gemm_mma).
//
// The time is that of reading the weight once, at the speed of memory. No staging in shared memory,
// no barriers but one at the end: a thread loads weights straight into registers, 16 bytes at a time,
// and multiplies them there. What that asks for, in the dot products:
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
// The sum of an element is taken in one fixed order: there a thread's vectors along K, then over the
// lanes of a warp, then over the warps. That order depends on kBlockSize and kVectorWidth only,
// neither on the number of tokens nor on kOutputs nor on kUnroll. In both forms the residual comes
// last, in fp32, before the only rounding (where Out is float, nothing is rounded), and a lane
// without a column left adds nothing: NaN stays in its row.

#include "common/chunk.cuh"
#include "common/float32.cuh"
#include "common/pdl.cuh"
#include "common/vector.cuh"
#include "gemm/cluster.cuh"
#include "gemm/mma.cuh"
#include "gemm/pipeline.cuh"
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

// The same with tensor cores, for up to eight (kTileM = 8) or 16 tokens. The more tokens, the more
// instructions a weight costs as a dot product; here it is one product for all tokens.
//
// A warp takes steps of 32 columns, and of these kOutputs rows of the weight. A lane loads 16 bytes
// of one row of each eight, and 16 bytes of one token (with kTileM = 16 of two) in the same columns:
// in these very registers both are operands of the product. Its columns come in another order than
// in memory, in both alike. The tokens are the side of 16, so that eight rows of the weight are
// enough for a product and kOutputs may be any number. A lane without a row or a token repeats the
// last one: that costs no byte more, and what comes of it is not stored.
//
// Steps go round the warps of a block, then those of its cluster: what is requested together lies
// side by side. The requests of kUnroll steps are in flight; where one round covers all columns
// (kOneRound) the whole share of the weight is on its way before the predecessor ends. An element is
// summed over a warp's steps, then over the warps, then over the blocks of the cluster: its bits
// depend on kBlockSize and kSplitK, not on the number of tokens, kOutputs or kUnroll.
template <typename T, int kTileM, int kBlockSize, int kOutputs, int kUnroll, int kSplitK,
          int kBlocksPerSm, bool kOneRound, bool kWholeSteps, bool kAlignedX, bool kHasResidual,
          bool kWeightIsStatic, typename Out = T>
__global__ void __launch_bounds__(kBlockSize, kBlocksPerSm)
    skinny_gemm_mma(const T* weight, unsigned int n, unsigned int k, const T* x,
                    unsigned int num_tokens, long long x_row_stride, const T* residual,
                    long long residual_row_stride, Out* out, long long out_row_stride) {
  constexpr int kWarps = kBlockSize / kLanes;
  constexpr int kStep = 32;
  constexpr int kGroups = (kOutputs + 7) / 8;
  constexpr int kHalves = kTileM / 8;
  constexpr unsigned int kWalkers = kWarps * kSplitK;
  constexpr unsigned int kRound = kWalkers * kUnroll;
  constexpr unsigned int kStepBytes = 2 * kStep;
  static_assert(kBlockSize % kLanes == 0, "blocks are whole warps");
  static_assert(kTileM == 8 || kTileM == 16, "the product has 16 tokens, or zeros in half of them");
  static_assert(kOutputs >= 1, "at least one row of the weight");
  static_assert(kUnroll >= 1, "at least one step in flight");
  static_assert(kSplitK >= 1 && kSplitK <= 8, "a cluster has up to eight blocks everywhere");

  const unsigned int lane = threadIdx.x % kLanes;
  const unsigned int warp = threadIdx.x / kLanes;
  const unsigned int rank = blockIdx.x % kSplitK;
  const unsigned int first_row = blockIdx.x / kSplitK * kOutputs;
  const unsigned int steps = (k + kStep - 1) / kStep;
  unsigned int step = rank * kWarps + warp;
  const unsigned int column = step * kStep + lane % 4 * 8;

  // Addresses of this lane, in its first step. Opaque to the compiler, which would work them out
  // again from the parameters at every load.
  const char* weight_at[kGroups];
  const char* x_at[kHalves];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const unsigned int row =
        min(first_row + min(8 * i + lane / 4, static_cast<unsigned int>(kOutputs - 1)), n - 1);
    weight_at[i] = reinterpret_cast<const char*>(weight + static_cast<long long>(row) * k + column);
    asm volatile("" : "+l"(weight_at[i]));
  }
#pragma unroll
  for (int i = 0; i < kHalves; ++i) {
    const unsigned int token = min(8 * i + lane / 4, num_tokens - 1);
    x_at[i] = reinterpret_cast<const char*>(x + token * x_row_stride + column);
    asm volatile("" : "+l"(x_at[i]));
  }

  Vector<8> weights[kUnroll][kGroups];
  Vector<8> tokens[kUnroll][kHalves];
  // Loads what this warp multiplies `ahead` steps from now, if there is such a step, into the
  // registers of that step. Columns behind the last one are zeros; registers of no step stay as
  // they are, and are not multiplied.
  const auto load = [&](int ahead, const auto& load_vector, auto& vectors, const auto& at) {
    if (step + ahead * kWalkers >= steps) return;
    const bool inside = kWholeSteps || (step + ahead * kWalkers) * kStep + lane % 4 * 8 < k;
    constexpr int kCount = sizeof(vectors[0]) / sizeof(Vector<8>);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Vector<8>& vector = vectors[ahead % kUnroll][i];
      if (!kWholeSteps) vector = {};
      if (inside) load_vector(vector, at[i] + ahead * kWalkers * kStepBytes);
    }
  };
  const auto load_weights = [&](int ahead) {
    load(
        ahead, [](auto& vector, const char* source) { load_streaming_lines(vector, source); },
        weights, weight_at);
  };
  const auto load_tokens = [&](int ahead) {
    load(
        ahead,
        [](auto& vector, const char* source) {
          if constexpr (kAlignedX) {
            load_shared_with_others(vector, source);
          } else {
            load_elements(vector, source);
          }
        },
        tokens, x_at);
  };
  const auto for_first_round = [&](const auto& load_step) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_step(u);
  };

  // A block of a cluster finishes kOwned of the quads, four rows of a token; the others send it
  // their sums. What is in shared memory for that falls away in a block that is alone.
  constexpr int kPitch = 8 * (kGroups | 1);  // lanes that store together touch all banks
  constexpr unsigned int kRowQuads = 2 * kGroups;
  constexpr unsigned int kQuads = kTileM * kRowQuads;
  constexpr unsigned int kOwned = (kQuads + kSplitK - 1) / kSplitK;
  __shared__ __align__(16) float sums[kWarps][kTileM][kPitch];
  __shared__ __align__(16) float inbox[kSplitK][kSplitK > 1 ? 4 * kOwned : 4];
  __shared__ unsigned long long inbox_full;

  // The thread that finishes an element also fetches what is added to it, early: the residual may be
  // `out` itself. A block that is alone has kOutputs elements of each token, of a cluster its quads.
  constexpr unsigned int kElements = kSplitK > 1 ? 4 * kOwned : kTileM * kOutputs;
  constexpr unsigned int kAddends = (kElements + kBlockSize - 1) / kBlockSize;
  T addends[kHasResidual ? kAddends : 1];
  const auto for_own_elements = [&](const auto& visit) {
#pragma unroll
    for (unsigned int j = 0; j < kAddends; ++j) {
      const unsigned int i = threadIdx.x + j * kBlockSize;
      const unsigned int quad = rank * kOwned + i / 4;
      const unsigned int token = kSplitK > 1 ? quad / kRowQuads : i / kOutputs;
      const unsigned int row = kSplitK > 1 ? quad % kRowQuads * 4 + i % 4 : i % kOutputs;
      const bool exists = i < kElements && token < num_tokens && row < kOutputs;
      if (exists && first_row + row < n) visit(token, row, i, addends[kHasResidual ? j : 0]);
    }
  };
  const auto store = [&](unsigned int token, unsigned int row, float total, const T& addend) {
    if constexpr (kHasResidual) total = add(total, static_cast<float>(addend));
    out[token * out_row_stride + first_row + row] = static_cast<Out>(total);
  };

  if constexpr (kWeightIsStatic) for_first_round(load_weights);
  if constexpr (kSplitK > 1) {
    if (threadIdx.x == 0) {
      init_barrier(shared_address(&inbox_full), 1);
      arrive_expecting(shared_address(&inbox_full), sizeof(inbox));
      show_barriers_to_others();
    }
    __syncthreads();
    cluster_arrive_relaxed();
  }
  wait_for_predecessor(x_at[0], weight_at[0]);
  release_dependents();
  if constexpr (!kWeightIsStatic) for_first_round(load_weights);
  for_first_round(load_tokens);
  if constexpr (kHasResidual) {
    for_own_elements([&](unsigned int token, unsigned int row, int, T& addend) {
      addend = residual[token * residual_row_stride + first_row + row];
    });
  }

  float sum[kGroups][4] = {};
  const auto multiply = [&](int u) {
    if (step + u * kWalkers >= steps) return;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Vector<8>& low = tokens[u][0];
      const Vector<8>& high = tokens[u][kHalves - 1];
      const unsigned int operand[4] = {low.word[i], kHalves > 1 ? high.word[i] : 0u,
                                       low.word[i + 1], kHalves > 1 ? high.word[i + 1] : 0u};
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        multiply_add(sum[j], operand, weights[u][j].word[i], weights[u][j].word[i + 1], T{});
      }
    }
  };
#pragma unroll 1
  do {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      multiply(u);
      if constexpr (!kOneRound) {
        load_weights(u + kUnroll);
        load_tokens(u + kUnroll);
      }
    }
    step += kRound;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) weight_at[i] += kRound * kStepBytes;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) x_at[i] += kRound * kStepBytes;
  } while (!kOneRound && step < steps);

  // A lane has the sums of tokens g and g + 8 (g = lane / 4) for two rows of each eight.
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      float2* place =
          reinterpret_cast<float2*>(&sums[warp][8 * j + lane / 4][8 * i + lane % 4 * 2]);
      *place = make_float2(sum[i][2 * j], sum[i][2 * j + 1]);
    }
  }
  __syncthreads();

  if constexpr (kSplitK == 1) {
    for_own_elements([&](unsigned int token, unsigned int row, int, const T& addend) {
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total = add(total, sums[w][token][row]);
      store(token, row, total, addend);
    });
  } else {
    cluster_wait();  // every block of the cluster has begun, so its shared memory may be written
#pragma unroll 1
    for (unsigned int quad = threadIdx.x; quad < kSplitK * kOwned; quad += kBlockSize) {
      float totals[4] = {};
      if (quad < kQuads) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            totals[i] = add(totals[i], sums[w][quad / kRowQuads][quad % kRowQuads * 4 + i]);
          }
        }
      }
      send_to_rank(shared_address(&inbox[rank][quad % kOwned * 4]), shared_address(&inbox_full),
                   quad / kOwned, totals);
    }
    wait_barrier(shared_address(&inbox_full), 0);
    for_own_elements([&](unsigned int token, unsigned int row, int i, const T& addend) {
      float total = 0.0f;
#pragma unroll
      for (int r = 0; r < kSplitK; ++r) total = add(total, inbox[r][i]);
      store(token, row, total, addend);
    });
  }
}

}  // namespace k3cupy
