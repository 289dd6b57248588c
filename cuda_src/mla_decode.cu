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
// Two tokens may name one slot. Then the row must come whole from one of them, so the warp of a token
// looks whether a later token has its slot, and leaves the row to it: the last one wins. The host
// launches at most a few thousand tokens at a time, which bounds the search.
//
// Three mappings of threads to the chunks of the query rows give the same bits:
//   kSplit 0   flat: the block's rows side by side, 512-wide parts in whole warps, then the RoPE
//              parts; no idle lane. kChunksPerThread chunks a thread.
//   kSplit 1   one warp walks a row: up to three chunks a lane.
//   kSplit 3   three warps share a row: at most one chunk a lane, 24 of 96 lanes idle.

#include "common/chunk.cuh"
#include "common/fast_divide.cuh"
#include "common/fp8.cuh"
#include "common/latent_row.cuh"
#include "common/pdl.cuh"
#include "common/rope.cuh"
#include "common/slots.cuh"

namespace k3cupy {

constexpr int kWarpChunks = (kRowChunks + 31) / 32;  // a lane's share when one warp walks a row

// Which row of its part of the grid a thread works on, and its chunks first, first + step, ...
struct RowChunks {
  unsigned int row;
  int first;
  int step;
};

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
    static_assert(kChunksPerThread == (kSplit == 1 ? kWarpChunks : 1),
                  "72 chunks over 32 or 96 lanes");
    const unsigned int warp = block * (kThreads / 32) + thread / 32;
    return {warp / kSplit, static_cast<int>((warp % kSplit) * 32 + thread % 32), 32};
  }
}

// Warps that cover the latency of a large batch, and registers enough that nothing spills (48 to 56).
constexpr int kThreadsPerMultiprocessor = 1280;

constexpr unsigned int kFullWarp = 0xffffffffu;

// Byte strides. Rows that are moved by 128-bit accesses are less than 4 GiB apart (the host sees to
// it), which saves half of the argument bytes and of the multiplications.
template <bool kVector>
struct StrideOf {
  using Type = unsigned int;
};
template <>
struct StrideOf<false> {
  using Type = long long;
};

template <typename Stride>
__device__ __forceinline__ long long offset_of(unsigned int index, Stride stride) {
  if constexpr (sizeof(Stride) == 4) {
    return static_cast<long long>(static_cast<unsigned long long>(index) * stride);
  } else {
    return static_cast<long long>(index) * stride;
  }
}

// A scale is a device pointer, or a value where the caller gave a Python float.
__device__ __forceinline__ float load_scale(const float* pointer, float value) {
  return pointer != nullptr ? *pointer : value;
}

template <bool kVector, int kChunksPerThread>
__device__ __forceinline__ void load_row(Chunk (&chunk)[kChunksPerThread], const RowChunks& map,
                                         const char* nope_row, const char* rope_row) {
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const int c = map.first + i * map.step;
    if (c < kRowChunks) {
      chunk[i] = load_chunk_streaming<kVector>(c < kNopeChunks
                                                   ? nope_row + c * kChunkBytes
                                                   : rope_row + (c - kNopeChunks) * kChunkBytes);
    }
  }
}

// Turns the RoPE part, narrows, stores. All chunks of a thread go to one row.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, int kChunksPerThread>
__device__ __forceinline__ void store_row(const Chunk (&chunk)[kChunksPerThread],
                                          const RowChunks& map, char* target, bool write,
                                          float scale_inv, const float* table_row) {
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const int c = map.first + i * map.step;
    if (c >= kRowChunks) continue;
    const bool rotated = kRope && c >= kNopeChunks;
    float value[kChunkElements];
    if (rotated || kFormat != CacheFormat::kSame) widen<T>(chunk[i], value);
    if (rotated) rotate(value, load_angles<kVector>(table_row, c - kNopeChunks));
    if constexpr (kFormat == CacheFormat::kFp8) {
      if (write) store_codes<kVector>(target + c * kChunkElements, to_e4m3(value, scale_inv));
    } else {
      if (kFormat == CacheFormat::kDsMla && c < kNopeChunks) {
        store_tile_chunk<kVector>(target, c, value, write);
      } else if (write) {
        const Chunk result = rotated ? narrow<T>(value) : chunk[i];
        if constexpr (kFormat == CacheFormat::kDsMla) {
          char* place = target + kDsMlaRopeOffset + (c - kNopeChunks) * kChunkBytes;
          if constexpr (kVector) {
            store_chunk<true>(place, result);
          } else {
            store_chunk_bytes(place, result);
          }
        } else {
          store_chunk<kVector>(target + c * kChunkBytes, result);
        }
      }
    }
  }
}

// Arguments stand in the order of their first use, those of a query block first. Strides are bytes.
template <typename T, bool kQueryFp8, CacheFormat kCache, bool kRope, bool kKvInputsReady,
          bool kVector, int kSplit, int kThreads, int kChunksPerThread>
__global__ void __launch_bounds__(kThreads,
                                  (kVector ? kThreadsPerMultiprocessor : kThreads) / kThreads)
    mla_decode_epilogue(
        unsigned int cache_blocks, unsigned int num_query_rows, unsigned int num_heads,
        unsigned int num_heads_magic, const char* ql_nope, const char* q_pe, char* mqa_q,
        typename StrideOf<kVector>::Type ql_nope_token_stride,
        typename StrideOf<kVector>::Type ql_nope_head_stride,
        typename StrideOf<kVector>::Type q_pe_token_stride,
        typename StrideOf<kVector>::Type q_pe_head_stride, unsigned int num_heads_shift,
        float q_scale_value, const float* q_scale_inv,
        //
        const char* kv_c_normed, const char* k_pe, const char* slot_mapping, char* kv_cache,
        typename StrideOf<kVector>::Type kv_c_stride, typename StrideOf<kVector>::Type k_pe_stride,
        typename StrideOf<kVector>::Type cache_block_stride,
        typename StrideOf<kVector>::Type cache_token_stride, unsigned int num_tokens,
        unsigned int num_slots, unsigned int block_size, unsigned int block_size_magic,
        unsigned int block_size_shift, unsigned int slot_is_wide, long long slot_stride,
        const float* cache_scale_inv, float cache_scale_value,
        //
        unsigned int position_is_wide, const char* positions, const char* cos_sin_cache,
        long long position_stride, long long table_stride, long long max_position) {
  static_assert(!(kQueryFp8 && kCache == CacheFormat::kDsMla), "ds_mla keeps a 16-bit query");
  constexpr CacheFormat kQuery = kQueryFp8 ? CacheFormat::kFp8 : CacheFormat::kSame;

  // The table row of a token's position, read after the wait by the threads that rotate.
  const auto table_row_of = [&](unsigned int token, bool needed) -> const float* {
    if (!kRope || !needed) return nullptr;
    long long p =
        Index(positions + token * position_stride, position_is_wide).value(position_is_wide);
    p = p < 0 ? 0 : (p >= max_position ? max_position - 1 : p);
    return reinterpret_cast<const float*>(cos_sin_cache + p * table_stride);
  };

  // Every block waits, also one that has nothing to store, so that this kernel never ends before
  // its predecessor: the consumer relies on both.
  if (blockIdx.x < cache_blocks) {
    constexpr unsigned int kWarps = kThreads / 32;
    const RowChunks map = {blockIdx.x * kWarps + threadIdx.x / 32,
                           static_cast<int>(threadIdx.x % 32), 32};
    const unsigned int token = map.row;
    const char* nope_row = kv_c_normed + offset_of(token, kv_c_stride);
    const char* rope_row = k_pe + offset_of(token, k_pe_stride);
    if constexpr (!kKvInputsReady) wait_for_predecessor(nope_row, rope_row);
    if (threadIdx.x >= 32 * kWarps || token >= num_tokens) return;
    Chunk chunk[kWarpChunks];
    load_row<kVector>(chunk, map, nope_row, rope_row);
    const Index own(slot_mapping + token * slot_stride, slot_is_wide);
    const unsigned int next = token + 1 + threadIdx.x % 32;
    const LaterSlots later(next, slot_mapping, slot_stride, num_tokens);
    const float scale_inv =
        kCache == CacheFormat::kFp8 ? load_scale(cache_scale_inv, cache_scale_value) : 1.0f;
    const float* table_row = table_row_of(token, true);
    const long long slot = own.value(slot_is_wide);
    const unsigned int slot_low = static_cast<unsigned int>(slot);
    bool may_be = later.may_have(slot_low, next, num_tokens);
    for (unsigned int other = next + LaterSlots::kReach; other < num_tokens;
         other += LaterSlots::kReach) {
      const LaterSlots more(other, slot_mapping, slot_stride, num_tokens);
      may_be |= more.may_have(slot_low, other, num_tokens);
    }
    bool overwritten = false;
    if (__any_sync(kFullWarp, may_be)) {
      bool same = false;
      for (unsigned int other = next; other < num_tokens; other += 32) {
        same |= Index(slot_mapping + other * slot_stride, slot_is_wide).value(slot_is_wide) == slot;
      }
      overwritten = __any_sync(kFullWarp, same);
    }
    // A slot outside the cache is skipped like padding.
    const bool write = slot >= 0 && slot < num_slots && !overwritten;
    const unsigned int in_range = write ? static_cast<unsigned int>(slot) : 0u;
    const unsigned int block = quotient(in_range, block_size_magic, block_size_shift);
    char* target = kv_cache + offset_of(block, cache_block_stride) +
                   offset_of(in_range - block * block_size, cache_token_stride);
    store_row<T, kCache, kRope, kVector>(chunk, map, target, write, scale_inv, table_row);
  } else {
    const RowChunks map = map_thread<kSplit, kThreads, kChunksPerThread>(blockIdx.x - cache_blocks);
    const unsigned int token = quotient(map.row, num_heads_magic, num_heads_shift);
    const unsigned int head = map.row - token * num_heads;
    const char* nope_row =
        ql_nope + offset_of(token, ql_nope_token_stride) + offset_of(head, ql_nope_head_stride);
    const char* rope_row =
        q_pe + offset_of(token, q_pe_token_stride) + offset_of(head, q_pe_head_stride);
    wait_for_predecessor(nope_row, rope_row);
    if (map.row >= num_query_rows) return;
    Chunk chunk[kChunksPerThread];
    load_row<kVector>(chunk, map, nope_row, rope_row);
    const float scale_inv = kQueryFp8 ? load_scale(q_scale_inv, q_scale_value) : 1.0f;
    const float* table_row = table_row_of(token, kSplit != 0 || map.first >= kNopeChunks);
    constexpr int kRowBytes = kLatentDim * (kQueryFp8 ? 1 : 2);
    char* target = mqa_q + static_cast<unsigned long long>(map.row) * kRowBytes;
    store_row<T, kQuery, kRope, kVector>(chunk, map, target, true, scale_inv, table_row);
  }
}

}  // namespace k3cupy
