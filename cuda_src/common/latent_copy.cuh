// Moving the chunks of a latent row: load, turn the RoPE part, narrow, store.
#pragma once

#include "chunk.cuh"
#include "fp8.cuh"
#include "latent_row.cuh"
#include "rope.cuh"

namespace k3cupy {

constexpr int kWarpChunks = (kRowChunks + 31) / 32;  // a lane's share when one warp walks a row

// Which row of its part of the grid a thread works on, and its chunks first, first + step, ...
struct RowChunks {
  unsigned int row;
  int first;
  int step;
};

template <bool kVector, int kChunksPerThread>
__device__ __forceinline__ void load_row(Chunk (&chunk)[kChunksPerThread], const RowChunks& map,
                                         const char* nope_row, const char* rope_row) {
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const int c = map.first + i * map.step;
    if (c < kRowChunks) {
      chunk[i] = load_chunk_streaming<kVector>(c < kNopeChunks
                                                   ? nope_row + c * kChunkBytes
                                                   : rope_row + (c - kNopeChunks) * kChunkBytes);
    }
  }
}

// Turns the RoPE part, narrows, stores. All chunks of a thread go to one row. A ds_mla row is one
// warp's, and all its lanes call this together.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, int kChunksPerThread>
__device__ __forceinline__ void store_row(const Chunk (&chunk)[kChunksPerThread],
                                          const RowChunks& map, char* target, bool write,
                                          float scale_inv, const float* table_row) {
  [[maybe_unused]] unsigned int amax = 0;
  if constexpr (kFormat == CacheFormat::kDsMla) {
    static_assert(kChunksPerThread == kWarpChunks && kNopeChunks == 64, "two tile chunks a lane");
    amax = largest_of_tiles<T>(chunk[0], chunk[1]);
  }
  if (!write) return;
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    const int c = map.first + i * map.step;
    if (c >= kRowChunks) continue;
    const bool rotated = kRope && c >= kNopeChunks;
    float value[kChunkElements];
    if (rotated || kFormat != CacheFormat::kSame) widen<T>(chunk[i], value);
    if (rotated) rotate(value, load_angles<kVector>(table_row, c - kNopeChunks));
    if constexpr (kFormat == CacheFormat::kFp8) {
      store_codes<kVector>(target + c * kChunkElements, to_e4m3(value, scale_inv));
    } else if (kFormat == CacheFormat::kDsMla && i < 2) {
      store_tile_chunk<kVector>(target, c, widen_one<T>(i == 0 ? amax : amax >> 16), value);
    } else {
      const Chunk result = rotated ? narrow<T>(value) : chunk[i];
      if constexpr (kFormat == CacheFormat::kDsMla) {
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
