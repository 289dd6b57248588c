// Programmatic dependent launch (PDL): the two instructions that order a kernel between its
// predecessor and its consumer. Both are nothing on GPUs before sm_90, where a launch is always
// fully ordered, and both return at once when the launch does not carry the PDL attribute.
#pragma once

namespace k3cupy {

// Returns once every kernel this one depends on has finished and its writes are visible. Naming the
// addresses of the first loads keeps the compiler from computing them again behind the wait.
__device__ __forceinline__ void wait_for_predecessor(const void* address0, const void* address1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::"l"(address0), "l"(address1) : "memory");
#endif
}

// Lets the consumer's blocks be scheduled; one thread's call counts for its whole block. Behind
// wait_for_predecessor, so that a consumer which was promised something about its predecessor alone
// never runs beside the kernel before that. A consumer that waits before it reads what we write gains
// by an early call; one that relies on our end without waiting needs the call behind a block barrier
// that follows the block's last store.
__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace k3cupy
