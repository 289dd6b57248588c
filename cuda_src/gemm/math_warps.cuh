// The math warps of the fused-A GEMM: products of full stages, summed up in registers, and in the end
// laid down in shared memory. They never load from global memory.
#pragma once

#include "common/float32.cuh"
#include "gemm/mma.cuh"
#include "gemm/tile.cuh"
#include "gemm/warpgroup.cuh"

namespace k3cupy {

// The sums of a lane. Of the four of a product two are of its wide row, two of the eighth after it.
template <typename Tile>
using LaneSums = float[Tile::kRowTiles][Tile::kNarrowTiles][4];

// They are partial sums, of which the lane's warp has several.
template <typename Tile>
using LanePartials = LaneSums<Tile>[Tile::kWarpPartials];

// The lane's view of a stage for products of a warp: the rows that it names to the loads of matrices,
// and where their chunks stand.
template <typename Tile>
struct LaneOperands {
  static constexpr unsigned int kXRowBytes = 2 * Tile::kPanelX;
  static constexpr unsigned int kXPanelChunks = kXRowBytes / kCopyBytes;

  unsigned int weight_row;
  unsigned int weight_chunk;
  unsigned int x_row;
  unsigned int x_chunk;
  unsigned int turn;

  __device__ __forceinline__ LaneOperands(int warp_n, int lane) {
    weight_row = (warp_n * Tile::kRowTiles * kWarpRows + lane % 16) * Tile::kRowBytes;
    weight_chunk = lane / 16;
    x_row = (Tile::kTokenTiles == 1 ? lane % 8 : lane % 8 + lane / 16 * 8) * kXRowBytes;
    x_chunk = lane / 8 % 2;
    turn = lane % kSwizzleRows;
  }

  __device__ __forceinline__ unsigned int of_weight(unsigned int stage, int row_tile,
                                                    unsigned int chunk) const {
    return stage + weight_row + row_tile * kWarpRows * Tile::kRowBytes +
           swizzled(chunk + weight_chunk, turn);
  }

  __device__ __forceinline__ unsigned int of_x(unsigned int stage, int token_tile,
                                               unsigned int chunk) const {
    return stage + token_tile * kMmaTokens * kXRowBytes + chunk_of_x(chunk + x_chunk);
  }

 private:
  __device__ __forceinline__ unsigned int chunk_of_x(unsigned int chunk) const {
    if constexpr (Tile::kPanelX == Tile::kK) return x_row + swizzled(chunk, turn);
    return chunk / kXPanelChunks * Tile::kM * kXRowBytes + x_row +
           swizzled(chunk % kXPanelChunks, turn);
  }
};

// One step of 16 columns: all tokens by this warp's rows.
template <typename Tile>
__device__ __forceinline__ void multiply_step(LaneSums<Tile>& sum, const LaneOperands<Tile>& lane,
                                              unsigned int weight_stage, unsigned int x_stage,
                                              unsigned int step) {
  const unsigned int chunk = step * (kMmaK * 2 / kCopyBytes);
  unsigned int tokens[Tile::kTokenTiles][2];
  if constexpr (Tile::kTokenTiles == 1) {
    load_matrices(tokens[0], lane.of_x(x_stage, 0, chunk));
  } else {
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; j += 2) {
      unsigned int pair[4];
      load_matrices(pair, lane.of_x(x_stage, j, chunk));
      tokens[j][0] = pair[0];
      tokens[j][1] = pair[1];
      tokens[j + 1][0] = pair[2];
      tokens[j + 1][1] = pair[3];
    }
  }
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
    unsigned int weights[4];
    load_matrices(weights, lane.of_weight(weight_stage, r, chunk));
#pragma unroll
    for (int j = 0; j < Tile::kTokenTiles; ++j) {
      multiply_add(sum[r][j], weights, tokens[j][0], tokens[j][1]);
    }
  }
}

// Products of a warp: each warp along K has every kWarpsK-th step of a stage.
template <typename Tile>
__device__ __forceinline__ void multiply_by_warps(LaneSums<Tile>& sum,
                                                  const BlockShare<Tile>& share,
                                                  const BlockMemory<Tile>& memory, int warp_k,
                                                  int warp_n, int lane) {
  const LaneOperands<Tile> operands(warp_n, lane);
  RingPosition at_weight;
  RingPosition at_x;
  for (unsigned int i = 0; i < share.stages; ++i) {
    const unsigned int weight_stage = memory.weight.place(at_weight.stage);
    const unsigned int x_stage = memory.x.place(at_x.stage);
    memory.weight.wait_until_full(at_weight);
    memory.x.wait_until_full(at_x);
    const unsigned int steps = share.stage_bytes(i) / (2 * kMmaK);
    if (steps == Tile::kK / kMmaK) {
#pragma unroll
      for (int j = 0; j < Tile::kSteps; ++j) {
        multiply_step<Tile>(sum, operands, weight_stage, x_stage, j * Tile::kWarpsK + warp_k);
      }
    } else {
      for (unsigned int step = warp_k; step < steps; step += Tile::kWarpsK) {
        multiply_step<Tile>(sum, operands, weight_stage, x_stage, step);
      }
    }
    __syncwarp();
    if (lane == 0) {
      memory.weight.release(at_weight.stage);
      memory.x.release(at_x.stage);
    }
    memory.weight.advance(at_weight);
    memory.x.advance(at_x);
  }
}

// One stage's products of a warpgroup, asked for and not awaited; partial sums take turns.
template <typename Tile>
__device__ __forceinline__ void ask_for_products(LanePartials<Tile>& sum,
                                                 unsigned long long weights,
                                                 unsigned long long tokens, int warp_k) {
  constexpr unsigned int kPanelRow = 2 * Tile::kPanel;
  constexpr unsigned int kPanelSteps = Tile::kPanel / kMmaK;
#pragma unroll
  for (int j = 0; j < Tile::kSteps; ++j) {
    const unsigned int step = j * Tile::kWarpsK + warp_k;
    const unsigned int panel = step / kPanelSteps;
    const unsigned int column = step % kPanelSteps * (2 * kMmaK);
    const auto step_tokens = tokens + (panel * Tile::kM * kPanelRow + column) / kOperandUnit;
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r) {
      const auto step_weights =
          weights + ((panel * Tile::kN + r * Tile::kWide) * kPanelRow + column) / kOperandUnit;
      if constexpr (Tile::kWideTokens) {
        multiply_add(sum[j % Tile::kWarpPartials][r], step_tokens, step_weights);
      } else {
        multiply_add(sum[j % Tile::kWarpPartials][r], step_weights, step_tokens);
      }
    }
  }
}

// Products of a warpgroup: those of a stage run while the next stage is awaited.
template <typename Tile>
__device__ __forceinline__ void multiply_by_warpgroups(LanePartials<Tile>& sum,
                                                       const BlockShare<Tile>& share,
                                                       const BlockMemory<Tile>& memory, int warp_k,
                                                       int warp_n, int lane) {
  const unsigned int team_row = warp_n / Tile::kTeam * Tile::kTeamRows;
  RingPosition at_weight;
  RingPosition at_x;
  for (unsigned int i = 0; i < share.stages; ++i) {
    memory.weight.wait_until_full(at_weight);
    memory.x.wait_until_full(at_x);
    const auto weights =
        operand_at(memory.weight.place(at_weight.stage) + team_row * (2 * Tile::kPanel));
    const auto tokens = operand_at(memory.x.place(at_x.stage));
    show_to_products();
    begin_products();
    ask_for_products<Tile>(sum, weights, tokens, warp_k);
    commit_products();
    wait_for_products<1>();  // those of the stage before; this stage's may still run
    if (i > 0 && lane == 0) {
      memory.weight.release(memory.weight.before(at_weight.stage));
      memory.x.release(memory.x.before(at_x.stage));
    }
    memory.weight.advance(at_weight);
    memory.x.advance(at_x);
  }
  wait_for_products<0>();
#pragma unroll
  for (int p = 0; p < Tile::kWarpPartials; ++p) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r) keep_in_order(sum[p][r]);
  }
}

// Adds a warp's partial sums up in the first, by halves, as add_by_halves goes on over the warps.
template <typename Tile>
__device__ __forceinline__ void add_partials(LanePartials<Tile>& sum) {
#pragma unroll
  for (int half = Tile::kWarpPartials / 2; half > 0; half /= 2) {
#pragma unroll
    for (int p = 0; p < half; ++p) {
#pragma unroll
      for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
        for (int j = 0; j < Tile::kNarrowTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[p][r][j][i] = add(sum[p][r][j][i], sum[p + half][r][j][i]);
          }
        }
      }
    }
  }
}

// Lays a lane's sums down among those of its warp along K: kSumPitch apart for each token.
template <typename Tile>
__device__ __forceinline__ void write_sums(const LaneSums<Tile>& sum, float* own, int warp_n,
                                           int lane) {
  constexpr int kPitch = Tile::kSumPitch;
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
    for (int j = 0; j < Tile::kNarrowTiles; ++j) {
      const int wide = warp_n % Tile::kTeam * kWarpRows + lane / 4;
      const int narrow = j * kMmaTokens + lane % 4 * 2;
      if constexpr (Tile::kWideTokens) {
        const int row = warp_n / Tile::kTeam * Tile::kTeamRows + narrow;
        float2* pairs = reinterpret_cast<float2*>(own + wide * kPitch + row);
        pairs[0] = make_float2(sum[r][j][0], sum[r][j][1]);
        pairs[8 * kPitch / 2] = make_float2(sum[r][j][2], sum[r][j][3]);
      } else {
        const int row = (warp_n / Tile::kTeam * Tile::kRowTiles + r) * Tile::kWide + wide;
        own[narrow * kPitch + row] = sum[r][j][0];
        own[(narrow + 1) * kPitch + row] = sum[r][j][1];
        own[narrow * kPitch + row + 8] = sum[r][j][2];
        own[(narrow + 1) * kPitch + row + 8] = sum[r][j][3];
      }
    }
  }
}

// What a math warp does.
template <typename Tile>
__device__ __forceinline__ void multiply_stages(const BlockShare<Tile>& share,
                                                const BlockMemory<Tile>& memory, int warp,
                                                int lane) {
  LanePartials<Tile> sum = {};
  const int warp_k = warp / Tile::kWarpsN;
  const int warp_n = warp % Tile::kWarpsN;
  if constexpr (Tile::kByWarpgroups) {
    multiply_by_warpgroups<Tile>(sum, share, memory, warp_k, warp_n, lane);
  } else {
    multiply_by_warps<Tile>(sum[0], share, memory, warp_k, warp_n, lane);
  }
  add_partials<Tile>(sum);
  sync_threads<32 * Tile::kMathWarps>();  // all have read the last stage: the rings are done with
  write_sums<Tile>(sum[0], memory.sums() + warp_k * Tile::kWarpSums, warp_n, lane);
}

}  // namespace k3cupy
