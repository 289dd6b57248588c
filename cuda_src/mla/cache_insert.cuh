// Writing rows of the paged latent cache.
//
// Two tokens may name one slot. Then the row must come whole from one of them, and it comes from the
// last: who writes a row looks whether a later token has its slot, and leaves the row to it.
//   insert_row   a warp writes the row of one token. The later slots are looked through while the row
//                is on its way, one latency for both: few of them by each warp for its own slot, more
//                by the block's threads together for all of its rows;
//   insert_rows  a block writes the rows of many tokens and looks through the later slots once for
//                all of them (last_writers.cuh), so that the work does not grow with the square.
#pragma once

#include "common/fast_divide.cuh"
#include "common/strides.cuh"
#include "mla/last_writers.cuh"
#include "mla/latent_copy.cuh"
#include "mla/rope.cuh"
#include "mla/slots.cuh"

namespace k3cupy {

constexpr unsigned int kFullWarp = 0xffffffffu;

template <bool kVector>
struct PagedCache {
  using Stride = typename StrideOf<kVector>::Type;

  char* base;
  Stride block_stride;
  Stride token_stride;
  unsigned int num_slots;
  unsigned int block_size;
  unsigned int block_size_magic;
  unsigned int block_size_shift;

  __device__ __forceinline__ char* row(unsigned int slot) const {
    const unsigned int block = quotient(slot, block_size_magic, block_size_shift);
    return base + offset_of(block, block_stride) +
           offset_of(slot - block * block_size, token_stride);
  }
};

// The later slots that a warp loads at once. Of a few batches of them it looks for its own slot alone,
// and no warp waits for another.
constexpr unsigned int kBatch = 32 * LaterSlots::kTokens;

// Whether a token from `first` on has `slot`, which is inside the cache. A lane's share each. Seldom
// called, so it is kept small: what stands between is fetched, too.
__device__ __forceinline__ bool is_named(unsigned int slot, unsigned int first,
                                         const SlotMapping& slots) {
  bool found = false;
#pragma unroll 1
  for (unsigned int other = first; other < slots.num_tokens; other += 32) {
    const Index index(slots.base + other * slots.stride, slots.is_wide);
    found |= index.value(slots.is_wide) == slot;
  }
  return __any_sync(kFullWarp, found);
}

// The row of one token, of at most kBatches * kBatch. All threads of a warp. `change` may change the
// lane's chunks, which are on their way then.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, unsigned int kBatches,
          typename Change>
__device__ __forceinline__ void insert_alone(unsigned int token, const char* nope_row,
                                             const char* rope_row, const SlotMapping& slots,
                                             const PagedCache<kVector>& cache,
                                             const CastScale& scale, const RopeTable& table,
                                             const Change& change) {
  const Index own(slots.base + token * slots.stride, slots.is_wide);
  const RowChunks map = {token, static_cast<int>(threadIdx.x % 32), 32};
  Chunk chunk[kWarpChunks];
  load_row<kFormat, kVector>(chunk, map, nope_row, rope_row);
  const unsigned int next = token + 1 + threadIdx.x % 32;
  LaterSlots later[kBatches];
#pragma unroll
  for (unsigned int i = 0; i < kBatches; ++i) {
    if (token + 1 + i * kBatch < slots.num_tokens) {
      later[i] = LaterSlots(next + i * kBatch, 32, slots);
    }
  }
  const float scale_inv = kFormat == CacheFormat::kFp8 ? scale.load() : 1.0f;
  const float* table_row = kRope ? table.row_of(token) : nullptr;
  change(chunk);
  const long long value = own.value(slots.is_wide);
  const unsigned int slot = static_cast<unsigned int>(value);
  bool may_be = false;
#pragma unroll
  for (unsigned int i = 0; i < kBatches; ++i) {
    if (token + 1 + i * kBatch < slots.num_tokens) may_be |= later[i].may_have(slot);
  }
  // A slot outside the cache is skipped like padding.
  bool write = value >= 0 && value < cache.num_slots;
  if (__builtin_expect(__any_sync(kFullWarp, may_be), 0) && write) {
    write = !is_named(slot, next, slots);
  }
  char* target = cache.row(write ? slot : 0u);
  store_row<T, kFormat, kRope, kVector>(chunk, map, target, write, scale_inv, table_row);
}

// The rows of tokens first, ..., one a warp, of any number. All threads of the block.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, int kThreads>
__device__ __forceinline__ void insert_together(unsigned int first, const char* nope_row,
                                                const char* rope_row, const SlotMapping& slots,
                                                const PagedCache<kVector>& cache,
                                                const CastScale& scale, const RopeTable& table) {
  constexpr unsigned int kRows = kThreads / 32;
  constexpr unsigned int kBlockBatch = kRows * kBatch;
  const unsigned int warp = threadIdx.x / 32;
  const unsigned int lane = threadIdx.x % 32;
  const unsigned int token = first + warp;
  const unsigned int behind = first + kRows;
  if (warp >= kRows || token >= slots.num_tokens) {
    if (behind < slots.num_tokens) __syncthreads_or(0);
    return;
  }
  // A lane has the slot of one of the block's tokens; those of the tokens behind are shared out.
  const bool has_slot = lane < kRows && first + lane < slots.num_tokens;
  const Index index(slots.base + (has_slot ? first + lane : token) * slots.stride, slots.is_wide);
  const RowChunks map = {token, static_cast<int>(lane), 32};
  Chunk chunk[kWarpChunks];
  load_row<kFormat, kVector>(chunk, map, nope_row, rope_row);
  LaterSlots later(behind + threadIdx.x, 32 * kRows, slots);
  const float scale_inv = kFormat == CacheFormat::kFp8 ? scale.load() : 1.0f;
  const float* table_row = kRope ? table.row_of(token) : nullptr;
  const long long value = index.value(slots.is_wide);
  const unsigned int low = static_cast<unsigned int>(value);
  const bool is_inside = has_slot && value >= 0 && value < cache.num_slots;
  const unsigned int inside = __ballot_sync(kFullWarp, is_inside);
  const unsigned int slot = __shfl_sync(kFullWarp, low, warp);
  // The first row is this one if the block's later ones have other slots.
  bool write = (__ballot_sync(kFullWarp, is_inside && low == slot) >> warp) == 1u;
  if (behind < slots.num_tokens) {
    unsigned int named = 0;
    for (unsigned int start = behind;;) {
#pragma unroll
      for (unsigned int row = 0; row < kRows; ++row) {
        if (later.may_have(__shfl_sync(kFullWarp, low, row))) named |= 1u << row;
      }
      start += kBlockBatch;
      if (start >= slots.num_tokens) break;
      later = LaterSlots(start + threadIdx.x, 32 * kRows, slots);
    }
    if (__builtin_expect(__syncthreads_or((named & inside) != 0), 0) && write) {
      write = !is_named(slot, behind + lane, slots);
    }
  }
  char* target = cache.row(write ? slot : 0u);
  store_row<T, kFormat, kRope, kVector>(chunk, map, target, write, scale_inv, table_row);
}

// Leaves chunks as they are.
struct Unchanged {
  template <typename Chunks>
  __device__ __forceinline__ void operator()(Chunks&) const {}
};

// Tokens first, ..., one a warp. All threads of the block call it, behind the dependency wait.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, int kThreads,
          unsigned int kBatches = 2>
__device__ __forceinline__ void insert_row(unsigned int first, const char* nope_row,
                                           const char* rope_row, const SlotMapping& slots,
                                           const PagedCache<kVector>& cache, const CastScale& scale,
                                           const RopeTable& table) {
  if (slots.num_tokens > kBatches * kBatch) {
    insert_together<T, kFormat, kRope, kVector, kThreads>(first, nope_row, rope_row, slots, cache,
                                                          scale, table);
    return;
  }
  const unsigned int token = first + threadIdx.x / 32;
  if (threadIdx.x >= kThreads / 32 * 32 || token >= slots.num_tokens) return;
  insert_alone<T, kFormat, kRope, kVector, kBatches>(token, nope_row, rope_row, slots, cache, scale,
                                                     table, Unchanged{});
}

// Tokens first, ..., first + count - 1, at most LastWriters::kMaxTokens. All threads of the block.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, int kThreads>
__device__ __forceinline__ void insert_rows(
    LastWriters& writers, unsigned int first, unsigned int count, const char* nope,
    typename StrideOf<kVector>::Type nope_stride, const char* rope,
    typename StrideOf<kVector>::Type rope_stride, const SlotMapping& slots,
    const PagedCache<kVector>& cache, const CastScale& scale, const RopeTable& table) {
  constexpr unsigned int kWarps = kThreads / 32;
  constexpr unsigned int kRowsInFlight = 2;
  static_assert(kThreads % 32 == 0, "whole warps");
  writers.find<kThreads>(first, count, slots, cache.num_slots);
  const float scale_inv = kFormat == CacheFormat::kFp8 ? scale.load() : 1.0f;
  for (unsigned int i = threadIdx.x / 32; i < count; i += kRowsInFlight * kWarps) {
    Chunk chunk[kRowsInFlight][kWarpChunks];
    bool write[kRowsInFlight];
    const RowChunks map = {0, static_cast<int>(threadIdx.x % 32), 32};
#pragma unroll
    for (unsigned int r = 0; r < kRowsInFlight; ++r) {
      const unsigned int mine = i + r * kWarps;
      write[r] = mine < count && writers.writes(mine, first);
      if (!write[r]) continue;
      load_row<kFormat, kVector>(chunk[r], map, nope + offset_of(first + mine, nope_stride),
                                 rope + offset_of(first + mine, rope_stride));
    }
#pragma unroll
    for (unsigned int r = 0; r < kRowsInFlight; ++r) {
      if (!write[r]) continue;
      const unsigned int mine = i + r * kWarps;
      const float* table_row = kRope ? table.row_of(first + mine) : nullptr;
      store_row<T, kFormat, kRope, kVector>(chunk[r], map, cache.row(writers.slot_of(mine)), true,
                                            scale_inv, table_row);
    }
  }
}

}  // namespace k3cupy
