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
//     rows of the weight (kWarpgroup) or, so that a tile may have any multiple of 8 rows, tokens
//     (kWarpgroupTokens).
//   - With many tokens x is as many bytes as a tile of the weight. From sm_90 on the copy engine may
//     fetch it, by a tensor map (fused_a_gemm_mapped_x): one thread asks for a stage, and how far
//     rows lie apart makes no difference.
//
// The sum of an element is taken in one fixed order: kPartials partial sums, each of every kPartials-th
// step of 16 columns; these are added by halves, in the warps that have several, then over the warps;
// then come the blocks of the cluster. It depends on kPartials and kSplitK, but not on the number of
// tokens, nor on the tile, the warps that share it, the depth of the rings or kProduct: of a step, the
// tensor cores of sm_90 make the same bits of a warp's product and of a warpgroup's, as tests show.
// The residual comes last, in fp32, before the only rounding; where Out is float, nothing is rounded.

#include <cuda_bf16.h>

#include "gemm/cluster.cuh"
#include "gemm/copy_warps.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/math_warps.cuh"
#include "gemm/tile.cuh"

namespace k3cupy {

// One thread sets up all barriers.
template <typename Tile>
__device__ __forceinline__ void init_barriers(const BlockMemory<Tile>& memory,
                                              unsigned int num_tokens) {
  memory.weight.init(Tile::kCopyThreads, Tile::kMathWarps);
  memory.x.init(Tile::kMappedX ? 1 : Tile::kCopyThreads, Tile::kMathWarps);
  if constexpr (Tile::kSplitK > 1) {
    init_barrier(memory.inbox_full, 1);
    arrive_expecting(memory.inbox_full, Tile::kSplitK * num_tokens * Tile::kOwned * sizeof(float));
  }
  if constexpr (Tile::kMappedX || Tile::kSplitK > 1) show_barriers_to_others();
}

// What both kernels below do; x knows how it is fetched.
template <typename Tile, bool kWeightIsStatic, bool kHasResidual, typename X, typename Out>
__device__ __forceinline__ void compute_tile(const __nv_bfloat16* weight, unsigned int n,
                                             unsigned int k, X x, unsigned int num_tokens,
                                             TokenRows<Out> out,
                                             TokenRows<const __nv_bfloat16> residual,
                                             unsigned int block_rows) {
  extern __shared__ __align__(1024) char shared[];
  const BlockMemory<Tile> memory(shared);
  const BlockShare<Tile> share(n, k, block_rows);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) init_barriers<Tile>(memory, num_tokens);
  __syncthreads();
  if constexpr (Tile::kSplitK > 1) cluster_arrive_relaxed();

  if (warp < Tile::kMathWarps) {
    multiply_stages<Tile>(share, memory, warp, threadIdx.x % 32);
  } else if (warp < Tile::kFirstXWarp) {
    copy_weight<Tile, kWeightIsStatic>(weight, k, share, memory.weight,
                                       threadIdx.x - 32 * Tile::kMathWarps);
  } else {
    x.template fetch<Tile>(share, memory.x, out.data, threadIdx.x - 32 * Tile::kFirstXWarp);
  }

  StoredShare<Tile, kHasResidual, Out> stored(share, out, residual, num_tokens);
  stored.load();
  __syncthreads();
  store_sums(stored, memory);
}

template <int kTileM, int kTileN, int kTileK, int kStages, int kStagesX, int kWarpsK, int kWarpsN,
          int kSplitK, int kPartials, int kCopyWarps, Product kProduct, bool kAlignedX,
          bool kWeightIsStatic, bool kHasResidual, typename Out = __nv_bfloat16>
__global__ void __launch_bounds__(32 * (kWarpsK * kWarpsN + 2 * kCopyWarps))
    fused_a_gemm(const __nv_bfloat16* weight, unsigned int n, unsigned int k,
                 const __nv_bfloat16* x, unsigned int num_tokens, long long x_row_stride, Out* out,
                 long long out_row_stride, const __nv_bfloat16* residual,
                 long long residual_row_stride, unsigned int block_rows) {
  compute_tile<Tile<kTileM, kTileN, kTileK, kStages, kStagesX, kWarpsK, kWarpsN, kSplitK, kPartials,
                    kCopyWarps, kProduct, false>,
               kWeightIsStatic, kHasResidual>(
      weight, n, k, PointedX<kAlignedX>{x, x_row_stride, num_tokens}, num_tokens,
      TokenRows<Out>{out, out_row_stride}, {residual, residual_row_stride}, block_rows);
}

template <int kTileM, int kTileN, int kTileK, int kStages, int kStagesX, int kWarpsK, int kWarpsN,
          int kSplitK, int kPartials, int kCopyWarps, Product kProduct, bool kWeightIsStatic,
          bool kHasResidual, typename Out = __nv_bfloat16>
__global__ void __launch_bounds__(32 * (kWarpsK * kWarpsN + kCopyWarps + 1))
    fused_a_gemm_mapped_x(const __nv_bfloat16* weight, unsigned int n, unsigned int k,
                          const __grid_constant__ TensorMap x_map, unsigned int num_tokens,
                          Out* out, long long out_row_stride, const __nv_bfloat16* residual,
                          long long residual_row_stride, unsigned int block_rows) {
  compute_tile<Tile<kTileM, kTileN, kTileK, kStages, kStagesX, kWarpsK, kWarpsN, kSplitK, kPartials,
                    kCopyWarps, kProduct, true>,
               kWeightIsStatic, kHasResidual>(weight, n, k, MappedX{&x_map}, num_tokens,
                                              TokenRows<Out>{out, out_row_stride},
                                              {residual, residual_row_stride}, block_rows);
}

}  // namespace k3cupy
