// The MLA query front of a decode step: everything between the first projection and attention, in one
// launch. For each token b and head h
//
//   q[b, h]        = norm(qkv_a[b, 0:1536]) @ w_q_b[h].T               192 = 128 | 64 values
//   mqa_q[b, h]    = [q[b, h, 0:128] @ w_uk[h] | rope(q[b, h, 128:])]  576 wide, 16-bit or e4m3
//   cache[slot(b)] = [norm(qkv_a[b, 1536:2048]) | rope(qkv_a[b, 2048:2112])]
//
// With few tokens it is two weights that are read once (0.7 MB a head), and a chain of short steps
// behind qkv_a. So all of the weights are in flight at once, before the dependency wait where they are
// promised to be older, nothing is fetched twice, and what can be done before the wait is done there:
//   - A cluster of eight blocks has a head. A block owns 24 of its rows of w_q_b, which it loads
//     straight into registers, in the order of the tensor-core operand, and 64 columns of w_uk, which
//     are copied to shared memory. Both are small beside what a multiprocessor has, and dependents of
//     the first projection are released early: this kernel's weights stream while that one still runs.
//   - The norm is folded into the product. The weights are multiplied with the gains, and rounded,
//     while rows of qkv_a are on their way. Those are operands as they lie in memory, and the scale
//     1 / rms is a factor of the sums. Half a tile of the product would be empty, as 24 rows are one
//     tile and a half: there the rows of qkv_a stand once more, and their products with themselves
//     are the sums of squares.
//   - The warps share K and sum up in shared memory; the block's values of q go to all blocks of the
//     cluster, counted by a barrier there; second product; store.
//   - Cache rows are the by-work of one more warp in the first blocks.
//
// Roundings: of weight times gain, where separate kernels round the normed value; of q, as there; then
// fp32 to the store. An element is summed over a warp's steps, then over the warps: its bits depend on
// kWarps and on the tile, not on how many tokens that has.

#include "common/chunk.cuh"
#include "common/float32.cuh"
#include "common/fp8.cuh"
#include "common/pdl.cuh"
#include "common/strides.cuh"
#include "common/vector.cuh"
#include "gemm/cluster.cuh"
#include "gemm/mma.cuh"
#include "gemm/pipeline.cuh"
#include "mla/cache_insert.cuh"
#include "mla/rms_norm.cuh"
#include "mla/rope.cuh"
#include "mla/slots.cuh"

namespace k3cupy {

constexpr int kNopeDim = 128;  // qk_nope_head_dim
constexpr int kCluster = 8;    // blocks of a head
constexpr int kRows = (kNopeDim + kRopeDim) / kCluster;
constexpr int kColumns = kLoraRank / kCluster;
constexpr int kRowsOfLanes = 8;  // of a weight, or of tokens: four lanes have 32 columns of each
constexpr int kRowGroups = kRows / kRowsOfLanes;
constexpr int kStepChunks = 4;  // a step is 32 columns
static_assert(kRowGroups == 3, "a tile of 16 rows, and half a tile");

// Where things stand in a block's shared memory, behind its columns of w_uk.
template <int kTileM, int kWarps, int kSharedSteps>
struct QueryLayout {
  static constexpr int kInboxPitch = 2 * kNopeDim + 16;
  static constexpr int kInbox = 2 * kNopeDim * kColumns;
  static constexpr int kPitch = kTileM + 2;  // of sums: few banks are touched twice
  static constexpr int kSums = kInbox + kTileM * kInboxPitch;
  static constexpr int kSquares = kSums + 4 * kWarps * kRows * kPitch;
  static constexpr int kGains = kSquares + 4 * kWarps * kTileM;
  static constexpr int kWeights = kGains + 2 * kQueryRank;  // a chunk a lane, side by side
};

template <typename T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<__half> = true;

// A power of two near the largest gain of a warp's columns, of which each lane brings some, and its
// inverse. fp16 has so few exponents that weights times small gains would lose their last places;
// divided by it they keep them. bf16 needs none.
template <typename T>
struct GainScale {
  float scale = 1.0f;
  float inverse = 1.0f;

  __device__ __forceinline__ explicit GainScale(const Chunk& gains) {
    if constexpr (kIsHalf<T>) {
      constexpr unsigned int kExponent = 0x7f800000u;
      constexpr unsigned int kMagnitude = 0x7fffffffu;  // bits in the order of the numbers
      unsigned int largest = 0;
      float value[kChunkElements];
      widen<T>(gains, value);
#pragma unroll
      for (int i = 0; i < kChunkElements; ++i) {
        largest = max(largest, __float_as_uint(value[i]) & kMagnitude);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      }
      const unsigned int bits = largest & kExponent;
      if (bits == 0 || bits == kExponent) return;
      scale = __uint_as_float(bits);
      inverse = __uint_as_float((254u << 23) - bits);
    }
  }

  // Gains divided by it.
  __device__ __forceinline__ Chunk divide(const Chunk& gains) const {
    if constexpr (!kIsHalf<T>) return gains;
    float value[kChunkElements];
    widen<T>(gains, value);
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) value[i] = multiply(value[i], inverse);
    return narrow<T>(value);
  }
};

// Values of the 16-bit type, multiplied in pairs with one rounding. Adding -0 changes no product, and
// GPUs before sm_90 have no other instruction for it.
__device__ __forceinline__ unsigned int multiply_pair(unsigned int a, unsigned int b,
                                                      __nv_bfloat16) {
  unsigned int product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

__device__ __forceinline__ unsigned int multiply_pair(unsigned int a, unsigned int b, __half) {
  unsigned int product;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

template <typename T, bool kQueryFp8, CacheFormat kCache, bool kRope, bool kWeightIsStatic,
          int kTileM, int kWarps, int kSharedSteps, int kBlocksPerSm>
__global__ void __launch_bounds__(32 * (kWarps + 1), kBlocksPerSm) mla_decode_query(
    const char* w_q_b, const char* w_uk, unsigned int w_uk_head_stride,
    unsigned int w_uk_row_stride, const char* q_norm_weight, const char* qkv_a,
    unsigned int qkv_a_stride, unsigned int num_tokens, float epsilon,
    //
    char* mqa_q, const float* q_scale_inv, float q_scale_value, const char* kv_norm_weight,
    const char* slot_mapping, long long slot_stride, unsigned int slot_is_wide,
    //
    char* kv_cache, unsigned int cache_block_stride, unsigned int cache_token_stride,
    unsigned int num_slots, unsigned int block_size, unsigned int block_size_magic,
    unsigned int block_size_shift, const float* cache_scale_inv, float cache_scale_value,
    //
    unsigned int position_is_wide, const char* positions, const char* cos_sin_cache,
    long long position_stride, long long table_stride, long long max_position) {
  using Layout = QueryLayout<kTileM, kWarps, kSharedSteps>;
  constexpr int kThreads = 32 * kWarps;
  constexpr int kSteps = kQueryChunks / kStepChunks / kWarps;
  constexpr int kHeldSteps = kSteps - kSharedSteps;
  constexpr int kHalves = kTileM / kRowsOfLanes;
  static_assert(kTileM == 8 || kTileM == 16, "tokens are the side of 8, once or twice");
  static_assert(kSteps * kStepChunks * kWarps == kQueryChunks,
                "warps have the same number of steps");
  static_assert(kHeldSteps >= 0, "a step is in registers or in shared memory");
  static_assert(kSteps * kStepChunks <= 32, "a lane copies a chunk of gains");
  static_assert(!(kQueryFp8 && kCache == CacheFormat::kDsMla), "ds_mla keeps a 16-bit query");

  extern __shared__ __align__(128) char shared[];
  __shared__ unsigned long long inbox_full;
  const unsigned int warp = threadIdx.x / 32;
  const unsigned int lane = threadIdx.x % 32;
  const unsigned int rank = blockIdx.x % kCluster;
  const unsigned int head = blockIdx.x / kCluster;
  const RopeTable table = {positions,     position_is_wide, position_stride,
                           cos_sin_cache, table_stride,     max_position};

  if (warp == kWarps) {
    cluster_arrive_relaxed();
    constexpr bool kPairs = kInPairs<kCache, kWarpChunks>;
    Chunk gain[2];
    const auto load_gains = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RowChunks map = {0, static_cast<int>(lane), 32};
        const int c = chunk_of<kPairs>(map, i);
        gain[i] = load_chunk_streaming<true>(kv_norm_weight + c * kChunkBytes);
      }
    };
    if (kWeightIsStatic && blockIdx.x < num_tokens) load_gains();
    wait_for_predecessor(qkv_a, slot_mapping);
    if (!kWeightIsStatic && blockIdx.x < num_tokens) load_gains();
    const SlotMapping slots = {slot_mapping, slot_stride, slot_is_wide, num_tokens};
    const PagedCache<true> cache = {kv_cache,   cache_block_stride, cache_token_stride, num_slots,
                                    block_size, block_size_magic,   block_size_shift};
#pragma unroll 1
    for (unsigned int token = blockIdx.x; token < num_tokens; token += gridDim.x) {
      const char* row = qkv_a + offset_of(token, qkv_a_stride) + 2 * kQueryRank;
      insert_alone<T, kCache, kRope, true, 1>(
          token, row, row + 2 * kLoraRank, slots, cache, {cache_scale_inv, cache_scale_value},
          table, [&](Chunk(&chunk)[kWarpChunks]) {
            norm_latent<T, kPairs>(chunk[0], chunk[1], gain, epsilon);
          });
    }
    return;
  }

  // The weights: a lane has 16 bytes of a row of each eight, in its warp's steps of 32 columns. The
  // last kSharedSteps of them wait in shared memory, where another block wants registers.
  Vector<8> weights[kHeldSteps + 1][kRowGroups];
  const auto shared_weight = [&](int u, int i) {
    const int place = ((u - kHeldSteps) * kRowGroups + i) * kThreads + threadIdx.x;
    return Layout::kWeights + place * kChunkBytes;
  };
  const unsigned int column = (warp * kStepChunks + lane % 4) * kChunkBytes;
  constexpr unsigned int kStepBytes = kWarps * kStepChunks * kChunkBytes;
  const unsigned long long first_row = head * (kCluster * kRows) + rank * kRows + lane / 4;
  const char* weight_at = w_q_b + first_row * (2 * kQueryRank) + column;
  const unsigned int base = shared_address(shared);
  const unsigned int gains_of_warp = Layout::kGains + warp * (kSteps * kStepChunks * kChunkBytes);
  const unsigned int gains_at = base + gains_of_warp;
  const auto load_weights = [&] {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
        const char* source = weight_at + i * kRowsOfLanes * 2 * kQueryRank + u * kStepBytes;
        if (u < kHeldSteps) {
          load_streaming_lines(weights[u][i], source);
        } else {
          copy_chunk_async(base + shared_weight(u, i), source);
        }
      }
    }
    // The gains of a warp's columns, for its own lanes.
    if (lane < kSteps * kStepChunks) {
      const unsigned int c =
          (lane / kStepChunks * kWarps + warp) * kStepChunks + lane % kStepChunks;
      copy_chunk_async(gains_at + lane * kChunkBytes, q_norm_weight + c * kChunkBytes);
    }
    commit_copies();
    constexpr int kChunksOfRow = kColumns / kChunkElements;
    const char* source = w_uk + offset_of(head, w_uk_head_stride) + rank * (2 * kColumns);
#pragma unroll
    for (unsigned int c = 0; c < kNopeDim * kChunksOfRow; c += kThreads) {
      const unsigned int row = (c + threadIdx.x) / kChunksOfRow;
      const unsigned int chunk = (c + threadIdx.x) % kChunksOfRow;
      copy_chunk_async(base + row * (2 * kColumns) + swizzled(chunk, row),
                       source + offset_of(row, w_uk_row_stride) + chunk * kChunkBytes);
    }
    commit_copies();
  };

  const unsigned int inbox_barrier = shared_address(&inbox_full);
  if (threadIdx.x == 0) {
    init_barrier(inbox_barrier, 1);
    arrive_expecting(inbox_barrier, num_tokens * 2 * kNopeDim);
    show_barriers_to_others();
  }
  __syncwarp();
  cluster_arrive_relaxed();
  if constexpr (kWeightIsStatic) load_weights();
  wait_for_predecessor(qkv_a, weight_at);
  release_dependents();

  // Rows of qkv_a as operands. A lane without a token has zeros.
  Vector<8> tokens[kSteps][kHalves];
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    const unsigned int token = kRowsOfLanes * j + lane / 4;
    const char* row = qkv_a + offset_of(token, qkv_a_stride) + column;
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      tokens[u][j] = {};
      if (token < num_tokens) load_streaming(tokens[u][j], row + u * kStepBytes);
    }
  }
  if constexpr (!kWeightIsStatic) load_weights();
  wait_copies<1>();
  __syncwarp();
  constexpr unsigned int kGainsOfWarp = kSteps * kStepChunks;
  const GainScale<T> gain_scale(
      *reinterpret_cast<const Chunk*>(shared + gains_of_warp + lane % kGainsOfWarp * kChunkBytes));
  // The first product, and the squares: sums of rows g and g + 8 (g = lane / 4) of a tile, for tokens
  // 2 * (lane % 4) and the next. Two chains for a few tokens, where a product would wait for the last.
  constexpr int kChains = 2 / kHalves;
  float sum[kChains][kHalves][2][4] = {};
#pragma unroll
  for (int u = 0; u < kSteps; ++u) {
    Vector<8>(&rows)[kRowGroups] = weights[u < kHeldSteps ? u : kHeldSteps];
    const Chunk gain = gain_scale.divide(*reinterpret_cast<const Chunk*>(
        shared + gains_of_warp + (u * kStepChunks + lane % 4) * kChunkBytes));
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      if (u >= kHeldSteps) {
        rows[i] = *reinterpret_cast<const Vector<8>*>(shared + shared_weight(u, i));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        rows[i].word[j] = multiply_pair(rows[i].word[j], gain.word[j], T{});
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const unsigned int whole[4] = {rows[0].word[i], rows[1].word[i], rows[0].word[i + 1],
                                     rows[1].word[i + 1]};
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        const Vector<8>& x = tokens[u][j];
        const unsigned int half[4] = {rows[2].word[i], x.word[i], rows[2].word[i + 1],
                                      x.word[i + 1]};
        multiply_add(sum[i / 2 % kChains][j][0], whole, x.word[i], x.word[i + 1], T{});
        multiply_add(sum[i / 2 % kChains][j][1], half, x.word[i], x.word[i + 1], T{});
      }
    }
  }
  float* sums = reinterpret_cast<float*>(shared + Layout::kSums);
  float* squares = reinterpret_cast<float*>(shared + Layout::kSquares);
#pragma unroll
  for (int j = 0; j < kHalves; ++j) {
    float total[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      total[i / 4][i % 4] = sum[0][j][i / 4][i % 4];
      if (kChains > 1) {
        total[i / 4][i % 4] = add(total[i / 4][i % 4], sum[kChains - 1][j][i / 4][i % 4]);
      }
    }
    if constexpr (kIsHalf<T>) {
#pragma unroll
      for (int i = 0; i < 6; ++i) {  // not the squares
        total[i / 4][i % 4] = multiply(total[i / 4][i % 4], gain_scale.scale);
      }
    }
    float* place =
        sums + (warp * kRows + lane / 4) * Layout::kPitch + kRowsOfLanes * j + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      *reinterpret_cast<float2*>(place + i * kRowsOfLanes * Layout::kPitch) =
          make_float2(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1]);
    }
    if (lane / 8 == lane % 4) {  // a token with itself
      squares[warp * kTileM + kRowsOfLanes * j + lane / 4] =
          lane / 4 % 2 == 0 ? total[1][2] : total[1][3];
    }
  }
  wait_copies<0>();
  sync_threads<kThreads>();

  // A warp takes a token, a lane a row; eight lanes join their values to 16 bytes. What is q_nope goes
  // to all blocks of the cluster, one a lane; the rest is turned and stored.
  cluster_wait();
  const unsigned int inbox = base + Layout::kInbox;
  const float query_scale = kQueryFp8 ? CastScale{q_scale_inv, q_scale_value}.load() : 1.0f;
  const unsigned int num_heads = gridDim.x / kCluster;
  constexpr int kQueryBytes = kQueryFp8 ? 1 : 2;
  const auto query_row = [&](unsigned int token) {
    return mqa_q +
           (static_cast<unsigned long long>(token) * num_heads + head) * (kLatentDim * kQueryBytes);
  };
  const auto store_two = [&](char* row, unsigned int place, float low, float high) {
    if constexpr (kQueryFp8) {
      *reinterpret_cast<unsigned short*>(row + place) = static_cast<unsigned short>(
          to_e4m3x2(multiply(low, query_scale), multiply(high, query_scale)));
    } else {
      *reinterpret_cast<unsigned int*>(row + 2 * place) = narrow_pair(low, high, T{});
    }
  };
  const unsigned int own_row = min(lane, static_cast<unsigned int>(kRows - 1));
#pragma unroll
  for (int i = 0; i < (kTileM + kWarps - 1) / kWarps; ++i) {
    const unsigned int token = warp + i * kWarps;
    if (token >= num_tokens) break;
    float total = 0.0f;
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      total = add(total, sums[(w * kRows + own_row) * Layout::kPitch + token]);
      square = add(square, squares[w * kTileM + token]);
    }
    total = multiply(total, norm_scale<kQueryRank>(square, epsilon));
    const float other = __shfl_xor_sync(0xffffffffu, total, 1);
    const unsigned int word = narrow_pair(total, other, T{});  // of even lanes
    float words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = __uint_as_float(__shfl_sync(0xffffffffu, word, (lane & ~7u) + 2 * j));
    }
    if (lane >= kRows) continue;
    const unsigned int head_row = rank * kRows + lane;
    if (head_row < kNopeDim) {
      send_to_rank(inbox + token * Layout::kInboxPitch + head_row / 8 * 16, inbox_barrier, lane % 8,
                   words);
    } else if (lane % 2 == 0) {
      float value[2];
      widen_pair(word, value[0], value[1], T{});
      if constexpr (kRope) {
        const unsigned int pair = (head_row - kNopeDim) / 2;
        const float* angles = table.row_of(token);
        const float cosine = __ldcg(angles + pair);
        const float sine = __ldcg(angles + kRopePairs + pair);
        const float turned = subtract(multiply(value[0], cosine), multiply(value[1], sine));
        value[1] = add(multiply(value[0], sine), multiply(value[1], cosine));
        value[0] = turned;
      }
      store_two(query_row(token), kLoraRank + head_row - kNopeDim, value[0], value[1]);
    }
  }

  // The second product: eight columns a warp, of w_uk as it lies in memory.
  constexpr int kColumnGroups = kColumns / 8;
  constexpr int kProductSteps = kNopeDim / 16;
#pragma unroll 1
  for (unsigned int group = warp; group < kColumnGroups; group += kWarps) {
    unsigned int operand[kProductSteps / 2][4];
#pragma unroll
    for (int i = 0; i < kProductSteps / 2; ++i) {
      const unsigned int row = 32 * i + lane;
      load_matrices_transposed(operand[i], base + row * (2 * kColumns) + swizzled(group, row));
    }
    if (group == warp) wait_barrier(inbox_barrier, 0);
    float result[2][4] = {};
#pragma unroll
    for (int i = 0; i < kProductSteps; ++i) {
      unsigned int query[4] = {};
      const unsigned int source = inbox + i * 32;
      if constexpr (kHalves > 1) {
        load_matrices(query, source + lane % 16 * Layout::kInboxPitch + lane / 16 * 16);
      } else {
        unsigned int halves[2];
        load_matrices(halves, source + lane % 8 * Layout::kInboxPitch + lane / 8 % 2 * 16);
        query[0] = halves[0];
        query[2] = halves[1];
      }
      multiply_add(result[i % 2], query, operand[i / 2][i % 2 * 2], operand[i / 2][i % 2 * 2 + 1],
                   T{});
    }
    const unsigned int place = rank * kColumns + group * 8 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      const unsigned int token = 8 * j + lane / 4;
      if (token >= num_tokens) continue;
      store_two(query_row(token), place, add(result[0][2 * j], result[1][2 * j]),
                add(result[0][2 * j + 1], result[1][2 * j + 1]));
    }
  }
}

}  // namespace k3cupy
