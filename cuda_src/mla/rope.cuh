// Rotary position embedding, GPT-J style: neighbouring elements form a pair.
#pragma once

#include "common/chunk.cuh"
#include "common/float32.cuh"
#include "mla/slots.cuh"

namespace k3cupy {

constexpr int kRopePairs = 32;                   // a 64-wide head: 32 cosines, then 32 sines
constexpr int kChunkPairs = kChunkElements / 2;  // pairs that one thread turns

// Where the angles of a token are: its position, clamped, is a row of the table.
struct RopeTable {
  const char* positions;
  unsigned int position_is_wide;
  long long position_stride;
  const char* cos_sin_cache;
  long long table_stride;
  long long max_position;

  __device__ __forceinline__ const float* row_of(unsigned int token) const {
    long long p =
        Index(positions + token * position_stride, position_is_wide).value(position_is_wide);
    p = p < 0 ? 0 : (p >= max_position ? max_position - 1 : p);
    return reinterpret_cast<const float*>(cos_sin_cache + p * table_stride);
  }
};

struct ChunkAngles {
  float cosine[kChunkPairs];
  float sine[kChunkPairs];
};

// `table_row` points at the 64 fp32 values of one position; `chunk` counts from 0 inside the head.
template <bool kVector>
__device__ __forceinline__ ChunkAngles load_angles(const float* table_row, int chunk) {
  ChunkAngles angles;
  const float* cosine = table_row + chunk * kChunkPairs;
  const float* sine = cosine + kRopePairs;
  if constexpr (kVector) {
    const float4 c = __ldcg(reinterpret_cast<const float4*>(cosine));
    const float4 s = __ldcg(reinterpret_cast<const float4*>(sine));
    angles = {{c.x, c.y, c.z, c.w}, {s.x, s.y, s.z, s.w}};
  } else {
#pragma unroll
    for (int i = 0; i < kChunkPairs; ++i) {
      angles.cosine[i] = __ldcg(cosine + i);
      angles.sine[i] = __ldcg(sine + i);
    }
  }
  return angles;
}

__device__ __forceinline__ void rotate(float (&value)[kChunkElements], const ChunkAngles& angles) {
#pragma unroll
  for (int i = 0; i < kChunkPairs; ++i) {
    const float x0 = value[2 * i];
    const float x1 = value[2 * i + 1];
    const float c = angles.cosine[i];
    const float s = angles.sine[i];
    value[2 * i] = subtract(multiply(x0, c), multiply(x1, s));
    value[2 * i + 1] = add(multiply(x0, s), multiply(x1, c));
  }
}

}  // namespace k3cupy
