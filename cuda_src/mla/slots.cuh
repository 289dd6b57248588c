// Slots and positions: indices that lie in device memory with 32 or 64 bits and any stride.
#pragma once

namespace k3cupy {

constexpr unsigned int kNoSlot = 0xffffffffu;

struct SlotMapping {
  const char* base;
  long long stride;
  unsigned int is_wide;
  unsigned int num_tokens;
};

// One index. The halves are loaded apart and joined at their first use, so that loads issued
// together stay together.
struct Index {
  unsigned int low;
  unsigned int high;

  __device__ __forceinline__ Index(const char* address, unsigned int is_wide) : high(0) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(low) : "l"(address));
    asm volatile(
        "{ .reg .pred wide;\n"
        "  setp.ne.u32 wide, %2, 0;\n"
        "  @wide ld.global.u32 %0, [%1 + 4]; }"
        : "+r"(high)
        : "l"(address), "r"(is_wide));
  }

  __device__ __forceinline__ long long value(unsigned int is_wide) const {
    const unsigned int sign = static_cast<unsigned int>(static_cast<int>(low) >> 31);
    const unsigned long long upper = is_wide != 0 ? high : sign;
    return static_cast<long long>((upper << 32) | low);
  }
};

// The lower halves of the slots of tokens first, first + step, ...: kTokens loads, of which none
// waits for another. A token that does not exist is not read, and has no slot of the cache.
struct LaterSlots {
  static constexpr unsigned int kTokens = 4;

  unsigned int low[kTokens];

  LaterSlots() = default;

  __device__ __forceinline__ LaterSlots(unsigned int first, unsigned int step,
                                        const SlotMapping& slots) {
    const char* address = slots.base + first * slots.stride;
#pragma unroll
    for (unsigned int i = 0; i < kTokens; ++i) {
      low[i] = kNoSlot;
      asm volatile(
          "{ .reg .pred there;\n"
          "  setp.lt.u32 there, %2, %3;\n"
          "  @there ld.global.u32 %0, [%1]; }"
          : "+r"(low[i])
          : "l"(address), "r"(first + step * i), "r"(slots.num_tokens));
      address += step * slots.stride;
    }
  }

  __device__ __forceinline__ bool may_have(unsigned int slot_low) const {
    bool found = false;
#pragma unroll
    for (unsigned int i = 0; i < kTokens; ++i) found |= low[i] == slot_low;
    return found;
  }
};

// The whole slots of tokens first, first + kStep, ...: kCount loads, of which none waits for another,
// past L1 because a block reads a slot once. A token that does not exist is not read.
template <int kCount, int kStep>
struct SlotBatch {
  unsigned int low[kCount];
  unsigned int high[kCount];

  // Two loops, not two predicates: a register that two loads may write waits for the first of them.
  __device__ __forceinline__ SlotBatch(unsigned int first, const SlotMapping& slots) {
    const char* address = slots.base + first * slots.stride;
    const long long step = kStep * slots.stride;
    if (slots.is_wide != 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i, address += step) {
        low[i] = kNoSlot;
        high[i] = 0;
        asm volatile(
            "{ .reg .pred there;\n"
            "  setp.lt.u32 there, %3, %4;\n"
            "  @there ld.global.cg.v2.u32 {%0, %1}, [%2]; }"
            : "+r"(low[i]), "+r"(high[i])
            : "l"(address), "r"(first + kStep * i), "r"(slots.num_tokens));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i, address += step) {
        low[i] = kNoSlot;
        high[i] = 0;
        asm volatile(
            "{ .reg .pred there;\n"
            "  setp.lt.u32 there, %2, %3;\n"
            "  @there ld.global.cg.u32 %0, [%1]; }"
            : "+r"(low[i])
            : "l"(address), "r"(first + kStep * i), "r"(slots.num_tokens));
      }
    }
  }

  // A slot, or kNoSlot for padding and for what lies outside the cache, of fewer than 2^31 slots.
  __device__ __forceinline__ unsigned int in_range(int i, unsigned int num_slots) const {
    return high[i] == 0 && low[i] < num_slots ? low[i] : kNoSlot;
  }
};

}  // namespace k3cupy
