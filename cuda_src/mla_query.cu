// The MLA query front of a decode step: everything between the first projection and attention, in one
// launch. For each token b and head h
//
//   q[b, h]        = norm(qkv_a[b, 0:1536]) @ w_q_b[h].T               192 = 128 | 64 values
//   mqa_q[b, h]    = [q[b, h, 0:128] @ w_uk[h] | rope(q[b, h, 128:])]  576 wide, 16-bit or e4m3
//   cache[slot(b)] = [norm(qkv_a[b, 1536:2048]) | rope(qkv_a[b, 2048:2112])]
//
// With few tokens it is two weights that are read once (0.7 MB a head), and a chain of short steps
// behind qkv_a. So all of the weights are in flight at once, before the dependency wait where they are
// promised to be older, and nothing is fetched twice:
//   - A cluster of kCluster blocks has a head. A block owns an equal share of the rows of w_q_b, which
//     it loads straight into registers, in the order of the tensor-core operand, and of the columns of
//     w_uk, which are copied to shared memory.
//   - The shared memory is small, and dependents of the first projection are released early: this
//     kernel's weights stream while that one still runs.
//   - Behind the wait: norm; product over K, whose parts the warps sum up in shared memory; the block's
//     values of q go to all blocks of the cluster, counted by a barrier there; second product; store.
//   - Cache rows are the by-work of one more warp in the first blocks.
//
// Roundings: to 16 bits after the norm and after the first product, as in separate kernels; then fp32
// to the store. Every token has the same bits in any batch of a tile size.

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
constexpr int kHeadRows = kNopeDim + kRopeDim;
constexpr int kLanesOfRow = 4;     // of a warp, that hold 32 columns of a row, 8 each
constexpr int kRowsOfProduct = 8;  // of a weight, a product of 16 tokens
constexpr int kSendElements = 8;   // 16 bytes
constexpr int kStepChunks = 4;     // a step is 32 columns

// Where things stand in a block's shared memory. What depends on the number of tokens comes last.
template <int kTileM, int kCluster, int kWarps>
struct QueryLayout {
  static constexpr int kRows = kHeadRows / kCluster;
  static constexpr int kColumns = kLoraRank / kCluster;
  static constexpr int kGroups = kRows / kRowsOfProduct;
  static constexpr int kPitch = kRowsOfProduct * (kGroups | 1);  // of sums: lanes touch all banks
  static constexpr int kInboxPitch = 2 * kNopeDim + 16;
  static constexpr int kXPitch = 2 * kQueryRank + 64;
  static constexpr int kGains = 2 * kNopeDim * kColumns;
  static constexpr int kInbox = kGains + 2 * kQueryRank;
  static constexpr int kSquares = kInbox + kTileM * kInboxPitch;
  static constexpr int kTokens = kSquares + 4 * kTileM * 8;

  // Of a token: its normed row, then the sums of each warp.
  __device__ static __forceinline__ unsigned int sums(unsigned int num_tokens) {
    return kTokens + num_tokens * kXPitch;
  }
};

template <typename T, bool kQueryFp8, CacheFormat kCache, bool kRope, bool kWeightIsStatic,
          int kTileM, int kCluster, int kWarps, int kBlocksPerSm>
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
  using Layout = QueryLayout<kTileM, kCluster, kWarps>;
  constexpr int kThreads = 32 * kWarps;
  constexpr int kRows = Layout::kRows;
  constexpr int kColumns = Layout::kColumns;
  constexpr int kGroups = Layout::kGroups;
  constexpr int kSteps = kQueryChunks / kStepChunks / kWarps;
  constexpr int kHalves = kTileM / 8;
  static_assert(kTileM == 8 || kTileM == 16, "the product has 16 tokens, or zeros in half of them");
  static_assert(kGroups * kRowsOfProduct * kCluster == kHeadRows, "rows are shared out in eights");
  static_assert(kSteps * kStepChunks * kWarps == kQueryChunks,
                "warps have the same number of steps");
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

  // The weights: each lane 16 bytes of a row of each eight, in its steps of 32 columns.
  Vector<8> weights[kSteps][kGroups];
  const unsigned int chunk_of_lane = warp * kStepChunks + lane % kLanesOfRow;
  const char* weight_at =
      w_q_b +
      (static_cast<unsigned long long>(head) * kHeadRows + rank * kRows + lane / kLanesOfRow) *
          (2 * kQueryRank) +
      chunk_of_lane * kChunkBytes;
  const unsigned int base = shared_address(shared);
  const auto load_weights = [&] {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        load_streaming_lines(weights[u][i], weight_at + i * kRowsOfProduct * 2 * kQueryRank +
                                                u * kWarps * kStepChunks * kChunkBytes);
      }
    }
#pragma unroll
    for (int first = 0; first < kQueryChunks; first += kThreads) {
      const unsigned int c = first + threadIdx.x;
      if (c < kQueryChunks) {
        copy_chunk_async(base + Layout::kGains + c * kChunkBytes, q_norm_weight + c * kChunkBytes);
      }
    }
    asm volatile("cp.async.commit_group;");
    constexpr int kChunksOfRow = kColumns / kChunkElements;
    const char* source = w_uk + offset_of(head, w_uk_head_stride) + rank * (2 * kColumns);
#pragma unroll
    for (unsigned int c = 0; c < kNopeDim * kChunksOfRow; c += kThreads) {
      const unsigned int row = (c + threadIdx.x) / kChunksOfRow;
      const unsigned int chunk = (c + threadIdx.x) % kChunksOfRow;
      copy_chunk_async(base + row * (2 * kColumns) + swizzled(chunk, row),
                       source + offset_of(row, w_uk_row_stride) + chunk * kChunkBytes);
    }
    asm volatile("cp.async.commit_group;");
  };

  if constexpr (kWeightIsStatic) load_weights();
  const unsigned int inbox_barrier = shared_address(&inbox_full);
  if (threadIdx.x == 0) {
    init_barrier(inbox_barrier, 1);
    arrive_expecting(inbox_barrier, num_tokens * 2 * kNopeDim);
    show_barriers_to_others();
  }
  __syncwarp();
  cluster_arrive_relaxed();
  wait_for_predecessor(qkv_a, weight_at);
  release_dependents();
  if constexpr (!kWeightIsStatic) load_weights();

  // The norm: a warp takes units of 32 chunks of a token.
  constexpr int kUnits = (kTileM * kQueryUnits + kWarps - 1) / kWarps;
  Chunk chunk[kUnits];
  const unsigned int units = num_tokens * kQueryUnits;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const unsigned int unit = warp + i * kWarps;
    if (unit >= units) continue;
    const unsigned int place = (unit % kQueryUnits * 32 + lane) * kChunkBytes;
    chunk[i] =
        load_chunk_streaming<true>(qkv_a + offset_of(unit / kQueryUnits, qkv_a_stride) + place);
  }
  float* squares = reinterpret_cast<float*>(shared + Layout::kSquares);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const unsigned int unit = warp + i * kWarps;
    if (unit >= units) continue;
    const float sum = sum_over_lanes(sum_of_squares<T>(chunk[i]));
    if (lane == 0) squares[unit / kQueryUnits * 8 + unit % kQueryUnits] = sum;
  }
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  sync_threads<kThreads>();
  char* x = shared + Layout::kTokens;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const unsigned int unit = warp + i * kWarps;
    if (unit >= units) continue;
    const unsigned int token = unit / kQueryUnits;
    const float* part = squares + token * 8;
    float sum = part[0];
#pragma unroll
    for (int j = 1; j < kQueryUnits; ++j) sum = add(sum, part[j]);
    const float scale = norm_scale<kQueryRank>(sum, epsilon);
    const unsigned int place = (unit % kQueryUnits * 32 + lane) * kChunkBytes;
    const Chunk gain = *reinterpret_cast<const Chunk*>(shared + Layout::kGains + place);
    *reinterpret_cast<Chunk*>(x + token * Layout::kXPitch + place) =
        normed<T>(chunk[i], scale, gain);
  }
  sync_threads<kThreads>();

  // The first product. A lane without a token multiplies zeros.
  float sum[kGroups][4] = {};
#pragma unroll
  for (int u = 0; u < kSteps; ++u) {
    Chunk tokens[kHalves] = {};
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      const unsigned int token = 8 * j + lane / kLanesOfRow;
      if (token < num_tokens) {
        tokens[j] = *reinterpret_cast<const Chunk*>(
            x + token * Layout::kXPitch + (chunk_of_lane + u * kWarps * kStepChunks) * kChunkBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Chunk& low = tokens[0];
      const Chunk& high = tokens[kHalves - 1];
      const unsigned int operand[4] = {low.word[i], kHalves > 1 ? high.word[i] : 0u,
                                       low.word[i + 1], kHalves > 1 ? high.word[i + 1] : 0u};
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        multiply_add(sum[j], operand, weights[u][j].word[i], weights[u][j].word[i + 1], T{});
      }
    }
  }
  float* sums = reinterpret_cast<float*>(shared + Layout::sums(num_tokens));
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      const unsigned int token = 8 * j + lane / kLanesOfRow;
      if (token >= num_tokens) continue;
      float* place = sums + (warp * num_tokens + token) * Layout::kPitch + kRowsOfProduct * i +
                     lane % kLanesOfRow * 2;
      *reinterpret_cast<float2*>(place) = make_float2(sum[i][2 * j], sum[i][2 * j + 1]);
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  sync_threads<kThreads>();

  // Two values a lane, which four lanes join to 16 bytes of one token. What is q_nope goes to all
  // blocks of the cluster, the rest is turned and stored.
  cluster_wait();
  const unsigned int inbox = base + Layout::kInbox;
  const float query_scale = kQueryFp8 ? CastScale{q_scale_inv, q_scale_value}.load() : 1.0f;
  const unsigned int num_heads = gridDim.x / kCluster;
  constexpr int kQueryBytes = kQueryFp8 ? 1 : 2;
  const auto query_row = [&](unsigned int token) {
    return mqa_q +
           (static_cast<unsigned long long>(token) * num_heads + head) * (kLatentDim * kQueryBytes);
  };
  const auto store_two = [&](char* row, unsigned int column, float low, float high) {
    if constexpr (kQueryFp8) {
      *reinterpret_cast<unsigned short*>(row + column) = static_cast<unsigned short>(
          to_e4m3x2(multiply(low, query_scale), multiply(high, query_scale)));
    } else {
      *reinterpret_cast<unsigned int*>(row + 2 * column) = narrow_pair(low, high, T{});
    }
  };
  constexpr unsigned int kWords = kRows / 2;
#pragma unroll 1
  for (unsigned int first = 0; first < num_tokens * kWords; first += kThreads) {
    const unsigned int place = min(first + threadIdx.x, num_tokens * kWords - 1);
    const unsigned int token = place / kWords;
    const unsigned int row = place % kWords * 2;
    const float* part = sums + token * Layout::kPitch + row;
    float low = part[0];
    float high = part[1];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float2 more = *reinterpret_cast<const float2*>(part + w * num_tokens * Layout::kPitch);
      low = add(low, more.x);
      high = add(high, more.y);
    }
    const unsigned int word = narrow_pair(low, high, T{});
    float words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = __uint_as_float(__shfl_sync(0xffffffffu, word, (lane & ~3u) + i));
    }
    if (first + threadIdx.x >= num_tokens * kWords) continue;
    const unsigned int head_row = rank * kRows + row;
    if (head_row < kNopeDim) {
      const unsigned int target =
          inbox + token * Layout::kInboxPitch + head_row / kSendElements * (2 * kSendElements);
#pragma unroll
      for (int i = 0; i < kCluster; i += 4) {
        if (i + lane % 4 < kCluster) send_to_rank(target, inbox_barrier, i + lane % 4, words);
      }
    } else {
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
  constexpr int kColumnGroups = kColumns / kRowsOfProduct;
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
      const unsigned int place = inbox + i * 32;
      if constexpr (kHalves > 1) {
        load_matrices(query, place + lane % 16 * Layout::kInboxPitch + lane / 16 * 16);
      } else {
        unsigned int halves[2];
        load_matrices(halves, place + lane % 8 * Layout::kInboxPitch + lane / 8 % 2 * 16);
        query[0] = halves[0];
        query[2] = halves[1];
      }
      multiply_add(result[i % 2], query, operand[i / 2][i % 2 * 2], operand[i / 2][i % 2 * 2 + 1],
                   T{});
    }
    const unsigned int column = rank * kColumns + group * kRowsOfProduct + lane % kLanesOfRow * 2;
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      const unsigned int token = 8 * j + lane / kLanesOfRow;
      if (token >= num_tokens) continue;
      store_two(query_row(token), column, add(result[0][2 * j], result[1][2 * j]),
                add(result[0][2 * j + 1], result[1][2 * j + 1]));
    }
  }
}

}  // namespace k3cupy
