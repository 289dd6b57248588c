// One row of the paged latent cache: 512 values without position, then 64 with RoPE. Three formats:
//   kSame   576 values of the inputs' type
//   kFp8    576 e4m3 codes, one scale for the whole cache
//   kDsMla  656 bytes: 512 e4m3 codes in four tiles of 128, four fp32 tile scales at byte 512,
//           64 values of the inputs' type at byte 528
#pragma once

#include "chunk.cuh"
#include "fp8.cuh"

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
constexpr int kTileLanes = kTileElements / kChunkElements;
constexpr int kTileScaleOffset = kLoraRank;
constexpr int kDsMlaRopeOffset = kTileScaleOffset + 4 * (kLoraRank / kTileElements);
static_assert(kTileLanes == 16, "a tile is one aligned half of a warp");
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

// Writes one chunk of a tile and, from the tile's first lane, its scale. All 16 lanes of the tile
// must call this together. NaN has no part in the maximum, but its own element stays NaN.
template <bool kVector>
__device__ __forceinline__ void store_tile_chunk(char* row, int chunk,
                                                 const float (&value)[kChunkElements], bool write) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) amax = fmaxf(amax, fabsf(value[i]));
  const unsigned int tile_mask = 0xffffu << (threadIdx.x & kTileLanes);
#pragma unroll
  for (int step = kTileLanes / 2; step > 0; step /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(tile_mask, amax, step));
  }
  if (!write) return;
  const TileScale tile(amax);
  store_codes<kVector>(row + chunk * kChunkElements, to_e4m3(value, tile.inverse));
  if (chunk % kTileLanes == 0) {
    store_float<kVector>(row + kTileScaleOffset + 4 * (chunk / kTileLanes), tile.scale);
  }
}

}  // namespace k3cupy
