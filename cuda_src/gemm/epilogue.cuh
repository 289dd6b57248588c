// The end of the fused-A GEMM: the sums of an element are added over the warps, then over the blocks
// of a cluster, then comes the residual, in fp32, before the only rounding, if Out needs one.
#pragma once

#include <cuda_bf16.h>

#include "common/float32.cuh"
#include "common/pdl.cuh"
#include "gemm/cluster.cuh"
#include "gemm/tile.cuh"

namespace k3cupy {

constexpr unsigned int kQuad = 4;  // neighbouring rows of a token that a thread may finish together

// Rows of tokens in global memory.
template <typename T>
struct TokenRows {
  T* data;
  long long row_stride;

  __device__ __forceinline__ T* at(unsigned int token, unsigned int row) const {
    return data + token * row_stride + row;
  }

  // Whether quads begin at multiples of their size, those of a first row that is a multiple of four.
  __device__ __forceinline__ bool has_quads() const {
    return (reinterpret_cast<unsigned long long>(data) | row_stride * sizeof(T)) %
               (kQuad * sizeof(T)) ==
           0;
  }
};

// Adds up in the first, by halves, which goes on with the order of a warp's partial sums.
template <int kCount, int kSize, int kWidth>
__device__ __forceinline__ void add_by_halves(float (&value)[kSize][kWidth]) {
  if constexpr (kCount > 1) {
    constexpr int kHalf = (kCount + 1) / 2;
#pragma unroll
    for (int i = 0; i + kHalf < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) value[i][j] = add(value[i][j], value[i + kHalf][j]);
    }
    add_by_halves<kHalf>(value);
  }
}

// The sums of neighbouring rows over kCount places in shared memory, so many floats apart.
template <int kCount, int kWidth>
__device__ __forceinline__ void add_up(float (&total)[kWidth], const float* first,
                                       unsigned int apart) {
  float value[kCount][kWidth];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kWidth == kQuad) {
      const float4 quad = *reinterpret_cast<const float4*>(first + i * apart);
      value[i][0] = quad.x;
      value[i][1] = quad.y;
      value[i][2] = quad.z;
      value[i][3] = quad.w;
    } else {
      value[i][0] = first[i * apart];
    }
  }
  add_by_halves<kCount>(value);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) total[j] = value[0][j];
}

template <typename Tile, int kWidth>
__device__ __forceinline__ void sum_of_warps(float (&total)[kWidth], const float* sums,
                                             unsigned int token, unsigned int row) {
  add_up<Tile::kWarpsK>(total, sums + token * Tile::kSumPitch + row, Tile::kWarpSums);
}

template <typename Tile, int kWidth>
__device__ __forceinline__ void sum_of_blocks(float (&total)[kWidth], const float* inbox,
                                              unsigned int token, unsigned int row) {
  add_up<Tile::kSplitK>(total, inbox + token * Tile::kOwned + row, Tile::kM * Tile::kOwned);
}

// Sends this block's sums to the blocks that finish them: block `rank` its kOwned rows.
template <typename Tile>
__device__ __forceinline__ void send_sums(const BlockShare<Tile>& share,
                                          const BlockMemory<Tile>& memory,
                                          unsigned int num_tokens) {
  constexpr unsigned int kQuads = Tile::kN / kQuad;
  for (unsigned int i = threadIdx.x; i < num_tokens * kQuads; i += Tile::kThreads) {
    const unsigned int token = i / kQuads;
    const unsigned int row = i % kQuads * kQuad;
    float total[kQuad];
    sum_of_warps<Tile>(total, memory.sums(), token, row);
    const float* place =
        memory.inbox() + (share.rank * Tile::kM + token) * Tile::kOwned + row % Tile::kOwned;
    send_to_rank(shared_address(place), memory.inbox_full, row / Tile::kOwned, total);
  }
}

// A thread's share of what the block stores, which is kOwned rows of every token, and what is added
// to it. The thread that stores an element also fetches its addend, so that the residual may be the
// output itself. Its parts are quads where there are so many that at least every other thread has
// one, and else single rows, which more threads share.
template <typename Tile, bool kHasResidual, typename Out>
struct StoredShare {
  static constexpr unsigned int kOwned = Tile::kOwned;
  static constexpr unsigned int kWidth = Tile::kM * kOwned >= 2 * Tile::kThreads ? kQuad : 1;
  static constexpr unsigned int kParts = kOwned / kWidth;
  static constexpr unsigned int kCount = (Tile::kM * kParts + Tile::kThreads - 1) / Tile::kThreads;
  static_assert(kParts * kWidth == kOwned, "parts share the rows of a block evenly");

  template <typename T>
  struct alignas(sizeof(T) * kWidth) Part {
    T row[kWidth];
  };

  const BlockShare<Tile>& share;
  TokenRows<Out> out;
  TokenRows<const __nv_bfloat16> residual;
  unsigned int num_tokens;
  bool is_aligned;
  Part<__nv_bfloat16> addends[kHasResidual ? kCount : 1];

  __device__ __forceinline__ StoredShare(const BlockShare<Tile>& rows, const TokenRows<Out>& to,
                                         const TokenRows<const __nv_bfloat16>& added,
                                         unsigned int tokens)
      : share(rows), out(to), residual(added), num_tokens(tokens), is_aligned(true) {
    if constexpr (kWidth > 1) {
      is_aligned = share.first_row % kQuad == 0 && out.has_quads() &&
                   (!kHasResidual || residual.has_quads());
    }
  }

  // Calls visit(token, row, addend) for each part, where row counts from the block's first.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) {
    const unsigned int first = share.rank * kOwned;
    if constexpr (kHasResidual) {
#pragma unroll
      for (unsigned int j = 0; j < kCount; ++j) {
        const unsigned int i = threadIdx.x + j * Tile::kThreads;
        if (i < num_tokens * kParts) visit(i / kParts, first + i % kParts * kWidth, addends[j]);
      }
    } else {
      for (unsigned int i = threadIdx.x; i < num_tokens * kParts; i += Tile::kThreads) {
        visit(i / kParts, first + i % kParts * kWidth, addends[0]);
      }
    }
  }

  // Whether a part is loaded and stored by one access.
  __device__ __forceinline__ bool is_whole(unsigned int row) const {
    return is_aligned && row + kWidth <= share.rows;
  }

  // Asks for the addends; they are on their way while others still multiply.
  __device__ __forceinline__ void load() {
    if constexpr (kHasResidual) {
      wait_for_predecessor(residual.data, out.data);  // over, but for who copies the weight
      for_each([&](unsigned int token, unsigned int row, Part<__nv_bfloat16>& addend) {
        if (is_whole(row)) {
          addend = *reinterpret_cast<const Part<__nv_bfloat16>*>(
              residual.at(token, share.first_row + row));
        }
      });
    }
  }

  // Finishes and stores the block's own rows; sum_of(total, token, row) tells the sums of a part.
  template <typename SumOf>
  __device__ __forceinline__ void store(const SumOf& sum_of) {
    for_each([&](unsigned int token, unsigned int row, const Part<__nv_bfloat16>& addend) {
      float total[kWidth];
      sum_of(total, token, row);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] = add(total[j], 0.0f);  // makes 0 of -0
      if (is_whole(row)) {
        Part<Out> part;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if constexpr (kHasResidual) total[j] = add(total[j], __bfloat162float(addend.row[j]));
          part.row[j] = static_cast<Out>(total[j]);
        }
        *reinterpret_cast<Part<Out>*>(out.at(token, share.first_row + row)) = part;
      } else if constexpr (kWidth > 1) {
#pragma unroll
        for (unsigned int j = 0; j < kWidth; ++j) {
          if (row + j < share.rows) {
            const unsigned int column = share.first_row + row + j;
            if constexpr (kHasResidual) {
              total[j] = add(total[j], __bfloat162float(*residual.at(token, column)));
            }
            *out.at(token, column) = static_cast<Out>(total[j]);
          }
        }
      }
    });
  }
};

// What remains once every sum of the block is in shared memory.
template <typename Tile, bool kHasResidual, typename Out>
__device__ __forceinline__ void store_sums(StoredShare<Tile, kHasResidual, Out>& stored,
                                           const BlockMemory<Tile>& memory) {
  constexpr int kWidth = StoredShare<Tile, kHasResidual, Out>::kWidth;
  if constexpr (Tile::kSplitK == 1) {
    stored.store([&](float (&total)[kWidth], unsigned int token, unsigned int row) {
      sum_of_warps<Tile>(total, memory.sums(), token, row);
    });
  } else {
    cluster_wait();  // every block of the cluster has begun, so its shared memory may be written
    send_sums<Tile>(stored.share, memory, stored.num_tokens);
    wait_barrier(memory.inbox_full, 0);
    stored.store([&](float (&total)[kWidth], unsigned int token, unsigned int row) {
      sum_of_blocks<Tile>(total, memory.inbox(), token, row % Tile::kOwned);
    });
  }
}

}  // namespace k3cupy
