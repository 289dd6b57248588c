// Writing rows of the paged latent cache.
//
// Two tokens may name one slot. Then the row must come whole from one of them, and it comes from the
// last: who writes a row looks whether a later token has its slot, and leaves the row to it.
//   insert_row   a warp writes the row of one token and looks through the later slots by itself: no
//                barrier, right for few tokens;
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

template <typename T, CacheFormat kFormat, bool kRope, bool kVector>
__device__ __forceinline__ void insert_row(unsigned int token, const char* nope_row,
                                           const char* rope_row, const SlotMapping& slots,
                                           const PagedCache<kVector>& cache, const CastScale& scale,
                                           const RopeTable& table) {
  const RowChunks map = {token, static_cast<int>(threadIdx.x % 32), 32};
  Chunk chunk[kWarpChunks];
  load_row<kFormat, kVector>(chunk, map, nope_row, rope_row);
  const Index own(slots.base + token * slots.stride, slots.is_wide);
  const unsigned int next = token + 1 + threadIdx.x % 32;
  const LaterSlots later(next, slots.base, slots.stride, slots.num_tokens);
  const float scale_inv = kFormat == CacheFormat::kFp8 ? scale.load() : 1.0f;
  const float* table_row = kRope ? table.row_of(token) : nullptr;
  const long long slot = own.value(slots.is_wide);
  const unsigned int slot_low = static_cast<unsigned int>(slot);
  bool may_be = later.may_have(slot_low, next, slots.num_tokens);
  for (unsigned int other = next + LaterSlots::kReach; other < slots.num_tokens;
       other += LaterSlots::kReach) {
    const LaterSlots more(other, slots.base, slots.stride, slots.num_tokens);
    may_be |= more.may_have(slot_low, other, slots.num_tokens);
  }
  bool overwritten = false;
  if (__any_sync(kFullWarp, may_be)) {
    bool same = false;
    for (unsigned int other = next; other < slots.num_tokens; other += 32) {
      same |= Index(slots.base + other * slots.stride, slots.is_wide).value(slots.is_wide) == slot;
    }
    overwritten = __any_sync(kFullWarp, same);
  }
  // A slot outside the cache is skipped like padding.
  const bool write = slot >= 0 && slot < cache.num_slots && !overwritten;
  char* target = cache.row(write ? static_cast<unsigned int>(slot) : 0u);
  store_row<T, kFormat, kRope, kVector>(chunk, map, target, write, scale_inv, table_row);
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
