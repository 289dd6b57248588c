// A ring of stages in shared memory, which some warps fill while others read. Each stage has two
// barriers, which say when it is full and when it is empty again.
#pragma once

#include "gemm/pipeline.cuh"

namespace k3cupy {

constexpr int kBarrierBytes = 8;

// Where a warp stands in a ring. The parity flips on each round.
struct RingPosition {
  unsigned int stage = 0;
  unsigned int parity = 0;

  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kStages, int kStageBytes>
struct Ring {
  static constexpr int kBarriersBytes = 2 * kBarrierBytes * kStages;
  static constexpr int kBytes = kStages * kStageBytes;

  unsigned int full_barriers;
  unsigned int empty_barriers;
  unsigned int stages;

  __device__ __forceinline__ Ring(unsigned int barriers, unsigned int first_stage)
      : full_barriers(barriers),
        empty_barriers(barriers + kBarrierBytes * kStages),
        stages(first_stage) {}

  __device__ __forceinline__ void init(unsigned int arrivals_full,
                                       unsigned int arrivals_empty) const {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full(s), arrivals_full);
      init_barrier(empty(s), arrivals_empty);
    }
  }

  __device__ __forceinline__ unsigned int full(unsigned int stage) const {
    return full_barriers + kBarrierBytes * stage;
  }

  __device__ __forceinline__ unsigned int empty(unsigned int stage) const {
    return empty_barriers + kBarrierBytes * stage;
  }

  __device__ __forceinline__ unsigned int place(unsigned int stage) const {
    return stages + stage * kStageBytes;
  }

  __device__ __forceinline__ void wait_until_full(const RingPosition& at) const {
    wait_barrier(full(at.stage), at.parity);
  }

  // The first round finds every stage empty: a fresh barrier's previous phase counts as over.
  __device__ __forceinline__ void wait_until_empty(const RingPosition& at) const {
    wait_barrier(empty(at.stage), at.parity ^ 1);
  }

  // A reader is done with a stage.
  __device__ __forceinline__ void release(unsigned int stage) const { arrive(empty(stage)); }

  __device__ __forceinline__ static unsigned int before(unsigned int stage) {
    return stage == 0 ? kStages - 1 : stage - 1;
  }

  __device__ __forceinline__ static void advance(RingPosition& at) { at.advance<kStages>(); }
};

}  // namespace k3cupy
