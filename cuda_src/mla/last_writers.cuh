// Which tokens of a block write their cache row: those in range whose slot no later token names.
// Their slots go into a hash table in shared memory, with the last token seen for each; then all
// threads look up the slots of the later tokens of the launch, each of which is read once a block.
#pragma once

#include "mla/slots.cuh"

namespace k3cupy {

struct LastWriters {
  static constexpr unsigned int kMaxTokens = 512;
  static constexpr unsigned int kEntries = 2 * kMaxTokens;  // half of it stays empty
  static constexpr unsigned int kHashShift = 22;
  static constexpr int kBatch = 8;  // slots that a thread has under way
  static_assert(kEntries == 1u << (32 - kHashShift), "the hash is an index of the table");

  unsigned int slot[kEntries];
  unsigned int last[kEntries];
  unsigned int own[kMaxTokens];

  // Fills the table for tokens first, ..., first + count - 1. All threads of the block call it, once.
  template <int kThreads>
  __device__ __forceinline__ void find(unsigned int first, unsigned int count,
                                       const SlotMapping& slots, unsigned int num_slots) {
    unsigned int next = first + count + threadIdx.x;
    SlotBatch<kBatch, kThreads> later(next, slots);
    for (unsigned int e = threadIdx.x; e < kEntries; e += kThreads) {
      slot[e] = kNoSlot;
      last[e] = 0;
    }
    __syncthreads();
    for (unsigned int i = threadIdx.x; i < count; i += kThreads) {
      const SlotBatch<1, kThreads> mine(first + i, slots);
      own[i] = mine.in_range(0, num_slots);
      if (own[i] != kNoSlot) atomicMax(&last[claim(own[i])], first + i);
    }
    __syncthreads();
    while (next < slots.num_tokens) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const unsigned int other = later.in_range(i, num_slots);
        const unsigned int e = other == kNoSlot ? kNoSlot : entry_of(other);
        if (e != kNoSlot) atomicMax(&last[e], next + i * kThreads);
      }
      next += kBatch * kThreads;
      later = SlotBatch<kBatch, kThreads>(next, slots);
    }
    __syncthreads();
  }

  __device__ __forceinline__ unsigned int slot_of(unsigned int i) const { return own[i]; }

  // Whether token first + i writes; after `find`.
  __device__ __forceinline__ bool writes(unsigned int i, unsigned int first) const {
    return own[i] != kNoSlot && last[entry_of(own[i])] == first + i;
  }

 private:
  // Neighbouring slots are the usual case; the multiplication sets them apart.
  __device__ __forceinline__ static unsigned int hash(unsigned int key) {
    return (key * 0x9e3779b1u) >> kHashShift;
  }

  __device__ __forceinline__ unsigned int claim(unsigned int key) {
    unsigned int e = hash(key);
    while (true) {
      const unsigned int before = atomicCAS(&slot[e], kNoSlot, key);
      if (before == kNoSlot || before == key) return e;
      e = (e + 1) % kEntries;
    }
  }

  // The entry of a slot, kNoSlot where it has none. The table is never full, so this ends.
  __device__ __forceinline__ unsigned int entry_of(unsigned int key) const {
    unsigned int e = hash(key);
    while (true) {
      const unsigned int found = slot[e];
      if (found == key) return e;
      if (found == kNoSlot) return kNoSlot;
      e = (e + 1) % kEntries;
    }
  }
};

}  // namespace k3cupy
