// fp32 to fp8 e4m3 ("fn": no infinities, largest finite value 448), round to nearest even.
// Values past the range, infinities among them, saturate; NaN becomes the code 0x7f, never a number.
#pragma once

#include "common/chunk.cuh"
#include "common/float32.cuh"

namespace k3cupy {

constexpr float kFp8E4m3Max = 448.0f;

// A scale is a device pointer, or a value where the caller gave a number.
struct CastScale {
  const float* pointer;
  float value;

  __device__ __forceinline__ float load() const { return pointer != nullptr ? *pointer : value; }
};

// One code without the instruction for it, for GPUs before sm_89. Adding 2^14, whose last place is
// that of the smallest codes, rounds a value below 2^-6; above, the exponent changes its bias from
// 127 to 7 and the last 20 bits are rounded off.
__device__ __forceinline__ unsigned int to_e4m3_by_bits(float value) {
  constexpr unsigned int kLargest = 0x43e00000u;  // 448
  constexpr unsigned int kNormal = 0x3c800000u;   // 2^-6
  constexpr unsigned int kInfinity = 0x7f800000u;
  constexpr unsigned int kBias = 120u << 23;
  const unsigned int bits = __float_as_uint(value);
  const unsigned int magnitude = bits & 0x7fffffffu;
  const unsigned int bounded = magnitude < kLargest ? magnitude : kLargest;
  const unsigned int small = __float_as_uint(add(__uint_as_float(bounded), 16384.0f)) & 0xffu;
  const unsigned int large = (bounded + 0x7ffffu + ((bounded >> 20) & 1u) - kBias) >> 20;
  const unsigned int code = (bounded < kNormal ? small : large) | ((bits >> 24) & 0x80u);
  return magnitude > kInfinity ? 0x7fu : code;
}

#if __CUDA_ARCH__ >= 890
constexpr bool kHasFp8Instruction = true;
#else
constexpr bool kHasFp8Instruction = false;
#endif

// Two codes, `low` in the lower byte.
__device__ __forceinline__ unsigned int to_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return to_e4m3_by_bits(low) | (to_e4m3_by_bits(high) << 8);
#endif
}

__device__ __forceinline__ uint2 to_e4m3(const float (&value)[kChunkElements], float scale_inv) {
  unsigned int pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = to_e4m3x2(multiply(value[2 * i], scale_inv), multiply(value[2 * i + 1], scale_inv));
  }
  return make_uint2(pair[0] | (pair[1] << 16), pair[2] | (pair[3] << 16));
}

// Eight values as a framework casts them: no scale, and NaN keeps its sign (0x7f or 0xff), which is
// taken from the 16-bit values; every other code has it already.
template <typename T>
__device__ __forceinline__ uint2 cast_e4m3(const Chunk& chunk) {
  float value[kChunkElements];
  widen<T>(chunk, value);
  unsigned int codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* part = value + 4 * i;
    const unsigned int signs = __byte_perm(chunk.word[2 * i], chunk.word[2 * i + 1], 0x7531);
    codes[i] =
        to_e4m3x2(part[0], part[1]) | (to_e4m3x2(part[2], part[3]) << 16) | (signs & 0x80808080u);
  }
  return make_uint2(codes[0], codes[1]);
}

}  // namespace k3cupy
