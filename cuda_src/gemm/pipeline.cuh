// Asynchronous 16-byte copies into shared memory, and the barriers on which their arrival is seen.
//
// Rows lie in shared memory as they do in global memory, but the 16-byte chunks of row r stand at
// places chunk ^ (r % 8): then eight rows of one chunk, which a tensor-core load fetches together,
// touch all banks. Padding the rows instead would do that too, and would let the copy engine fetch a
// row with one instruction; it was measured, and rows that start off a multiple of 128 bytes halve
// what the engine delivers.
#pragma once

namespace k3cupy {

constexpr int kCopyBytes = 16;
constexpr int kSwizzleRows = 8;

__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
  return static_cast<unsigned int>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ unsigned int swizzled(unsigned int chunk, unsigned int row) {
  return (chunk ^ (row % kSwizzleRows)) * kCopyBytes;
}

// Where a 16-byte chunk of a row stands in the stage of kRows rows at `target`: panels of
// kPanelElements columns, each with all rows, one behind the other. A panel may be the whole row.
template <int kRows, int kRowElements, int kPanelElements>
__device__ __forceinline__ unsigned int chunk_place(unsigned int target, unsigned int row,
                                                    unsigned int chunk) {
  constexpr unsigned int kPanelBytes = 2 * kPanelElements;
  constexpr unsigned int kPanelChunks = kPanelBytes / kCopyBytes;
  if constexpr (kPanelElements == kRowElements) {
    return target + row * kPanelBytes + swizzled(chunk, row);
  } else {
    return target + (chunk / kPanelChunks * kRows + row) * kPanelBytes +
           swizzled(chunk % kPanelChunks, row);
  }
}

__device__ __forceinline__ void copy_chunk_async(unsigned int target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
               : "memory");
}

// The same where `inside`; else 16 bytes of zeros, and nothing is read.
__device__ __forceinline__ void copy_chunk_or_zeros_async(unsigned int target, const void* source,
                                                          bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(inside ? kCopyBytes : 0)
               : "memory");
}

// Ends a group of a thread's copies, and waits until all but its last kGroups groups have arrived.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kGroups>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// A block barrier for the first kThreads threads alone.
template <int kThreads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

__device__ __forceinline__ void store_shared(unsigned int target, unsigned short value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(target), "h"(value) : "memory");
}

__device__ __forceinline__ void init_barrier(unsigned int barrier, unsigned int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(unsigned int barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}

// Arrives, and announces how many bytes will come by the copy engine.
__device__ __forceinline__ void arrive_expecting(unsigned int barrier, unsigned int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Arrives once every asynchronous copy that this thread issued so far is done.
__device__ __forceinline__ void arrive_after_copies(unsigned int barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the barrier's phase of this parity.
__device__ __forceinline__ void wait_barrier(unsigned int barrier, unsigned int parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "  @!done bra AGAIN; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred done;\n"
      "AGAIN: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "  @!done bra AGAIN; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Copies up to kRows rows of kRowElements 16-bit values, kThreads threads together, swizzled. Only
// `rows` rows and `bytes` bytes of each are read; the rest of these rows becomes zeros with kZeroed,
// and stays as it was without.
template <int kRows, int kRowElements, int kPanelElements, bool kZeroed, int kThreads>
__device__ __forceinline__ void copy_rows_async(unsigned int target, const char* source,
                                                long long stride, unsigned int rows,
                                                unsigned int bytes, unsigned int thread) {
  constexpr unsigned int kRowBytes = 2 * kRowElements;
  constexpr unsigned int kRowChunks = kRowBytes / kCopyBytes;
  const auto copy = [&](unsigned int row, unsigned int chunk, const char* from, bool inside) {
    if constexpr (kZeroed) {
      if (row < rows) {
        copy_chunk_or_zeros_async(
            chunk_place<kRows, kRowElements, kPanelElements>(target, row, chunk), from, inside);
      }
    } else {
      if (inside && row < rows) {
        copy_chunk_async(chunk_place<kRows, kRowElements, kPanelElements>(target, row, chunk),
                         from);
      }
    }
  };
  if constexpr (kRowChunks <= kThreads) {
    constexpr unsigned int kRowsAtOnce = kThreads / kRowChunks;
    static_assert(kRowsAtOnce * kRowChunks == kThreads, "a thread stays in its column");
    const unsigned int first = thread / kRowChunks;
    const unsigned int chunk = thread % kRowChunks;
    const bool inside = chunk * kCopyBytes < bytes;
    source += first * stride + chunk * kCopyBytes;
#pragma unroll
    for (unsigned int i = 0; i < kRows; i += kRowsAtOnce) {
      copy(first + i, chunk, source, inside);
      source += kRowsAtOnce * stride;
    }
  } else {
    static_assert(kRowChunks % kThreads == 0, "the threads walk a row in whole steps");
#pragma unroll
    for (unsigned int row = 0; row < kRows; ++row) {
#pragma unroll
      for (unsigned int first = 0; first < kRowChunks; first += kThreads) {
        const unsigned int chunk = first + thread;
        copy(row, chunk, source + chunk * kCopyBytes, chunk * kCopyBytes < bytes);
      }
      source += stride;
    }
  }
}

}  // namespace k3cupy
