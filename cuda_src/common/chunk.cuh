// A chunk is eight 16-bit values, the unit that one thread moves. Aligned rows move it as one
// 128-bit access; rows that are not 16-byte aligned move it element by element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace k3cupy {

constexpr int kChunkElements = 8;
constexpr int kChunkBytes = 2 * kChunkElements;

struct alignas(16) Chunk {
  unsigned int word[4];
};

// Reads past L1: the values are used once, and under PDL they may be younger than this block.
// Volatile, so that the compiler neither sinks the load below a test that does not need it nor
// moves it above the dependency wait.
template <bool kVector>
__device__ __forceinline__ Chunk load_chunk_streaming(const void* source) {
  Chunk chunk;
  if constexpr (kVector) {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.word[0]), "=r"(chunk.word[1]), "=r"(chunk.word[2]),
                   "=r"(chunk.word[3])
                 : "l"(source));
  } else {
    const unsigned short* element = static_cast<const unsigned short*>(source);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned short low;
      unsigned short high;
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(low) : "l"(element + 2 * i));
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(high) : "l"(element + 2 * i + 1));
      chunk.word[i] = low | (static_cast<unsigned int>(high) << 16);
    }
  }
  return chunk;
}

// Two neighbouring chunks, through L1: a thread's neighbours read 32 bytes further on, so each access
// of a warp takes half of its sectors, and the second finds them where the first has put them.
template <bool kVector>
__device__ __forceinline__ void load_chunk_pair(Chunk (&pair)[2], const char* source) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (kVector) {
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(pair[i].word[0]), "=r"(pair[i].word[1]), "=r"(pair[i].word[2]),
                     "=r"(pair[i].word[3])
                   : "l"(source + i * kChunkBytes));
    } else {
      pair[i] = load_chunk_streaming<false>(source + i * kChunkBytes);
    }
  }
}

// Sixteen bytes past L1, of any address where not kVector.
template <bool kVector>
__device__ __forceinline__ uint4 load_codes_streaming(const void* source) {
  Chunk codes = {};
  if constexpr (kVector) {
    codes = load_chunk_streaming<true>(source);
  } else {
    const unsigned char* byte = static_cast<const unsigned char*>(source);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      unsigned int code;
      asm volatile("ld.global.cg.u8 %0, [%1];" : "=r"(code) : "l"(byte + i));
      codes.word[i / 4] |= code << (8 * (i % 4));
    }
  }
  return make_uint4(codes.word[0], codes.word[1], codes.word[2], codes.word[3]);
}

template <bool kVector>
__device__ __forceinline__ void store_chunk(void* target, const Chunk& chunk) {
  if constexpr (kVector) {
    *static_cast<uint4*>(target) =
        make_uint4(chunk.word[0], chunk.word[1], chunk.word[2], chunk.word[3]);
  } else {
    unsigned short* element = static_cast<unsigned short*>(target);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      element[2 * i] = static_cast<unsigned short>(chunk.word[i]);
      element[2 * i + 1] = static_cast<unsigned short>(chunk.word[i] >> 16);
    }
  }
}

// The same for a target of any byte address, such as the RoPE part of a 656-byte row in a cache with
// an odd row stride.
__device__ __forceinline__ void store_chunk_bytes(void* target, const Chunk& chunk) {
  unsigned char* byte = static_cast<unsigned char*>(target);
#pragma unroll
  for (int i = 0; i < kChunkBytes; ++i) {
    byte[i] = static_cast<unsigned char>(chunk.word[i / 4] >> (8 * (i % 4)));
  }
}

// Eight e4m3 codes, lowest address first.
template <bool kVector>
__device__ __forceinline__ void store_codes(void* target, const uint2& codes) {
  if constexpr (kVector) {
    *static_cast<uint2*>(target) = codes;
  } else {
    unsigned char* byte = static_cast<unsigned char*>(target);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      byte[i] = static_cast<unsigned char>(codes.x >> (8 * i));
      byte[4 + i] = static_cast<unsigned char>(codes.y >> (8 * i));
    }
  }
}

template <bool kVector>
__device__ __forceinline__ void store_float(void* target, float value) {
  if constexpr (kVector) {
    *static_cast<float*>(target) = value;
  } else {
    unsigned char* byte = static_cast<unsigned char*>(target);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      byte[i] = static_cast<unsigned char>(__float_as_uint(value) >> (8 * i));
    }
  }
}

// Widening to fp32 is exact for both types.
__device__ __forceinline__ void widen_pair(unsigned int word, float& low, float& high,
                                           __nv_bfloat16) {
  low = __uint_as_float(word << 16);
  high = __uint_as_float(word & 0xffff0000u);
}

__device__ __forceinline__ void widen_pair(unsigned int word, float& low, float& high, __half) {
  low = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
  high = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
}

template <typename T>
__device__ __forceinline__ void widen(const Chunk& chunk, float (&value)[kChunkElements]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) widen_pair(chunk.word[i], value[2 * i], value[2 * i + 1], T{});
}

// Narrowing rounds to nearest even, two values an instruction. The packed word never becomes a C++
// half: NVRTC 12.9 and 13.0 turn "low byte of the bits of a half" into a conversion to an integer.
__device__ __forceinline__ unsigned int narrow_pair(float low, float high, __nv_bfloat16) {
  unsigned int word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ unsigned int narrow_pair(float low, float high, __half) {
  unsigned int word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

template <typename T>
__device__ __forceinline__ Chunk narrow(const float (&value)[kChunkElements]) {
  Chunk chunk;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    chunk.word[i] = narrow_pair(value[2 * i], value[2 * i + 1], T{});
  }
  return chunk;
}

}  // namespace k3cupy
