// The fused-A GEMM: out[m, n] = sum over k of x[m, k] * weight[n, k], for few tokens m, and on demand
// plus residual[m, n].
//
// With at most 64 tokens every weight is used a handful of times, so the time is that of reading the
// weight once, at the speed of memory. Everything serves that stream:
//   - All blocks are resident at once and each streams an equal share of the weight: there is no
//     second, half-empty wave. A block owns at most kTileN rows of the weight, or 1 / kSplitK of
//     their columns, the blocks of a cluster sharing the rows; the host picks the tile for that, and
//     how many of its rows are used.
//   - Copy warps keep a deep ring of weight tiles in flight, other copy warps a ring of the same
//     columns of x. Math warps never load from global memory. The rings have barriers of their own:
//     the weight may come long before x.
//   - Under programmatic dependent launch the weight does not wait for the predecessor where the
//     caller promised that it is older (kWeightIsStatic): while the predecessor ends, the ring
//     fills. Dependents are released as soon as the predecessor has ended, so that their rings fill
//     while this kernel works; they wait for our end before they read what we write. Not earlier: a
//     dependent to which only its own predecessor was vouched for would overtake ours.
//   - Tokens are the narrow side of the tensor-core product (8), weight rows the wide one (16), so
//     that few tokens waste little. With many tokens the math warps would be the limit, each of which
//     reads all tokens again for its rows. Then, on sm_90a, the product is that of a warpgroup: it
//     reads shared memory itself, and runs on while the next stage is awaited. Its wide side is 64,
//     rows of the weight (kMmaRows = 64) or, so that a tile may have any multiple of 8 rows, tokens
//     (kMmaRows = 8).
//   - With many tokens x is as many bytes as a tile of the weight. From sm_90 on the copy engine may
//     fetch it, by a tensor map (fused_a_gemm_mapped_x): one thread asks for a stage, and how far
//     rows lie apart makes no difference.
//
// The sum of an element is taken in one fixed order: math warp kWarpsK-th by kWarpsK-th step of 16,
// then over the warps, then over the blocks of the cluster. It depends on kWarpsK, kSplitK and
// kMmaRows, but not on the number of tokens, nor on tile_m, tile_n, tile_k or the depth of the rings.
// The residual comes last, in fp32, before the only rounding.

#include <cuda_bf16.h>

#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/pipeline.cuh"
#include "common/tensor_map.cuh"
#include "common/warpgroup.cuh"

namespace k3cupy {

constexpr int kWarpRows = 16;
constexpr int kMmaTokens = 8;
constexpr int kMmaK = 16;
constexpr int kBarrierBytes = 8;
constexpr int kPanelColumns = 64;  // in rows of 128 bytes, as warpgroups and tensor maps have them

// Shared memory: barriers, then the rings, over which the warps' partial sums are laid once the rings
// are done with, then what the other blocks of the cluster send. The host computes the same sizes.
template <int kTileM, int kTileN, int kTileK, int kStages, int kStagesX, int kWarpsK, int kSplitK,
          int kMmaRows, bool kMappedX>
struct SharedLayout {
  static constexpr int kRingAlignment = kMmaRows == kWarpRows && !kMappedX ? 128 : 1024;
  static constexpr int kRowBytes = 2 * kTileK;
  static constexpr int kWeightStage = kTileN * kRowBytes;
  static constexpr int kXStage = kTileM * kRowBytes;
  static constexpr int kSumPitch = kTileN + 4;  // the four tokens of a store then hit other banks
  static constexpr int kWarpSums = kTileM * kSumPitch;
  static constexpr int kInboxFull = 2 * kBarrierBytes * (kStages + kStagesX);
  static constexpr int kBarriers = kInboxFull + (kSplitK > 1 ? kBarrierBytes : 0);
  static constexpr int kWeightRing =
      (kBarriers + kRingAlignment - 1) / kRingAlignment * kRingAlignment;
  static constexpr int kXRing = kWeightRing + kStages * kWeightStage;
  static constexpr int kRingsEnd = kXRing + kStagesX * kXStage;
  static constexpr int kSums = kWeightRing;
  static constexpr int kSumsEnd = kSums + 4 * kWarpsK * kWarpSums;
  static constexpr int kInbox = kRingsEnd > kSumsEnd ? kRingsEnd : kSumsEnd;
};

// The copy engine needs one thread that asks it.
constexpr int warps_for_x(int copy_warps, bool mapped) {
  return mapped ? 1 : copy_warps;
}

// What both kernels below do; x comes as a pointer, or as a map for the copy engine.
template <int kTileM, int kTileN, int kTileK, int kStages, int kStagesX, int kWarpsK, int kWarpsN,
          int kSplitK, int kCopyWarps, int kMmaRows, bool kMappedX, bool kPacked, bool kAlignedX,
          bool kWeightIsStatic, bool kHasResidual>
__device__ __forceinline__ void compute_tile(
    const __nv_bfloat16* weight, unsigned int n, unsigned int k, const __nv_bfloat16* x,
    const TensorMap* x_map, unsigned int num_tokens, long long x_row_stride, __nv_bfloat16* out,
    long long out_row_stride, const __nv_bfloat16* residual, long long residual_row_stride,
    unsigned int block_rows) {
  using Layout =
      SharedLayout<kTileM, kTileN, kTileK, kStages, kStagesX, kWarpsK, kSplitK, kMmaRows, kMappedX>;
  constexpr int kTeam = kMmaRows == kWarpRows ? 1 : 4;  // warps that issue a product together
  constexpr bool kWideTokens = kMmaRows == kMmaTokens;  // tokens are a product's wide side
  constexpr int kPanel = kTeam == 1 ? kTileK : kPanelColumns;
  constexpr int kPanelX = kMappedX ? kPanelColumns : kPanel;
  constexpr bool kZeroed = kTeam > 1;  // products of a warpgroup take whole stages
  constexpr int kMathWarps = kWarpsK * kWarpsN;
  constexpr int kThreads = 32 * (kMathWarps + kCopyWarps + warps_for_x(kCopyWarps, kMappedX));
  constexpr int kCopyThreads = 32 * kCopyWarps;
  constexpr int kTeamRows = kTileN / (kWarpsN / kTeam);
  constexpr int kRowTiles = kWideTokens ? 1 : kTileN / kWarpRows / kWarpsN;
  constexpr int kTokenTiles = kTileM / kMmaTokens;
  constexpr int kNarrowTiles = kWideTokens ? kTeamRows / kMmaTokens : kTokenTiles;
  constexpr int kSteps = kTileK / kMmaK / kWarpsK;
  constexpr unsigned int kOwned = kTileN / kSplitK;  // rows that a block of the cluster stores
  static_assert(kMmaRows == kWarpRows || kMmaRows == 64 || kWideTokens,
                "a product is a warp's or a warpgroup's");
  static_assert(kTeam == 1 || kHasWarpgroups, "products of a warpgroup need sm_90a");
  static_assert(kTeam == 1 || kTileM == 64 || (kTileM == 32 && !kWideTokens),
                "tokens of a warpgroup's product");
  static_assert(kTileK % kPanel == 0, "panels share a stage evenly");
  static_assert(kWarpsN % kTeam == 0, "teams share the rows");
  static_assert(kWideTokens || kRowTiles * kWarpRows * kWarpsN == kTileN,
                "warps share the rows evenly");
  static_assert(kSteps * kMmaK * kWarpsK == kTileK, "warps share a stage evenly");
  static_assert(kTokenTiles == 1 || kTokenTiles % 2 == 0, "tokens are loaded in pairs of tiles");
  static_assert(kSplitK == 1 || kTileN % (4 * kSplitK) == 0, "blocks share the output rows evenly");
  static_assert(kTileK >= 64, "a row has the eight chunks of the swizzle");

  extern __shared__ __align__(1024) char shared[];
  const unsigned int base = shared_address(shared);
  const unsigned int weight_full = base;
  const unsigned int weight_empty = weight_full + kBarrierBytes * kStages;
  const unsigned int x_full = weight_empty + kBarrierBytes * kStages;
  const unsigned int x_empty = x_full + kBarrierBytes * kStagesX;
  const unsigned int inbox_full = base + Layout::kInboxFull;
  const unsigned int weight_ring = base + Layout::kWeightRing;
  const unsigned int x_ring = base + Layout::kXRing;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  // This block's rows and columns. Columns are shared in units of one step of all warps.
  const unsigned int rank = blockIdx.x % kSplitK;
  const unsigned int first_row = blockIdx.x / kSplitK * block_rows;
  const unsigned int rows = min(n - first_row, block_rows);
  constexpr unsigned int kUnit = kMmaK * kWarpsK;
  const unsigned int units = (k + kUnit - 1) / kUnit;
  const unsigned int k_begin = rank * units / kSplitK * kUnit;
  const unsigned int k_end = min((rank + 1) * units / kSplitK * kUnit, k);
  const unsigned int stages = (k_end - k_begin + kTileK - 1) / kTileK;
  const auto stage_bytes = [&](unsigned int i) {
    return 2 * min(k_end - k_begin - i * kTileK, static_cast<unsigned int>(kTileK));
  };

  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      init_barrier(weight_full + kBarrierBytes * s, kCopyThreads);
      init_barrier(weight_empty + kBarrierBytes * s, kMathWarps);
    }
#pragma unroll
    for (int s = 0; s < kStagesX; ++s) {
      init_barrier(x_full + kBarrierBytes * s, kMappedX ? 1 : kCopyThreads);
      init_barrier(x_empty + kBarrierBytes * s, kMathWarps);
    }
    if constexpr (kSplitK > 1) {
      init_barrier(inbox_full, 1);
      arrive_expecting(inbox_full, kSplitK * num_tokens * kOwned * sizeof(float));
    }
    if constexpr (kMappedX || kSplitK > 1) show_barriers_to_others();
  }
  __syncthreads();
  if constexpr (kSplitK > 1) cluster_arrive_relaxed();

  float* sums = reinterpret_cast<float*>(shared + Layout::kSums);
  if (warp < kMathWarps) {
    float sum[kRowTiles][kNarrowTiles][4] = {};
    const int warp_k = warp / kWarpsN;
    const int warp_n = warp % kWarpsN;
    RingPosition at_weight;
    RingPosition at_x;
    if constexpr (kTeam == 1) {
      const unsigned int weight_row =
          (warp_n * kRowTiles * kWarpRows + lane % 16) * Layout::kRowBytes;
      const unsigned int weight_chunk = lane / 16;
      constexpr unsigned int kXRowBytes = 2 * kPanelX;
      constexpr unsigned int kXPanelChunks = kXRowBytes / kCopyBytes;
      const unsigned int x_row =
          (kTokenTiles == 1 ? lane % 8 : lane % 8 + lane / 16 * 8) * kXRowBytes;
      const unsigned int x_chunk = lane / 8 % 2;
      const unsigned int turn = lane % kSwizzleRows;
      // Where a chunk of this lane's row stands in a stage of x.
      const auto chunk_of_x = [&](unsigned int chunk) {
        if constexpr (kPanelX == kTileK) return x_row + swizzled(chunk, turn);
        return chunk / kXPanelChunks * kTileM * kXRowBytes + x_row +
               swizzled(chunk % kXPanelChunks, turn);
      };

      for (unsigned int i = 0; i < stages; ++i) {
        const unsigned int weight_stage = weight_ring + at_weight.stage * Layout::kWeightStage;
        const unsigned int x_stage = x_ring + at_x.stage * Layout::kXStage;
        wait_barrier(weight_full + kBarrierBytes * at_weight.stage, at_weight.parity);
        wait_barrier(x_full + kBarrierBytes * at_x.stage, at_x.parity);
        const auto multiply_step = [&](unsigned int step) {
          const unsigned int chunk = step * (kMmaK * 2 / kCopyBytes);
          unsigned int tokens[kTokenTiles][2];
          if constexpr (kTokenTiles == 1) {
            load_matrices(tokens[0], x_stage + chunk_of_x(chunk + x_chunk));
          } else {
#pragma unroll
            for (int j = 0; j < kTokenTiles; j += 2) {
              unsigned int pair[4];
              load_matrices(pair,
                            x_stage + j * kMmaTokens * kXRowBytes + chunk_of_x(chunk + x_chunk));
              tokens[j][0] = pair[0];
              tokens[j][1] = pair[1];
              tokens[j + 1][0] = pair[2];
              tokens[j + 1][1] = pair[3];
            }
          }
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            unsigned int weights[4];
            load_matrices(weights, weight_stage + weight_row + r * kWarpRows * Layout::kRowBytes +
                                       swizzled(chunk + weight_chunk, turn));
#pragma unroll
            for (int j = 0; j < kTokenTiles; ++j) {
              multiply_add(sum[r][j], weights, tokens[j][0], tokens[j][1]);
            }
          }
        };
        const unsigned int steps = stage_bytes(i) / (2 * kMmaK);
        if (steps == kTileK / kMmaK) {
#pragma unroll
          for (int j = 0; j < kSteps; ++j) multiply_step(j * kWarpsK + warp_k);
        } else {
          for (unsigned int step = warp_k; step < steps; step += kWarpsK) multiply_step(step);
        }
        __syncwarp();
        if (lane == 0) {
          arrive(weight_empty + kBarrierBytes * at_weight.stage);
          arrive(x_empty + kBarrierBytes * at_x.stage);
        }
        at_weight.advance<kStages>();
        at_x.advance<kStagesX>();
      }
    } else {
      constexpr unsigned int kPanelRow = 2 * kPanel;
      constexpr unsigned int kPanelSteps = kPanel / kMmaK;
      const unsigned int team_row = warp_n / kTeam * kTeamRows;

      for (unsigned int i = 0; i < stages; ++i) {
        wait_barrier(weight_full + kBarrierBytes * at_weight.stage, at_weight.parity);
        wait_barrier(x_full + kBarrierBytes * at_x.stage, at_x.parity);
        const auto weights =
            operand_at(weight_ring + at_weight.stage * Layout::kWeightStage + team_row * kPanelRow);
        const auto tokens = operand_at(x_ring + at_x.stage * Layout::kXStage);
        show_to_products();
        begin_products();
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
          const unsigned int step = j * kWarpsK + warp_k;
          const unsigned int panel = step / kPanelSteps;
          const unsigned int column = step % kPanelSteps * (2 * kMmaK);
          const auto step_tokens = tokens + (panel * kTileM * kPanelRow + column) / kOperandUnit;
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            const auto step_weights =
                weights + ((panel * kTileN + r * kMmaRows) * kPanelRow + column) / kOperandUnit;
            if constexpr (kWideTokens) {
              multiply_add(sum[r], step_tokens, step_weights);
            } else {
              multiply_add(sum[r], step_weights, step_tokens);
            }
          }
        }
        commit_products();
        wait_for_products<1>();  // those of the stage before; this stage's may still run
        if (i > 0 && lane == 0) {
          arrive(weight_empty + kBarrierBytes * before<kStages>(at_weight.stage));
          arrive(x_empty + kBarrierBytes * before<kStagesX>(at_x.stage));
        }
        at_weight.advance<kStages>();
        at_x.advance<kStagesX>();
      }
      wait_for_products<0>();
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) keep_in_order(sum[r]);
    }
    sync_threads<32 * kMathWarps>();  // all have read the last stage: the rings are done with
    float* own = sums + warp_k * Layout::kWarpSums;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int j = 0; j < kNarrowTiles; ++j) {
        // Of the lane's four sums of a product two are of its wide row, two of the eighth after it.
        const int wide = warp_n % kTeam * kWarpRows + lane / 4;
        const int narrow = j * kMmaTokens + lane % 4 * 2;
        if constexpr (kWideTokens) {
          const int row = warp_n / kTeam * kTeamRows + narrow;
          own[wide * Layout::kSumPitch + row] = sum[r][j][0];
          own[wide * Layout::kSumPitch + row + 1] = sum[r][j][1];
          own[(wide + 8) * Layout::kSumPitch + row] = sum[r][j][2];
          own[(wide + 8) * Layout::kSumPitch + row + 1] = sum[r][j][3];
        } else {
          const int row = (warp_n / kTeam * kRowTiles + r) * kMmaRows + wide;
          own[narrow * Layout::kSumPitch + row] = sum[r][j][0];
          own[(narrow + 1) * Layout::kSumPitch + row] = sum[r][j][1];
          own[narrow * Layout::kSumPitch + row + 8] = sum[r][j][2];
          own[(narrow + 1) * Layout::kSumPitch + row + 8] = sum[r][j][3];
        }
      }
    }
  } else if (warp < kMathWarps + kCopyWarps) {
    const unsigned int thread = threadIdx.x - 32 * kMathWarps;
    const char* source =
        reinterpret_cast<const char*>(weight + static_cast<long long>(first_row) * k + k_begin);
    if constexpr (!kWeightIsStatic) wait_for_predecessor(source, source);
    RingPosition at;
    for (unsigned int i = 0; i < stages; ++i) {
      // The first round finds every stage empty: a fresh barrier's previous phase counts as over.
      wait_barrier(weight_empty + kBarrierBytes * at.stage, at.parity ^ 1);
      copy_rows_async<kTileN, kTileK, kPanel, kZeroed, kCopyThreads>(
          weight_ring + at.stage * Layout::kWeightStage, source + 2LL * i * kTileK, 2LL * k, rows,
          stage_bytes(i), thread);
      arrive_after_copies(weight_full + kBarrierBytes * at.stage);
      at.advance<kStages>();
    }
  } else if constexpr (kMappedX) {
    wait_for_predecessor(x_map, out);
    release_dependents();
    if (lane == 0) {
      RingPosition at;
      for (unsigned int i = 0; i < stages; ++i) {
        const unsigned int full = x_full + kBarrierBytes * at.stage;
        const unsigned int target = x_ring + at.stage * Layout::kXStage;
        wait_barrier(x_empty + kBarrierBytes * at.stage, at.parity ^ 1);
        arrive_expecting(full, Layout::kXStage);
#pragma unroll
        for (unsigned int column = 0; column < kTileK; column += kPanelX) {
          copy_box(target + 2 * kTileM * column, x_map, k_begin + i * kTileK + column, 0, full);
        }
        at.advance<kStagesX>();
      }
    }
    __syncwarp();
  } else {
    const unsigned int thread = threadIdx.x - 32 * (kMathWarps + kCopyWarps);
    const long long row_stride = kPacked ? k : x_row_stride;
    wait_for_predecessor(x, out);
    release_dependents();
    RingPosition at;
    for (unsigned int i = 0; i < stages; ++i) {
      wait_barrier(x_empty + kBarrierBytes * at.stage, at.parity ^ 1);
      const unsigned int target = x_ring + at.stage * Layout::kXStage;
      const __nv_bfloat16* source = x + k_begin + i * kTileK;
      if constexpr (kAlignedX) {
        copy_rows_async<kTileM, kTileK, kPanel, kZeroed, kCopyThreads>(
            target, reinterpret_cast<const char*>(source), 2 * row_stride, num_tokens,
            stage_bytes(i), thread);
        arrive_after_copies(x_full + kBarrierBytes * at.stage);
      } else {
        const unsigned int values = stage_bytes(i) / 2;
        const unsigned int end = kZeroed ? kTileK : values;
        for (unsigned int row = 0; row < num_tokens; ++row) {
#pragma unroll 1
          for (unsigned int c = thread; c < end; c += kCopyThreads) {
            const bool inside = !kZeroed || c < values;
            store_shared(chunk_place<kTileM, kTileK, kPanel>(target, row, c / 8) + 2 * (c % 8),
                         inside ? __bfloat16_as_ushort(source[row * row_stride + c]) : 0);
          }
        }
        arrive(x_full + kBarrierBytes * at.stage);
      }
      at.advance<kStagesX>();
    }
  }

  // This thread's share of what the block stores, which is kOwned rows of every token. The thread
  // that stores an element also fetches what is added to it, so that the residual may be `out`
  // itself; and it does so here, while others still multiply.
  constexpr unsigned int kShare = (kTileM * kOwned + kThreads - 1) / kThreads;
  float addends[kHasResidual ? kShare : 1];
  const auto for_share = [&](const auto& visit) {
    if constexpr (kHasResidual) {
#pragma unroll
      for (unsigned int j = 0; j < kShare; ++j) {
        const unsigned int i = threadIdx.x + j * kThreads;
        if (i < num_tokens * kOwned) visit(i / kOwned, i % kOwned, addends[j]);
      }
    } else {
      for (unsigned int i = threadIdx.x; i < num_tokens * kOwned; i += kThreads) {
        visit(i / kOwned, i % kOwned, addends[0]);
      }
    }
  };
  if constexpr (kHasResidual) {
    wait_for_predecessor(residual, out);  // over already, except for warps that copy the weight
    for_share([&](unsigned int token, unsigned int i, float& addend) {
      const unsigned int row = rank * kOwned + i;
      if (row < rows) {
        addend = __bfloat162float(residual[token * residual_row_stride + first_row + row]);
      }
    });
  }

  __syncthreads();
  const auto sum_of_warps = [&](unsigned int token, unsigned int row) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarpsK; ++w) {
      total += sums[w * Layout::kWarpSums + token * Layout::kSumPitch + row];
    }
    return total;
  };
  const auto store = [&](unsigned int token, unsigned int row, float total, float addend) {
    if (row < rows) {
      if constexpr (kHasResidual) total += addend;
      out[token * out_row_stride + first_row + row] = __float2bfloat16(total);
    }
  };
  if constexpr (kSplitK == 1) {
    for_share([&](unsigned int token, unsigned int row, float addend) {
      store(token, row, sum_of_warps(token, row), addend);
    });
  } else {
    // Block `rank` of the cluster finishes its kOwned rows; all send it their sums.
    float* inbox = reinterpret_cast<float*>(shared + Layout::kInbox);
    cluster_wait();  // every block of the cluster has begun, so its shared memory may be written
    for (unsigned int i = threadIdx.x; i < num_tokens * (kTileN / 4); i += kThreads) {
      const unsigned int token = i / (kTileN / 4);
      const unsigned int row = i % (kTileN / 4) * 4;
      float totals[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) totals[j] = sum_of_warps(token, row + j);
      const float* place = inbox + (rank * kTileM + token) * kOwned + row % kOwned;
      send_to_rank(shared_address(place), inbox_full, row / kOwned, totals);
    }
    wait_barrier(inbox_full, 0);
    for_share([&](unsigned int token, unsigned int i, float addend) {
      float total = 0.0f;
#pragma unroll
      for (unsigned int r = 0; r < kSplitK; ++r) {
        total += inbox[(r * kTileM + token) * kOwned + i];
      }
      store(token, rank * kOwned + i, total, addend);
    });
  }
}

template <int kTileM, int kTileN, int kTileK, int kStages, int kStagesX, int kWarpsK, int kWarpsN,
          int kSplitK, int kCopyWarps, int kMmaRows, bool kPacked, bool kAlignedX,
          bool kWeightIsStatic, bool kHasResidual>
__global__ void __launch_bounds__(32 * (kWarpsK * kWarpsN + 2 * kCopyWarps))
    fused_a_gemm(const __nv_bfloat16* weight, unsigned int n, unsigned int k,
                 const __nv_bfloat16* x, unsigned int num_tokens, long long x_row_stride,
                 __nv_bfloat16* out, long long out_row_stride, const __nv_bfloat16* residual,
                 long long residual_row_stride, unsigned int block_rows) {
  compute_tile<kTileM, kTileN, kTileK, kStages, kStagesX, kWarpsK, kWarpsN, kSplitK, kCopyWarps,
               kMmaRows, false, kPacked, kAlignedX, kWeightIsStatic, kHasResidual>(
      weight, n, k, x, nullptr, num_tokens, x_row_stride, out, out_row_stride, residual,
      residual_row_stride, block_rows);
}

template <int kTileM, int kTileN, int kTileK, int kStages, int kStagesX, int kWarpsK, int kWarpsN,
          int kSplitK, int kCopyWarps, int kMmaRows, bool kWeightIsStatic, bool kHasResidual>
__global__ void __launch_bounds__(32 * (kWarpsK * kWarpsN + kCopyWarps + 1))
    fused_a_gemm_mapped_x(const __nv_bfloat16* weight, unsigned int n, unsigned int k,
                          const __grid_constant__ TensorMap x_map, unsigned int num_tokens,
                          __nv_bfloat16* out, long long out_row_stride,
                          const __nv_bfloat16* residual, long long residual_row_stride,
                          unsigned int block_rows) {
  compute_tile<kTileM, kTileN, kTileK, kStages, kStagesX, kWarpsK, kWarpsN, kSplitK, kCopyWarps,
               kMmaRows, true, true, true, kWeightIsStatic, kHasResidual>(
      weight, n, k, nullptr, &x_map, num_tokens, 0, out, out_row_stride, residual,
      residual_row_stride, block_rows);
}

}  // namespace k3cupy
