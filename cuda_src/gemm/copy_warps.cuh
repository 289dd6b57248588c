// The copy warps of the fused-A GEMM: they keep the rings of the weight and of x filled.
#pragma once

#include <cuda_bf16.h>

#include "common/pdl.cuh"
#include "gemm/pipeline.cuh"
#include "gemm/tensor_map.cuh"
#include "gemm/tile.cuh"

namespace k3cupy {

// The weight, by asynchronous copies of 16 bytes. It waits for the predecessor unless the caller
// promised that it is older.
template <typename Tile, bool kIsStatic>
__device__ __forceinline__ void copy_weight(const __nv_bfloat16* weight, unsigned int k,
                                            const BlockShare<Tile>& share,
                                            const typename Tile::WeightRing& ring,
                                            unsigned int thread) {
  const char* source = reinterpret_cast<const char*>(
      weight + static_cast<long long>(share.first_row) * k + share.k_begin);
  if constexpr (!kIsStatic) wait_for_predecessor(source, source);
  RingPosition at;
  for (unsigned int i = 0; i < share.stages; ++i) {
    ring.wait_until_empty(at);
    copy_rows_async<Tile::kN, Tile::kK, Tile::kPanel, Tile::kZeroed, Tile::kCopyThreads>(
        ring.place(at.stage), source + 2LL * i * Tile::kK, 2LL * k, share.rows,
        share.stage_bytes(i), thread);
    arrive_after_copies(ring.full(at.stage));
    ring.advance(at);
  }
}

// A stage of x value by value, for rows that are not 16-byte aligned.
template <typename Tile>
__device__ __forceinline__ void copy_elements(unsigned int target, const __nv_bfloat16* source,
                                              long long row_stride, unsigned int rows,
                                              unsigned int values, unsigned int thread) {
  const unsigned int end = Tile::kZeroed ? Tile::kK : values;
  for (unsigned int row = 0; row < rows; ++row) {
#pragma unroll 1
    for (unsigned int c = thread; c < end; c += Tile::kCopyThreads) {
      const bool inside = !Tile::kZeroed || c < values;
      store_shared(chunk_place<Tile::kM, Tile::kK, Tile::kPanel>(target, row, c / 8) + 2 * (c % 8),
                   inside ? __bfloat16_as_ushort(source[row * row_stride + c]) : 0);
    }
  }
}

// x behind a pointer, which warps copy.
template <bool kAligned>
struct PointedX {
  const __nv_bfloat16* data;
  long long row_stride;
  unsigned int num_tokens;

  template <typename Tile>
  __device__ __forceinline__ void fetch(const BlockShare<Tile>& share,
                                        const typename Tile::XRing& ring, const void* out,
                                        unsigned int thread) const {
    wait_for_predecessor(data, out);
    release_dependents();
    const unsigned int row_bytes = 2 * static_cast<unsigned int>(row_stride);  // where aligned
    RingPosition at;
    for (unsigned int i = 0; i < share.stages; ++i) {
      ring.wait_until_empty(at);
      const unsigned int target = ring.place(at.stage);
      const __nv_bfloat16* source = data + share.k_begin + i * Tile::kK;
      if constexpr (kAligned) {
        copy_rows_async<Tile::kM, Tile::kK, Tile::kPanel, Tile::kZeroed, Tile::kCopyThreads>(
            target, reinterpret_cast<const char*>(source), row_bytes, num_tokens,
            share.stage_bytes(i), thread);
        arrive_after_copies(ring.full(at.stage));
      } else {
        copy_elements<Tile>(target, source, row_stride, num_tokens, share.stage_bytes(i) / 2,
                            thread);
        arrive(ring.full(at.stage));
      }
      ring.advance(at);
    }
  }
};

// x behind a tensor map (TMA): the copy engine fetches whole boxes, for which one thread asks.
struct MappedX {
  const TensorMap* map;

  template <typename Tile>
  __device__ __forceinline__ void fetch(const BlockShare<Tile>& share,
                                        const typename Tile::XRing& ring, const void* out,
                                        unsigned int thread) const {
    if (thread == 0) prefetch_map(map);
    wait_for_predecessor(map, out);
    release_dependents();
    if (thread == 0) {
      RingPosition at;
      for (unsigned int i = 0; i < share.stages; ++i) {
        const unsigned int full = ring.full(at.stage);
        const unsigned int target = ring.place(at.stage);
        ring.wait_until_empty(at);
        arrive_expecting(full, Tile::kM * Tile::kRowBytes);
#pragma unroll
        for (unsigned int column = 0; column < Tile::kK; column += Tile::kPanelX) {
          copy_box(target + 2 * Tile::kM * column, map, share.k_begin + i * Tile::kK + column, 0,
                   full);
        }
        ring.advance(at);
      }
    }
    __syncwarp();
  }
};

}  // namespace k3cupy
