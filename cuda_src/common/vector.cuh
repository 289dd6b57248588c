// A vector is four or eight 16-bit values, what one load of 64 or 128 bits brings. Loads are volatile:
// they stay in the order in which a kernel wants them in flight, behind the dependency wait or before.
#pragma once

namespace k3cupy {

template <int kValues>
struct alignas(2 * kValues) Vector {
  static_assert(kValues == 4 || kValues == 8, "a load of 64 or 128 bits");
  unsigned int word[kValues / 2];
};

// For values that are read once: they leave no trace in L1.
__device__ __forceinline__ void load_streaming(Vector<8>& vector, const void* source) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.word[0]), "=r"(vector.word[1]), "=r"(vector.word[2]),
                 "=r"(vector.word[3])
               : "l"(source));
}

__device__ __forceinline__ void load_streaming(Vector<4>& vector, const void* source) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(vector.word[0]), "=r"(vector.word[1])
               : "l"(source));
}

// The same where a warp reads less than the 128 bytes of a line: L2 fetches all of it at once.
__device__ __forceinline__ void load_streaming_lines(Vector<8>& vector, const void* source) {
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.word[0]), "=r"(vector.word[1]), "=r"(vector.word[2]),
                 "=r"(vector.word[3])
               : "l"(source));
}

// For values that the multiprocessor's other blocks read, too: through L1.
__device__ __forceinline__ void load_shared_with_others(Vector<8>& vector, const void* source) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.word[0]), "=r"(vector.word[1]), "=r"(vector.word[2]),
                 "=r"(vector.word[3])
               : "l"(source));
}

__device__ __forceinline__ void load_shared_with_others(Vector<4>& vector, const void* source) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(vector.word[0]), "=r"(vector.word[1])
               : "l"(source));
}

// Value by value, of any address that is a multiple of two.
template <int kValues>
__device__ __forceinline__ void load_elements(Vector<kValues>& vector, const void* source) {
  const unsigned short* element = static_cast<const unsigned short*>(source);
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    unsigned short low;
    unsigned short high;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(low) : "l"(element + 2 * i));
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(high) : "l"(element + 2 * i + 1));
    vector.word[i] = low | (static_cast<unsigned int>(high) << 16);
  }
}

}  // namespace k3cupy
