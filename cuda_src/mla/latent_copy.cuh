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

// A thread's i-th chunk. In a ds_mla row, one warp's, a lane has two neighbours of the tiled part.
template <CacheFormat kFormat>
__device__ __forceinline__ int chunk_of(const RowChunks& map, int i) {
  if constexpr (kFormat == CacheFormat::kDsMla) {
    return i < 2 ? 2 * map.first + i : kNopeChunks + map.first;
  } else {
    return map.first + i * map.step;
  }
}

template <CacheFormat kFormat, bool kVector, int kChunksPerThread>
__device__ __forceinline__ void load_row(Chunk (&chunk)[kChunksPerThread], const RowChunks& map,
                                         const char* nope_row, const char* rope_row) {
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const int c = chunk_of<kFormat>(map, i);
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
  if constexpr (kIsTiled) {
    static_assert(kChunksPerThread == kWarpChunks, "a row is one warp's");
    const Chunk tiled[2] = {chunk[0], chunk[1]};
    const float amax = largest_of_tile<T>(tiled);
    if (write) store_tile_chunks<T, kVector>(target, map.first, amax, tiled);
  }
  if (!write) return;
#pragma unroll
  for (int i = kIsTiled ? 2 : 0; i < kChunksPerThread; ++i) {
    const int c = chunk_of<kFormat>(map, i);
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
