// RMSNorm of a row: x * rsqrt(mean(x^2) + epsilon) * gain, in fp32, one rounding at the store.
//
// Kernels that norm a latent row must agree to the bit, whatever their lanes hold of it: the squares
// of a chunk are summed in order, then neighbours by the bits of the chunk's number, lowest first.
#pragma once

#include "common/chunk.cuh"
#include "common/float32.cuh"
#include "mla/latent_row.cuh"

namespace k3cupy {

constexpr int kQueryRank = 1536;  // q_lora_rank
constexpr int kQueryChunks = kQueryRank / kChunkElements;
constexpr int kQueryUnits = kQueryChunks / 32;  // a chunk a lane

template <typename T>
__device__ __forceinline__ float sum_of_squares(const Chunk& chunk) {
  float value[kChunkElements];
  widen<T>(chunk, value);
  float sum = multiply(value[0], value[0]);
#pragma unroll
  for (int i = 1; i < kChunkElements; ++i) sum = multiply_add(value[i], value[i], sum);
  return sum;
}

// The sum over the lanes of a warp; all of them call it and get it.
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    value = add(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

// The sum over a latent row, of which a lane has two chunks: neighbours with kPairs, else `lane` and
// `lane` + 32.
template <bool kPairs>
__device__ __forceinline__ float sum_over_latent(float first, float second) {
  if constexpr (kPairs) return sum_over_lanes(add(first, second));
  return add(sum_over_lanes(first), sum_over_lanes(second));
}

// What a row is multiplied with.
template <int kWidth>
__device__ __forceinline__ float norm_scale(float squares, float epsilon) {
  return rsqrtf(add(multiply(squares, 1.0f / kWidth), epsilon));
}

template <typename T>
__device__ __forceinline__ Chunk normed(const Chunk& chunk, float scale, const Chunk& gain) {
  float value[kChunkElements];
  float factor[kChunkElements];
  widen<T>(chunk, value);
  widen<T>(gain, factor);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    value[i] = multiply(multiply(value[i], scale), factor[i]);
  }
  return narrow<T>(value);
}

// Norms a lane's two chunks of a latent row, of which the warp has all.
template <typename T, bool kPairs>
__device__ __forceinline__ void norm_latent(Chunk& first, Chunk& second, const Chunk (&gain)[2],
                                            float epsilon) {
  const float squares =
      sum_over_latent<kPairs>(sum_of_squares<T>(first), sum_of_squares<T>(second));
  const float scale = norm_scale<kLoraRank>(squares, epsilon);
  first = normed<T>(first, scale, gain[0]);
  second = normed<T>(second, scale, gain[1]);
}

}  // namespace k3cupy
