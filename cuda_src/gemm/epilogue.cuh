// The end of the fused-A GEMM: the sums of an element are added over the warps, then over the blocks
// of a cluster, then comes the residual, in fp32, before the only rounding, if Out needs one.
#pragma once

#include <cuda_bf16.h>

#include "common/float32.cuh"
#include "common/pdl.cuh"
#include "gemm/cluster.cuh"
#include "gemm/tile.cuh"

namespace k3cupy {

// Rows of tokens in global memory.
template <typename T>
struct TokenRows {
  T* data;
  long long row_stride;
};

// A thread's share of what the block stores, which is kOwned rows of every token, and what is added
// to it. The thread that stores an element also fetches its addend, so that the residual may be the
// output itself.
template <typename Tile, bool kHasResidual>
struct StoredShare {
  static constexpr unsigned int kOwned = Tile::kOwned;
  static constexpr unsigned int kCount = (Tile::kM * kOwned + Tile::kThreads - 1) / Tile::kThreads;

  __nv_bfloat16 addends[kHasResidual ? kCount : 1];

  // Calls visit(token, i, addend) for each element, where i counts the block's own rows.
  template <typename Visit>
  __device__ __forceinline__ void for_each(unsigned int num_tokens, const Visit& visit) {
    if constexpr (kHasResidual) {
#pragma unroll
      for (unsigned int j = 0; j < kCount; ++j) {
        const unsigned int i = threadIdx.x + j * Tile::kThreads;
        if (i < num_tokens * kOwned) visit(i / kOwned, i % kOwned, addends[j]);
      }
    } else {
      for (unsigned int i = threadIdx.x; i < num_tokens * kOwned; i += Tile::kThreads) {
        visit(i / kOwned, i % kOwned, addends[0]);
      }
    }
  }

  // Asks for the addends; they are on their way while others still multiply.
  __device__ __forceinline__ void load(const BlockShare<Tile>& share,
                                       const TokenRows<const __nv_bfloat16>& residual,
                                       unsigned int num_tokens, const void* out) {
    if constexpr (kHasResidual) {
      wait_for_predecessor(residual.data, out);  // over already, but for who copies the weight
      for_each(num_tokens, [&](unsigned int token, unsigned int i, __nv_bfloat16& addend) {
        const unsigned int row = share.rank * kOwned + i;
        if (row < share.rows) {
          addend = residual.data[token * residual.row_stride + share.first_row + row];
        }
      });
    }
  }
};

template <typename Tile>
__device__ __forceinline__ float sum_of_warps(const float* sums, unsigned int token,
                                              unsigned int row) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < Tile::kWarpsK; ++w) {
    total = add(total, sums[w * Tile::kWarpSums + token * Tile::kSumPitch + row]);
  }
  return total;
}

// Sends this block's sums to the blocks that finish them: block `rank` its kOwned rows.
template <typename Tile>
__device__ __forceinline__ void send_sums(const BlockShare<Tile>& share,
                                          const BlockMemory<Tile>& memory,
                                          unsigned int num_tokens) {
  constexpr unsigned int kQuads = Tile::kN / 4;
  for (unsigned int i = threadIdx.x; i < num_tokens * kQuads; i += Tile::kThreads) {
    const unsigned int token = i / kQuads;
    const unsigned int row = i % kQuads * 4;
    float totals[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) totals[j] = sum_of_warps<Tile>(memory.sums(), token, row + j);
    const float* place =
        memory.inbox() + (share.rank * Tile::kM + token) * Tile::kOwned + row % Tile::kOwned;
    send_to_rank(shared_address(place), memory.inbox_full, row / Tile::kOwned, totals);
  }
}

template <typename Tile>
__device__ __forceinline__ float sum_of_blocks(const float* inbox, unsigned int token,
                                               unsigned int i) {
  float total = 0.0f;
#pragma unroll
  for (unsigned int r = 0; r < Tile::kSplitK; ++r) {
    total = add(total, inbox[(r * Tile::kM + token) * Tile::kOwned + i]);
  }
  return total;
}

// Finishes and stores the block's own rows.
template <typename Tile, bool kHasResidual, typename Out>
__device__ __forceinline__ void store_sums(StoredShare<Tile, kHasResidual>& stored,
                                           const BlockShare<Tile>& share,
                                           const BlockMemory<Tile>& memory,
                                           const TokenRows<Out>& out, unsigned int num_tokens) {
  const auto store = [&](unsigned int token, unsigned int row, float total, __nv_bfloat16 addend) {
    if (row < share.rows) {
      if constexpr (kHasResidual) total = add(total, __bfloat162float(addend));
      out.data[token * out.row_stride + share.first_row + row] = static_cast<Out>(total);
    }
  };
  if constexpr (Tile::kSplitK == 1) {
    stored.for_each(num_tokens, [&](unsigned int token, unsigned int row, __nv_bfloat16 addend) {
      store(token, row, sum_of_warps<Tile>(memory.sums(), token, row), addend);
    });
  } else {
    cluster_wait();  // every block of the cluster has begun, so its shared memory may be written
    send_sums<Tile>(share, memory, num_tokens);
    wait_barrier(memory.inbox_full, 0);
    stored.for_each(num_tokens, [&](unsigned int token, unsigned int i, __nv_bfloat16 addend) {
      store(token, share.rank * Tile::kOwned + i, sum_of_blocks<Tile>(memory.inbox(), token, i),
            addend);
    });
  }
}

}  // namespace k3cupy
