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

// The largest magnitudes in two tiles, `low` in the lower half of the result, of which this lane has
// a chunk each; half a warp has a tile. All lanes of the warp call it together.
template <typename T>
__device__ __forceinline__ unsigned int largest_of_tiles(const Chunk& low, const Chunk& high) {
  const auto of_chunk = [](const Chunk& chunk) {
    return max_pair(max_pair(magnitudes(chunk.word[0]), magnitudes(chunk.word[1]), T{}),
                    max_pair(magnitudes(chunk.word[2]), magnitudes(chunk.word[3]), T{}), T{});
  };
  const unsigned int a = of_chunk(low);
  const unsigned int b = of_chunk(high);
  unsigned int largest = max_pair(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), T{});
#pragma unroll
  for (int step = kTileLanes / 2; step > 0; step /= 2) {
    largest = max_pair(largest, __shfl_xor_sync(0xffffffffu, largest, step), T{});
  }
  return max_pair(largest, 0u, T{});  // a tile of nothing but NaN counts as zeros
}

// Writes one chunk of a tile whose largest magnitude is known, and from its first lane its scale.
template <bool kVector>
__device__ __forceinline__ void store_tile_chunk(char* row, int chunk, float amax,
                                                 const float (&value)[kChunkElements]) {
  const TileScale tile(amax);
  store_codes<kVector>(row + chunk * kChunkElements, to_e4m3(value, tile.inverse));
  if (chunk % kTileLanes == 0) {
    store_float<kVector>(row + kTileScaleOffset + 4 * (chunk / kTileLanes), tile.scale);
  }
}

}  // namespace k3cupy
