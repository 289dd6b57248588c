// Blocks of a cluster: their common barrier, and stores into each other's shared memory (sm_90+).
#pragma once

namespace k3cupy {

// Arrives at the barrier of the cluster; what was stored before is seen by those who wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Arrives without ordering any memory access: says only that this block has begun.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores a float at the place that `address` has in this block's shared memory, but in block `rank`.
__device__ __forceinline__ void store_to_rank(unsigned int address, unsigned int rank,
                                              float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  st.shared::cluster.f32 [remote], %2; }" ::"r"(address),
      "r"(rank), "f"(value)
      : "memory");
#endif
}

}  // namespace k3cupy
