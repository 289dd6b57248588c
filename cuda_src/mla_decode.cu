// The MLA decode epilogue: everything between the absorbed-query matmul and decode attention.
//
//   mqa_q[b, h]        = [ql_nope[b, h] | rope(q_pe[b, h])]      576 wide, 16-bit or e4m3
//   cache[slot(b)]     = [kv_c_normed[b] | rope(k_pe[b])]        one row of the paged latent cache
//
// It moves bytes and hardly computes, and for a decode batch there are few of them: its time is the
// latency of launch -> arguments -> one load -> one store -> release, not bandwidth. Hence:
//   - A row is 72 chunks of 8 elements and a thread owns one chunk (or a few, all loaded before the
//     first store), so no load waits for another one.
//   - The predecessor seldom lets us start early, so the way to the first load is kept short: cache
//     blocks and query blocks run separate code, each reads only its own arguments, which stand
//     together in the argument block, and the divisions are multiplications.
//   - After the wait the slot, the scale and the data are loaded side by side.
//   - The consumer is released by the end of the blocks: nothing is signalled before the last store.
// The first `cache_blocks` blocks write the cache, whose chain of loads is longer, one warp a row; the
// others write the query.
//
// Of tokens that name one slot the last one writes (cache_insert.cuh). The host launches at most a few
// thousand tokens at a time, which bounds the search.
//
// Three mappings of threads to the chunks of the query rows give the same bits:
//   kSplit 0   flat: the block's rows side by side, 512-wide parts in whole warps, then the RoPE
//              parts; no idle lane. kChunksPerThread chunks a thread.
//   kSplit 1   one warp walks a row, or two neighbouring ones: three or six chunks a lane.
//   kSplit 3   three warps share a row: at most one chunk a lane, 24 of 96 lanes idle.

#include "common/fast_divide.cuh"
#include "common/fp8.cuh"
#include "common/pdl.cuh"
#include "common/strides.cuh"
#include "mla/cache_insert.cuh"
#include "mla/latent_copy.cuh"
#include "mla/rope.cuh"
#include "mla/slots.cuh"

namespace k3cupy {

template <int kSplit, int kChunksPerThread>
constexpr int kRowsOfThread = kSplit == 1 ? kChunksPerThread / kWarpChunks : 1;

// A thread's first row, and its chunks of each of its rows, which are neighbours.
template <int kSplit, int kThreads, int kChunksPerThread>
__device__ __forceinline__ RowChunks map_thread(unsigned int block) {
  const unsigned int thread = threadIdx.x;
  if constexpr (kSplit == 0) {
    constexpr int kRows = kThreads * kChunksPerThread / kRowChunks;
    constexpr int kNopeLanes = kNopeChunks / kChunksPerThread;
    constexpr int kRopeLanes = kRopeChunks / kChunksPerThread;
    constexpr int kNopeThreads = kRows * kNopeLanes;
    static_assert(kRows * kRowChunks == kThreads * kChunksPerThread, "whole rows");
    static_assert(kNopeLanes * kChunksPerThread == kNopeChunks,
                  "a thread's chunks are of one kind");
    static_assert(kRopeLanes * kChunksPerThread == kRopeChunks,
                  "a thread's chunks are of one kind");
    if (thread < kNopeThreads) {
      return {block * kRows + thread / kNopeLanes, static_cast<int>(thread % kNopeLanes),
              kNopeLanes};
    }
    const unsigned int rope = thread - kNopeThreads;
    return {block * kRows + rope / kRopeLanes, kNopeChunks + static_cast<int>(rope % kRopeLanes),
            kRopeLanes};
  } else {
    static_assert(kSplit == 1 || kSplit == 3, "warps a row");
    static_assert(kThreads % 32 == 0, "whole warps");
    static_assert(kSplit == 1 ? kChunksPerThread % kWarpChunks == 0 : kChunksPerThread == 1,
                  "72 chunks over 32 or 96 lanes");
    const unsigned int warp = block * (kThreads / 32) + thread / 32;
    return {warp / kSplit * kRowsOfThread<kSplit, kChunksPerThread>,
            static_cast<int>((warp % kSplit) * 32 + thread % 32), 32};
  }
}

// Warps that cover the latency of a large batch, and registers enough that nothing spills (48 to 56).
constexpr int kThreadsPerMultiprocessor = 1280;

// Arguments are read through lines of 64 bytes, the first of which ends with q_pe's strides: all that a
// query block needs for its loads. Then come those of its stores and of a cache block's loads, then
// those of its stores. Strides are bytes.
template <typename T, bool kQueryFp8, CacheFormat kCache, bool kRope, bool kKvInputsReady,
          bool kVector, int kSplit, int kThreads, int kChunksPerThread>
__global__ void __launch_bounds__(kThreads,
                                  (kVector ? kThreadsPerMultiprocessor : kThreads) / kThreads)
    mla_decode_epilogue(
        unsigned int num_tokens, unsigned int num_heads, unsigned int num_heads_magic,
        unsigned int num_heads_shift, const char* ql_nope, const char* q_pe,
        typename StrideOf<kVector>::Type ql_nope_token_stride,
        typename StrideOf<kVector>::Type ql_nope_head_stride,
        typename StrideOf<kVector>::Type q_pe_token_stride,
        typename StrideOf<kVector>::Type q_pe_head_stride,
        //
        char* mqa_q, const float* q_scale_inv, float q_scale_value, unsigned int slot_is_wide,
        const char* kv_c_normed, const char* k_pe, const char* slot_mapping, long long slot_stride,
        typename StrideOf<kVector>::Type kv_c_stride, typename StrideOf<kVector>::Type k_pe_stride,
        //
        char* kv_cache, typename StrideOf<kVector>::Type cache_block_stride,
        typename StrideOf<kVector>::Type cache_token_stride, unsigned int num_slots,
        unsigned int block_size, unsigned int block_size_magic, unsigned int block_size_shift,
        const float* cache_scale_inv, float cache_scale_value,
        //
        unsigned int position_is_wide, const char* positions, const char* cos_sin_cache,
        long long position_stride, long long table_stride, long long max_position) {
  static_assert(!(kQueryFp8 && kCache == CacheFormat::kDsMla), "ds_mla keeps a 16-bit query");
  constexpr CacheFormat kQuery = kQueryFp8 ? CacheFormat::kFp8 : CacheFormat::kSame;

  const RopeTable table = {positions,     position_is_wide, position_stride,
                           cos_sin_cache, table_stride,     max_position};

  // Every block waits, also one that has nothing to store, so that this kernel never ends before
  // its predecessor: the consumer relies on both. Cache blocks need not where kKvInputsReady: there
  // are always query blocks.
  constexpr unsigned int kWarps = kThreads / 32;
  const unsigned int cache_blocks = (num_tokens + kWarps - 1) / kWarps;
  if (blockIdx.x < cache_blocks) {
    const unsigned int first = blockIdx.x * kWarps;
    const unsigned int token = first + threadIdx.x / 32;
    const char* nope_row = kv_c_normed + offset_of(token, kv_c_stride);
    const char* rope_row = k_pe + offset_of(token, k_pe_stride);
    if constexpr (!kKvInputsReady) wait_for_predecessor(nope_row, rope_row);
    const SlotMapping slots = {slot_mapping, slot_stride, slot_is_wide, num_tokens};
    const PagedCache<kVector> cache = {kv_cache,        cache_block_stride, cache_token_stride,
                                       num_slots,       block_size,         block_size_magic,
                                       block_size_shift};
    insert_row<T, kCache, kRope, kVector, kThreads>(first, nope_row, rope_row, slots, cache,
                                                    {cache_scale_inv, cache_scale_value}, table);
  } else {
    const RowChunks map = map_thread<kSplit, kThreads, kChunksPerThread>(blockIdx.x - cache_blocks);
    constexpr int kRows = kRowsOfThread<kSplit, kChunksPerThread>;
    const char* nope_row[kRows];
    const char* rope_row[kRows];
    unsigned int token[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      token[r] = quotient(map.row + r, num_heads_magic, num_heads_shift);
      const unsigned int head = map.row + r - token[r] * num_heads;
      nope_row[r] = ql_nope + offset_of(token[r], ql_nope_token_stride) +
                    offset_of(head, ql_nope_head_stride);
      rope_row[r] =
          q_pe + offset_of(token[r], q_pe_token_stride) + offset_of(head, q_pe_head_stride);
    }
    wait_for_predecessor(nope_row[0], rope_row[0]);
    if (token[0] >= num_tokens) return;
    Chunk chunk[kRows][kChunksPerThread / kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r == 0 || token[r] < num_tokens) {
        load_row<kQuery, kVector>(chunk[r], map, nope_row[r], rope_row[r]);
      }
    }
    const float scale_inv = kQueryFp8 ? CastScale{q_scale_inv, q_scale_value}.load() : 1.0f;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r > 0 && token[r] >= num_tokens) return;
      const bool turns = kRope && (kSplit != 0 || map.first >= kNopeChunks);
      const float* table_row = turns ? table.row_of(token[r]) : nullptr;
      constexpr int kRowBytes = kLatentDim * (kQueryFp8 ? 1 : 2);
      char* target = mqa_q + static_cast<unsigned long long>(map.row + r) * kRowBytes;
      store_row<T, kQuery, kRope, kVector>(chunk[r], map, target, true, scale_inv, table_row);
    }
  }
}

}  // namespace k3cupy
