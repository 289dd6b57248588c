// How a block of the fused-A GEMM is cut: every constant that its roles share, what must hold between
// them, and the block's share of the problem.
#pragma once

#include "gemm/pipeline.cuh"
#include "gemm/ring.cuh"
#include "gemm/warpgroup.cuh"

namespace k3cupy {

constexpr int kWarpRows = 16;  // a warp's product: 16 rows of the weight by 8 tokens by 16 columns
constexpr int kMmaTokens = 8;
constexpr int kMmaK = 16;
constexpr int kPanelColumns = 64;  // in rows of 128 bytes, as warpgroups and tensor maps have them

// Who issues a tensor-core product (MMA), and which operand is its wide side. All but the last compute
// the transposed product (swap A/B): the weight in the place of A.
enum class Product {
  kWarp,             // a warp: 16 rows of the weight by 8 tokens
  kWarpgroup,        // a warpgroup: 64 rows of the weight by all tokens of the tile
  kWarpgroupTokens,  // a warpgroup: 64 tokens by any multiple of 8 rows of the weight
};

template <int kTileM, int kTileN, int kTileK, int kStagesOfWeight, int kStagesOfX, int kWarpsAlongK,
          int kWarpsAlongN, int kBlocksAlongK, int kPartialSums, int kWarpsThatCopy,
          Product kWhoseProduct, bool kXIsMapped>
struct Tile {
  // Sizes: tokens, rows of the weight, columns of a stage; then who shares them.
  static constexpr int kM = kTileM;
  static constexpr int kN = kTileN;
  static constexpr int kK = kTileK;
  static constexpr int kStages = kStagesOfWeight;
  static constexpr int kStagesX = kStagesOfX;
  static constexpr int kWarpsK = kWarpsAlongK;
  static constexpr int kWarpsN = kWarpsAlongN;
  static constexpr int kSplitK = kBlocksAlongK;
  static constexpr int kPartials = kPartialSums;
  static constexpr int kCopyWarps = kWarpsThatCopy;
  static constexpr Product kProduct = kWhoseProduct;
  static constexpr bool kMappedX = kXIsMapped;

  // Threads: math warps, warps that copy the weight, those that fetch x. The copy engine needs one
  // thread that asks it.
  static constexpr int kMathWarps = kWarpsK * kWarpsN;
  static constexpr int kFirstXWarp = kMathWarps + kCopyWarps;
  static constexpr int kThreads = 32 * (kFirstXWarp + (kMappedX ? 1 : kCopyWarps));
  static constexpr int kCopyThreads = 32 * kCopyWarps;

  // Products: a team of warps issues one together.
  static constexpr bool kByWarpgroups = kProduct != Product::kWarp;
  static constexpr bool kWideTokens = kProduct == Product::kWarpgroupTokens;
  static constexpr int kTeam = kByWarpgroups ? 4 : 1;
  static constexpr int kWide = kWarpRows * kTeam;
  static constexpr int kTeamRows = kN / (kWarpsN / kTeam);
  static constexpr int kRowTiles = kWideTokens ? 1 : kN / kWarpRows / kWarpsN;
  static constexpr int kTokenTiles = kM / kMmaTokens;
  static constexpr int kNarrowTiles = kWideTokens ? kTeamRows / kMmaTokens : kTokenTiles;
  static constexpr int kSteps = kK / kMmaK / kWarpsK;
  static constexpr int kWarpPartials = kPartials / kWarpsK;
  static_assert(!kByWarpgroups || kHasWarpgroups, "products of a warpgroup need sm_90a");
  static_assert(!kByWarpgroups || kM == 64 || (kM == 32 && !kWideTokens),
                "tokens of a warpgroup's product");
  static_assert(kWarpsN % kTeam == 0, "teams share the rows");
  static_assert(kWideTokens || kRowTiles * kWarpRows * kWarpsN == kN,
                "warps share the rows evenly");
  static_assert(kSteps * kMmaK * kWarpsK == kK, "warps share a stage evenly");
  static_assert(kWarpPartials * kWarpsK == kPartials && kSteps % kWarpPartials == 0,
                "a stage begins with the first partial sum");
  static_assert(kByWarpgroups || kWarpPartials == 1, "partial sums of a warp's products");
  static_assert(kTokenTiles == 1 || kTokenTiles % 2 == 0, "tokens are loaded in pairs of tiles");

  // Stages: columns lie in panels. Products of a warpgroup take whole stages, so that what is missing
  // in the last one must be zeros.
  static constexpr int kPanel = kByWarpgroups ? kPanelColumns : kK;
  static constexpr int kPanelX = kMappedX ? kPanelColumns : kPanel;
  static constexpr bool kZeroed = kByWarpgroups;
  static constexpr int kRowBytes = 2 * kK;
  using WeightRing = Ring<kStages, kN * kRowBytes>;
  using XRing = Ring<kStagesX, kM * kRowBytes>;
  static_assert(kK % kPanel == 0, "panels share a stage evenly");
  static_assert(kK >= 64, "a row has the eight chunks of the swizzle");

  // Sums: each warp along K leaves its own, whose rows are padded so that the four tokens of a store
  // hit other banks. Of a cluster's blocks each stores some of the rows.
  static constexpr int kSumPitch = kN + 4;
  static constexpr int kWarpSums = kM * kSumPitch;
  static constexpr unsigned int kOwned = kN / kSplitK;
  static_assert(kSplitK == 1 || kN % (4 * kSplitK) == 0, "blocks share the output rows evenly");

  // Shared memory, in bytes: barriers, then the rings, over which the warps' sums are laid once the
  // rings are done with, then what the other blocks of the cluster send. The host computes the same
  // size.
  static constexpr int kRingAlignment = kByWarpgroups || kMappedX ? 1024 : 128;
  static constexpr int kXBarriers = WeightRing::kBarriersBytes;
  static constexpr int kInboxBarrier = kXBarriers + XRing::kBarriersBytes;
  static constexpr int kBarriersEnd = kInboxBarrier + (kSplitK > 1 ? kBarrierBytes : 0);
  static constexpr int kWeightStages =
      (kBarriersEnd + kRingAlignment - 1) / kRingAlignment * kRingAlignment;
  static constexpr int kXStages = kWeightStages + WeightRing::kBytes;
  static constexpr int kRingsEnd = kXStages + XRing::kBytes;
  static constexpr int kSums = kWeightStages;
  static constexpr int kSumsEnd = kSums + 4 * kWarpsK * kWarpSums;
  static constexpr int kInbox = kRingsEnd > kSumsEnd ? kRingsEnd : kSumsEnd;
  static constexpr int kSharedBytes = kInbox + (kSplitK > 1 ? 4 * kM * kN : 0);
};

// Which rows and columns of the weight a block multiplies. Columns are shared among the blocks of a
// cluster in units of one step of all partial sums.
template <typename Tile>
struct BlockShare {
  unsigned int rank;
  unsigned int first_row;
  unsigned int rows;
  unsigned int k_begin;
  unsigned int k_end;
  unsigned int stages;

  __device__ __forceinline__ BlockShare(unsigned int n, unsigned int k, unsigned int block_rows) {
    rank = blockIdx.x % Tile::kSplitK;
    first_row = blockIdx.x / Tile::kSplitK * block_rows;
    rows = min(n - first_row, block_rows);
    constexpr unsigned int kUnit = kMmaK * Tile::kPartials;
    const unsigned int units = (k + kUnit - 1) / kUnit;
    k_begin = rank * units / Tile::kSplitK * kUnit;
    k_end = min((rank + 1) * units / Tile::kSplitK * kUnit, k);
    stages = (k_end - k_begin + Tile::kK - 1) / Tile::kK;
  }

  // Bytes of a row in the i-th stage, fewer than all in the last.
  __device__ __forceinline__ unsigned int stage_bytes(unsigned int i) const {
    return 2 * min(k_end - k_begin - i * Tile::kK, static_cast<unsigned int>(Tile::kK));
  }
};

// A block's shared memory.
template <typename Tile>
struct BlockMemory {
  char* base;
  typename Tile::WeightRing weight;
  typename Tile::XRing x;
  unsigned int inbox_full;

  __device__ __forceinline__ explicit BlockMemory(char* shared)
      : base(shared),
        weight(shared_address(shared), shared_address(shared) + Tile::kWeightStages),
        x(shared_address(shared) + Tile::kXBarriers, shared_address(shared) + Tile::kXStages),
        inbox_full(shared_address(shared) + Tile::kInboxBarrier) {}

  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(base + Tile::kSums);
  }

  __device__ __forceinline__ float* inbox() const {
    return reinterpret_cast<float*>(base + Tile::kInbox);
  }
};

}  // namespace k3cupy
