// Moving the chunks of a latent row: load, turn the RoPE part, narrow, store.
#pragma once

#include "common/chunk.cuh"
#include "common/fp8.cuh"
#include "mla/latent_row.cuh"
#include "mla/rope.cuh"

namespace k3cupy {

constexpr int kWarpChunks = (kRowChunks + 31) / 32;  // a lane's share when one warp walks a row

// Which row of its part of the grid a thread works on, and its chunks first, first + step, ...
struct RowChunks {
  unsigned int row;
  int first;
  int step;
};

// In a row of codes that is one warp's, a lane has two neighbours of the 512-wide part, which become
// one 128-bit store, and one chunk of the RoPE part.
template <CacheFormat kFormat, int kChunksPerThread>
constexpr bool kInPairs = kFormat != CacheFormat::kSame && kChunksPerThread == kWarpChunks;

// A thread's i-th chunk.
template <bool kPairs>
__device__ __forceinline__ int chunk_of(const RowChunks& map, int i) {
  if constexpr (kPairs) {
    return i < 2 ? 2 * map.first + i : kNopeChunks + map.first;
  } else {
    return map.first + i * map.step;
  }
}

template <CacheFormat kFormat, bool kVector, int kChunksPerThread>
__device__ __forceinline__ void load_row(Chunk (&chunk)[kChunksPerThread], const RowChunks& map,
                                         const char* nope_row, const char* rope_row) {
  constexpr bool kPairs = kInPairs<kFormat, kChunksPerThread>;
  if constexpr (kPairs) {
    Chunk pair[2];
    load_chunk_pair<kVector>(pair, nope_row + map.first * 2 * kChunkBytes);
    chunk[0] = pair[0];
    chunk[1] = pair[1];
  }
#pragma unroll
  for (int i = kPairs ? 2 : 0; i < kChunksPerThread; ++i) {
    const int c = chunk_of<kPairs>(map, i);
    if (c < kRowChunks) {
      chunk[i] = load_chunk_streaming<kVector>(c < kNopeChunks
                                                   ? nope_row + c * kChunkBytes
                                                   : rope_row + (c - kNopeChunks) * kChunkBytes);
    }
  }
}

// Turns the RoPE part, narrows, stores. All chunks of a thread go to one row.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, int kChunksPerThread>
__device__ __forceinline__ void store_row(const Chunk (&chunk)[kChunksPerThread],
                                          const RowChunks& map, char* target, bool write,
                                          float scale_inv, const float* table_row) {
  constexpr bool kIsTiled = kFormat == CacheFormat::kDsMla;
  constexpr bool kPairs = kInPairs<kFormat, kChunksPerThread>;
  if constexpr (kIsTiled) {
    static_assert(kPairs, "a row is one warp's");
    const Chunk tiled[2] = {chunk[0], chunk[1]};
    const float amax = largest_of_tile<T>(tiled);
    if (write) store_tile_chunks<T, kVector>(target, map.first, amax, tiled);
  }
  if (!write) return;
  if constexpr (kPairs && !kIsTiled) {
    const Chunk pair[2] = {chunk[0], chunk[1]};
    store_pair<T, kVector>(target + map.first * 2 * kChunkElements, pair, scale_inv);
  }
#pragma unroll
  for (int i = kPairs ? 2 : 0; i < kChunksPerThread; ++i) {
    const int c = chunk_of<kPairs>(map, i);
    if (c >= kRowChunks) continue;
    const bool rotated = kRope && c >= kNopeChunks;
    float value[kChunkElements];
    if (rotated || kFormat == CacheFormat::kFp8) widen<T>(chunk[i], value);
    if (rotated) rotate(value, load_angles<kVector>(table_row, c - kNopeChunks));
    if constexpr (kFormat == CacheFormat::kFp8) {
      store_codes<kVector>(target + c * kChunkElements, to_e4m3(value, scale_inv));
    } else {
      const Chunk result = rotated ? narrow<T>(value) : chunk[i];
      if constexpr (kIsTiled) {
        char* place = target + kDsMlaRopeOffset + (c - kNopeChunks) * kChunkBytes;
        if constexpr (kVector) {
          store_chunk<true>(place, result);
        } else {
          store_chunk_bytes(place, result);
        }
      } else {
        store_chunk<kVector>(target + c * kChunkBytes, result);
      }
    }
  }
}

}  // namespace k3cupy
