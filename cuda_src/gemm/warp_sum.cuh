// Sums over the 32 lanes of a warp, of several values at once.
//
// At each step two lanes share the work: one goes on with the first half of the values, the other
// with the second, so that 8 values take 9 exchanges, not 40. The sum of a value is taken over the
// same pairs of lanes (16 apart, then 8, 4, 2, 1) however many there are: its bits do not depend on
// the others.
#pragma once

#include "common/float32.cuh"

namespace k3cupy {

constexpr int kLanes = 32;

// Where the sums of kCount values are in the end: each lane has kPerLane of them, and kCopies
// neighbouring lanes have the same.
template <int kCount, int kCopiesSoFar = kLanes>
struct WarpSums : WarpSums<(kCount + 1) / 2, kCopiesSoFar / 2> {};
template <int kCopiesSoFar>
struct WarpSums<1, kCopiesSoFar> {
  static constexpr int kPerLane = 1;
  static constexpr int kCopies = kCopiesSoFar;
};
template <int kCount>
struct WarpSums<kCount, 1> {
  static constexpr int kPerLane = kCount;
  static constexpr int kCopies = 1;
};
template <>
struct WarpSums<1, 1> {
  static constexpr int kPerLane = 1;
  static constexpr int kCopies = 1;
};

// Leaves the sums first, first + 1, ..., end - 1 in value[0], value[1], ... of a lane; `first` begins
// as 0, `end` as kCount. What an odd half is filled up with counts for nobody.
template <int kCount, int kDistance = kLanes / 2, int kSize>
__device__ __forceinline__ void sum_over_warp(float (&value)[kSize], unsigned int lane,
                                              unsigned int& first, unsigned int& end) {
  if constexpr (kDistance > 0) {
    constexpr int kHalf = (kCount + 1) / 2;
    if constexpr (kCount == 1) {
      value[0] = add(value[0], __shfl_xor_sync(0xffffffffu, value[0], kDistance));
    } else {
      const bool is_upper = lane & kDistance;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float low = value[i];
        const float high = kHalf + i < kCount ? value[kHalf + i] : 0.0f;
        const float given = __shfl_xor_sync(0xffffffffu, is_upper ? low : high, kDistance);
        value[i] = add(is_upper ? high : low, given);
      }
      if (is_upper) {
        first += kHalf;
      } else {
        end = min(end, first + kHalf);
      }
    }
    sum_over_warp<kHalf, kDistance / 2>(value, lane, first, end);
  }
}

}  // namespace k3cupy
