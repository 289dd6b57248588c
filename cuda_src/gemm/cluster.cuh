// Blocks of a cluster: their common barrier, and what they send each other (sm_90+).
#pragma once

namespace k3cupy {

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

// Stores four floats at the place that `address` has in this block's shared memory, but in block
// `rank`, at a multiple of 16 bytes. They arrive by themselves, and count as 16 bytes at the barrier
// that stands at the place `barrier` there.
__device__ __forceinline__ void send_to_rank(unsigned int address, unsigned int barrier,
                                             unsigned int rank, const float (&values)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 remote, remote_barrier;\n"
      "  mapa.shared::cluster.u32 remote, %0, %2;\n"
      "  mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%3, %4, %5, %6}, "
      "[remote_barrier]; }" ::"r"(address),
      "r"(barrier), "r"(rank), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
      : "memory");
#endif
}

// Barriers that this thread has set up are seen by the copy engine, and by the blocks of the cluster
// that wait at its barrier.
__device__ __forceinline__ void show_barriers_to_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

}  // namespace k3cupy
