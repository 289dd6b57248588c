// Boxes of a matrix, fetched by the copy engine as a tensor map describes them (sm_90+).
#pragma once

namespace k3cupy {

// What the driver encodes of a matrix in global memory (CUtensorMap); an argument of the kernel.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// Brings the map itself to the copy engine, which would fetch it with the first box.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Copies a box of a matrix, as the map describes it, to the place `target` of shared memory; what lies
// outside the matrix arrives as zeros. All bytes of the box count at `barrier`.
__device__ __forceinline__ void copy_box(unsigned int target, const TensorMap* map,
                                         unsigned int column, unsigned int row,
                                         unsigned int barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
#endif
}

}  // namespace k3cupy
