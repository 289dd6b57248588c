// One row of the paged latent cache: 512 values without position, then 64 with RoPE. Three formats:
//   kSame   576 values of the inputs' type
//   kFp8    576 e4m3 codes, one scale for the whole cache
//   kDsMla  656 bytes: 512 e4m3 codes in four tiles of 128, four fp32 tile scales at byte 512,
//           64 values of the inputs' type at byte 528
#pragma once

#include "common/chunk.cuh"
#include "common/fp8.cuh"

namespace k3cupy {

constexpr int kLoraRank = 512;
constexpr int kRopeDim = 64;
constexpr int kLatentDim = kLoraRank + kRopeDim;
constexpr int kNopeChunks = kLoraRank / kChunkElements;
constexpr int kRopeChunks = kRopeDim / kChunkElements;
constexpr int kRowChunks = kNopeChunks + kRopeChunks;
static_assert(kRowChunks == 72, "a latent row is 72 chunks");

enum class CacheFormat { kSame, kFp8, kDsMla };

constexpr int kTileElements = 128;
constexpr int kTileLanes = kTileElements / (2 * kChunkElements);
constexpr int kTileScaleOffset = kLoraRank;
constexpr int kDsMlaRopeOffset = kTileScaleOffset + 4 * (kLoraRank / kTileElements);
static_assert(4 * kTileLanes == 32, "a warp has a row's four tiles, two chunks a lane");
static_assert(kDsMlaRopeOffset == 528, "the RoPE part starts at byte 528");

// A tile's scale is 2^ceil(log2(max(amax / 448, 1e-4))), read off the exponent bits, which is exact
// where a logarithm is not: 448 is 1.75 * 2^8, so the exponent is that of amax less 8, plus one
// where the mantissa is past 1.75; 1e-4 puts the floor at 2^-13. An infinite amax gives an infinite
// scale, whose reciprocal is zero.
struct TileScale {
  float scale;
  float inverse;

  __device__ __forceinline__ explicit TileScale(float amax) {
    constexpr int kOne = 1 << 23;
    const int bits = static_cast<int>(__float_as_uint(amax));
    const int rounded = (bits + 0x1fffff) & 0x7f800000;
    const int exponent = max(rounded - 8 * kOne, (127 - 13) * kOne);
    const bool infinite = bits == 0x7f800000;
    scale = infinite ? amax : __int_as_float(exponent);
    inverse = infinite ? 0.0f : __int_as_float(254 * kOne - exponent);
  }
};

// Magnitudes of two 16-bit values, and the larger ones of two such pairs. NaN has no part in it.
__device__ __forceinline__ unsigned int magnitudes(unsigned int pair) {
  return pair & 0x7fff7fffu;
}

__device__ __forceinline__ unsigned int max_pair(unsigned int a, unsigned int b, __nv_bfloat16) {
  unsigned int largest;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
  return largest;
}

__device__ __forceinline__ unsigned int max_pair(unsigned int a, unsigned int b, __half) {
  unsigned int largest;
  asm("max.f16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
  return largest;
}

// The largest magnitude in a tile, of which each of kTileLanes neighbouring lanes has two chunks. All
// lanes of the warp call it together. A tile of nothing but NaN counts as zeros.
template <typename T>
__device__ __forceinline__ float largest_of_tile(const Chunk (&chunk)[2]) {
  unsigned int pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i] =
        max_pair(max_pair(magnitudes(chunk[i].word[0]), magnitudes(chunk[i].word[1]), T{}),
                 max_pair(magnitudes(chunk[i].word[2]), magnitudes(chunk[i].word[3]), T{}), T{});
  }
  unsigned int largest = max_pair(pair[0], pair[1], T{});
#pragma unroll
  for (int step = kTileLanes / 2; step > 0; step /= 2) {
    largest = max_pair(largest, __shfl_xor_sync(0xffffffffu, largest, step), T{});
  }
  largest = max_pair(largest, largest >> 16, T{});
  return widen_one<T>(max_pair(largest, 0u, T{}));
}

// Stores two neighbouring chunks as codes. Without the instruction for a code the two are stored one
// by one, which takes fewer registers.
template <typename T, bool kVector>
__device__ __forceinline__ void store_pair(char* place, const Chunk (&pair)[2], float scale_inv) {
  uint2 codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float value[kChunkElements];
    widen<T>(pair[i], value);
    codes[i] = to_e4m3(value, scale_inv);
    if constexpr (!kVector || !kHasFp8Instruction) {
      store_codes<kVector>(place + i * kChunkElements, codes[i]);
    }
  }
  if constexpr (kVector && kHasFp8Instruction) {
    *reinterpret_cast<uint4*>(place) = make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
  }
}

// Writes a lane's two chunks of a tile and, from the tile's first lane, the tile's scale.
template <typename T, bool kVector>
__device__ __forceinline__ void store_tile_chunks(char* row, int lane, float amax,
                                                  const Chunk (&chunk)[2]) {
  const TileScale tile(amax);
  store_pair<T, kVector>(row + lane * 2 * kChunkElements, chunk, tile.inverse);
  if (lane % kTileLanes == 0) {
    store_float<kVector>(row + kTileScaleOffset + 4 * (lane / kTileLanes), tile.scale);
  }
}

}  // namespace k3cupy
