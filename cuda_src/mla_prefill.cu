// The MLA prefill and context epilogues: what runs behind the q_b and kv_b projections, and behind
// the projection of context that was read back from the cache.
//
//   mla_key_concat       k = [k_nope | rope(k_pe)], q's last 64 columns turned in place, cache rows
//   mla_qkv_quant        q, k and v as e4m3 with a scale each, e4m3 cache rows
//   mla_kv_concat        k = [k_nope | k_pe]
//   mla_kv_concat_quant  k and v as e4m3 without a scale
//
// A prompt is many megabytes that are read once and written once, so what counts is bandwidth: each
// access is 128 bits wide, and a thread has several loads under way before its first store. Hence:
//   - A task is kHeads heads of one token. A thread owns one piece of the rows of a task: the same 16
//     bytes (in e4m3 kernels the same 16 values) of each of its heads, all loaded before the first
//     store.
//   - k_pe is one row a token. Its thread reads and turns it once and stores it to every head of the
//     task; a thread that turns q reads the angles once for all of them.
//   - The threads of a block are sorted by what they do, in whole warps, so that none waits for the
//     branch of another.
// The first `cache_blocks` blocks write cache rows, whose chain of loads is longer (cache_insert.cuh).
// A token gets a warp. Of very many tokens a block takes `tokens_per_block`.

#include "common/chunk.cuh"
#include "common/fp8.cuh"
#include "common/pdl.cuh"
#include "common/strides.cuh"
#include "mla/cache_insert.cuh"
#include "mla/head_rows.cuh"
#include "mla/rope.cuh"
#include "mla/slots.cuh"

namespace k3cupy {

constexpr int kHeadNope = 128;
constexpr int kHeadRope = 64;
constexpr int kHeadWidth = kHeadNope + kHeadRope;
constexpr int kHeadValue = 128;

// Threads that a task takes for each part of its rows.
constexpr int kCopyNope = kHeadNope / kChunkElements;
constexpr int kCopyRope = kHeadRope / kChunkElements;
constexpr int kCopyWidth = kCopyNope + kCopyRope;
constexpr int kQuantNope = kHeadNope / kPieceElements;
constexpr int kQuantRope = kHeadRope / kPieceElements;
constexpr int kQuantWidth = kQuantNope + kQuantRope;
constexpr int kQuantValue = kHeadValue / kPieceElements;

// Blocks of kThreads that a multiprocessor should hold: 1,024 threads keep the memory busy with up to
// four heads each; with more heads each thread has more under way, and needs the registers for it.
// The element-wise kernels hold more and smaller pieces.
template <int kThreads, int kHeads, bool kVector>
constexpr int kResidentBlocks = kVector ? (kHeads <= 4 ? 1024 : 512) / kThreads : 1;

template <bool kRope, int kTasks>
constexpr int kKeyConcatThreads = kTasks * (kCopyWidth + (kRope ? kCopyRope : 0));

template <int kTasks>
constexpr int kQkvQuantThreads = kTasks * (2 * kQuantWidth + kQuantValue);

// The 128 columns of k_nope.
template <bool kVector, int kTasks, int kHeads>
__device__ __forceinline__ void copy_nope(unsigned int thread, unsigned int block,
                                          const TaskGrid& grid, const HeadRows<kVector>& k_nope,
                                          char* k) {
  const Task<kHeads> task(grid, block * kTasks + thread / kCopyNope);
  const unsigned int offset = thread % kCopyNope * kChunkBytes;
  const char* source = k_nope.of(task) + offset;
  char* target = packed_row<2 * kHeadWidth>(k, task) + offset;
  wait_for_predecessor(source, target);
  Chunk chunk[kHeads];
  load_heads<kVector>(chunk, source, k_nope.head_stride, task.count);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < task.count) store_chunk<kVector>(target + h * 2 * kHeadWidth, chunk[h]);
  }
}

// The 64 columns of k_pe: read once, stored to every head.
template <typename T, bool kRope, bool kVector, int kTasks, int kHeads, typename Stride>
__device__ __forceinline__ void copy_rope(unsigned int thread, unsigned int block,
                                          const TaskGrid& grid, const char* k_pe,
                                          Stride k_pe_stride, char* k, const RopeTable& table) {
  const Task<kHeads> task(grid, block * kTasks + thread / kCopyRope);
  const int c = static_cast<int>(thread % kCopyRope);
  const char* source = k_pe + offset_of(task.token, k_pe_stride) + c * kChunkBytes;
  char* target = packed_row<2 * kHeadWidth>(k, task) + 2 * kHeadNope + c * kChunkBytes;
  wait_for_predecessor(source, target);
  if (task.count == 0) return;
  Chunk chunk = load_chunk_streaming<kVector>(source);
  if constexpr (kRope) {
    float value[kChunkElements];
    const ChunkAngles angles = load_angles<kVector>(table.row_of(task.token), c);
    widen<T>(chunk, value);
    rotate(value, angles);
    chunk = narrow<T>(value);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < task.count) store_chunk<kVector>(target + h * 2 * kHeadWidth, chunk);
  }
}

// The last 64 columns of q, in place.
template <typename T, bool kVector, int kTasks, int kHeads>
__device__ __forceinline__ void turn_query(unsigned int thread, unsigned int block,
                                           const TaskGrid& grid, const HeadRows<kVector>& q,
                                           const RopeTable& table) {
  const Task<kHeads> task(grid, block * kTasks + thread / kCopyRope);
  const int c = static_cast<int>(thread % kCopyRope);
  char* place = q.of(task) + 2 * kHeadNope + c * kChunkBytes;
  wait_for_predecessor(place, place);
  if (task.count == 0) return;
  Chunk chunk[kHeads];
  load_heads<kVector>(chunk, place, q.head_stride, task.count);
  const ChunkAngles angles = load_angles<kVector>(table.row_of(task.token), c);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= task.count) continue;
    float value[kChunkElements];
    widen<T>(chunk[h], value);
    rotate(value, angles);
    store_chunk<kVector>(place + offset_of(h, q.head_stride), narrow<T>(value));
  }
}

// Scale and angles of a thread, loaded behind its data. `unit` counts the pieces of the RoPE part.
template <typename T, bool kTurn, bool kVector>
__device__ __forceinline__ ScaledCast<T, kTurn> load_cast(const CastScale& scale,
                                                          const RopeTable& table,
                                                          unsigned int token, int unit) {
  ScaledCast<T, kTurn> cast;
  cast.scale_inv = scale.load();
  if constexpr (kTurn) {
    const float* table_row = table.row_of(token);
#pragma unroll
    for (int i = 0; i < 2; ++i) cast.angles[i] = load_angles<kVector>(table_row, 2 * unit + i);
  }
  return cast;
}

// kUnits pieces of each head, from a tensor that has heads; `make` gives the cast behind the loads.
template <int kUnits, bool kVector, int kTasks, int kHeads, typename Make>
__device__ __forceinline__ void quant_rows(unsigned int thread, unsigned int block,
                                           const TaskGrid& grid, const HeadRows<kVector>& rows,
                                           int column, char* out, int row_bytes, const Make& make) {
  const Task<kHeads> task(grid, block * kTasks + thread / kUnits);
  const int unit = static_cast<int>(thread % kUnits);
  const char* source = rows.of(task) + 2 * (column + unit * kPieceElements);
  char* target =
      out + static_cast<unsigned long long>(task.row) * row_bytes + column + unit * kPieceElements;
  wait_for_predecessor(source, target);
  if (task.count == 0) return;
  Piece piece[kHeads];
  load_heads<kVector>(piece, source, rows.head_stride, task.count);
  store_heads<kVector>(piece, target, row_bytes, task.count, make(task.token, unit));
}

// k_pe as codes: read once, stored to every head. It may be codes already.
template <bool kIsCodes, bool kVector, int kTasks, int kHeads, typename Stride, typename Make>
__device__ __forceinline__ void quant_k_pe(unsigned int thread, unsigned int block,
                                           const TaskGrid& grid, const char* k_pe,
                                           Stride k_pe_stride, char* k8, const Make& make) {
  const Task<kHeads> task(grid, block * kTasks + thread / kQuantRope);
  const int unit = static_cast<int>(thread % kQuantRope);
  const char* source =
      k_pe + offset_of(task.token, k_pe_stride) + unit * kPieceElements * (kIsCodes ? 1 : 2);
  char* target = packed_row<kHeadWidth>(k8, task) + kHeadNope + unit * kPieceElements;
  wait_for_predecessor(source, target);
  if (task.count == 0) return;
  uint4 codes;
  if constexpr (kIsCodes) {
    codes = load_codes_streaming<kVector>(source);
  } else {
    const Piece piece = load_piece<kVector>(source);
    codes = make(task.token, unit)(piece);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < task.count) store_piece<kVector>(target + h * kHeadWidth, codes);
  }
}

// The cache blocks. All threads of the block call it, and each waits for the predecessor.
template <typename T, CacheFormat kFormat, bool kRope, bool kVector, int kThreads>
__device__ __forceinline__ void insert_block(unsigned int tokens_per_block, const char* kv_c_normed,
                                             typename StrideOf<kVector>::Type kv_c_normed_stride,
                                             const char* k_pe,
                                             typename StrideOf<kVector>::Type k_pe_stride,
                                             const SlotMapping& slots,
                                             const PagedCache<kVector>& cache,
                                             const CastScale& scale, const RopeTable& table) {
  constexpr unsigned int kWarps = kThreads / 32;
  __shared__ LastWriters writers;
  const unsigned int first = blockIdx.x * tokens_per_block;
  if (tokens_per_block == kWarps) {
    const unsigned int token = first + threadIdx.x / 32;
    const char* nope_row = kv_c_normed + offset_of(token, kv_c_normed_stride);
    const char* rope_row = k_pe + offset_of(token, k_pe_stride);
    wait_for_predecessor(nope_row, rope_row);
    // More batches gain 5 to 9% with 257 to 512 tokens, but with ds_mla rows cost the fewer 2 to 4%.
    constexpr unsigned int kBatches = kFormat == CacheFormat::kDsMla ? 2 : 4;
    insert_row<T, kFormat, kRope, kVector, kThreads, kBatches>(first, nope_row, rope_row, slots,
                                                               cache, scale, table);
  } else {
    wait_for_predecessor(kv_c_normed, slots.base);
    const unsigned int left = slots.num_tokens - first;
    insert_rows<T, kFormat, kRope, kVector, kThreads>(
        writers, first, left < tokens_per_block ? left : tokens_per_block, kv_c_normed,
        kv_c_normed_stride, k_pe, k_pe_stride, slots, cache, scale, table);
  }
}

// Arguments stand in the order of their first use, those of a cache block first: its chain of loads is
// the longest, and each further 64 bytes of arguments cost it a miss. Strides are bytes.
template <typename T, CacheFormat kCache, bool kRope, bool kVector, int kTasks, int kHeads>
__global__ void __launch_bounds__(
    kKeyConcatThreads<kRope, kTasks>,
    kResidentBlocks<kKeyConcatThreads<kRope, kTasks>, kHeads, kVector>)
    mla_key_concat(unsigned int cache_blocks, unsigned int tokens_per_block,
                   unsigned int num_tokens, unsigned int slot_is_wide, const char* slot_mapping,
                   long long slot_stride, const char* kv_c_normed, const char* k_pe,
                   typename StrideOf<kVector>::Type kv_c_normed_stride,
                   typename StrideOf<kVector>::Type k_pe_stride, unsigned int num_slots,
                   unsigned int block_size, unsigned int block_size_magic,
                   unsigned int block_size_shift,
                   typename StrideOf<kVector>::Type cache_block_stride,
                   typename StrideOf<kVector>::Type cache_token_stride, char* kv_cache,
                   //
                   unsigned int num_tasks, unsigned int num_heads, unsigned int groups,
                   unsigned int groups_magic, unsigned int groups_shift, char* k_nope, char* k,
                   typename StrideOf<kVector>::Type k_nope_token_stride,
                   typename StrideOf<kVector>::Type k_nope_head_stride,
                   typename StrideOf<kVector>::Type q_token_stride,
                   typename StrideOf<kVector>::Type q_head_stride, unsigned int position_is_wide,
                   char* q, const char* positions, const char* cos_sin_cache,
                   long long position_stride, long long table_stride, long long max_position) {
  static_assert(kCache != CacheFormat::kFp8, "mla_qkv_quant writes the fp8 cache");
  static_assert(kTasks % 8 == 0, "whole warps do one thing");
  constexpr unsigned int kNopeThreads = kTasks * kCopyNope;
  constexpr unsigned int kKeyThreads = kTasks * kCopyWidth;
  constexpr int kThreads = kKeyConcatThreads<kRope, kTasks>;
  const RopeTable table = {positions,     position_is_wide, position_stride,
                           cos_sin_cache, table_stride,     max_position};
  if (blockIdx.x < cache_blocks) {
    insert_block<T, kCache, kRope, kVector, kThreads>(
        tokens_per_block, kv_c_normed, kv_c_normed_stride, k_pe, k_pe_stride,
        {slot_mapping, slot_stride, slot_is_wide, num_tokens},
        {kv_cache, cache_block_stride, cache_token_stride, num_slots, block_size, block_size_magic,
         block_size_shift},
        {nullptr, 1.0f}, table);
    return;
  }
  const TaskGrid grid = {num_tasks, num_heads, groups, groups_magic, groups_shift};
  const unsigned int block = blockIdx.x - cache_blocks;
  const unsigned int thread = threadIdx.x;
  if (thread < kNopeThreads) {
    copy_nope<kVector, kTasks, kHeads>(thread, block, grid,
                                       {k_nope, k_nope_token_stride, k_nope_head_stride}, k);
  } else if (thread < kKeyThreads) {
    copy_rope<T, kRope, kVector, kTasks, kHeads>(thread - kNopeThreads, block, grid, k_pe,
                                                 k_pe_stride, k, table);
  } else if constexpr (kRope) {
    turn_query<T, kVector, kTasks, kHeads>(thread - kKeyThreads, block, grid,
                                           {q, q_token_stride, q_head_stride}, table);
  }
}

template <typename T, bool kRope, bool kVector, int kTasks, int kHeads>
__global__ void __launch_bounds__(kQkvQuantThreads<kTasks>,
                                  kResidentBlocks<kQkvQuantThreads<kTasks>, kHeads, kVector>)
    mla_qkv_quant(unsigned int cache_blocks, unsigned int tokens_per_block, unsigned int num_tokens,
                  unsigned int slot_is_wide, const char* slot_mapping, long long slot_stride,
                  const char* kv_c_normed, const char* k_pe,
                  typename StrideOf<kVector>::Type kv_c_normed_stride,
                  typename StrideOf<kVector>::Type k_pe_stride, unsigned int num_slots,
                  unsigned int block_size, unsigned int block_size_magic,
                  unsigned int block_size_shift,
                  typename StrideOf<kVector>::Type cache_block_stride,
                  typename StrideOf<kVector>::Type cache_token_stride, char* kv_cache,
                  const float* cache_scale_inv, float cache_scale_value,
                  //
                  unsigned int num_tasks, unsigned int num_heads, unsigned int groups,
                  unsigned int groups_magic, unsigned int groups_shift, char* q, char* q8,
                  char* k_nope, char* k8, char* v, char* v8,
                  typename StrideOf<kVector>::Type q_token_stride,
                  typename StrideOf<kVector>::Type q_head_stride,
                  typename StrideOf<kVector>::Type k_nope_token_stride,
                  typename StrideOf<kVector>::Type k_nope_head_stride,
                  typename StrideOf<kVector>::Type v_token_stride,
                  typename StrideOf<kVector>::Type v_head_stride, float q_scale_value,
                  const float* q_scale_inv, const float* k_scale_inv, const float* v_scale_inv,
                  float k_scale_value, float v_scale_value, const char* positions,
                  const char* cos_sin_cache, long long position_stride, long long table_stride,
                  long long max_position, unsigned int position_is_wide) {
  static_assert(kTasks % 8 == 0, "whole warps do one thing");
  constexpr unsigned int kNopeThreads = kTasks * kQuantNope;
  constexpr unsigned int kRopeThreads = kTasks * kQuantRope;
  constexpr unsigned int kValueThreads = kTasks * kQuantValue;
  constexpr int kThreads = kQkvQuantThreads<kTasks>;
  const RopeTable table = {positions,     position_is_wide, position_stride,
                           cos_sin_cache, table_stride,     max_position};
  if (blockIdx.x < cache_blocks) {
    insert_block<T, CacheFormat::kFp8, kRope, kVector, kThreads>(
        tokens_per_block, kv_c_normed, kv_c_normed_stride, k_pe, k_pe_stride,
        {slot_mapping, slot_stride, slot_is_wide, num_tokens},
        {kv_cache, cache_block_stride, cache_token_stride, num_slots, block_size, block_size_magic,
         block_size_shift},
        {cache_scale_inv, cache_scale_value}, table);
    return;
  }
  const TaskGrid grid = {num_tasks, num_heads, groups, groups_magic, groups_shift};
  const unsigned int block = blockIdx.x - cache_blocks;
  const CastScale q_scale = {q_scale_inv, q_scale_value};
  const CastScale k_scale = {k_scale_inv, k_scale_value};
  const CastScale v_scale = {v_scale_inv, v_scale_value};
  const HeadRows<kVector> q_rows = {q, q_token_stride, q_head_stride};
  const HeadRows<kVector> nope_rows = {k_nope, k_nope_token_stride, k_nope_head_stride};
  const HeadRows<kVector> v_rows = {v, v_token_stride, v_head_stride};
  const auto scaled = [&](const CastScale& scale) {
    return [&](unsigned int token, int unit) {
      return load_cast<T, false, kVector>(scale, table, token, unit);
    };
  };
  const auto turned = [&](const CastScale& scale) {
    return [&](unsigned int token, int unit) {
      return load_cast<T, kRope, kVector>(scale, table, token, unit);
    };
  };
  unsigned int thread = threadIdx.x;
  if (thread < kNopeThreads) {
    quant_rows<kQuantNope, kVector, kTasks, kHeads>(thread, block, grid, q_rows, 0, q8, kHeadWidth,
                                                    scaled(q_scale));
    return;
  }
  thread -= kNopeThreads;
  if (thread < kNopeThreads) {
    quant_rows<kQuantNope, kVector, kTasks, kHeads>(thread, block, grid, nope_rows, 0, k8,
                                                    kHeadWidth, scaled(k_scale));
    return;
  }
  thread -= kNopeThreads;
  if (thread < kValueThreads) {
    quant_rows<kQuantValue, kVector, kTasks, kHeads>(thread, block, grid, v_rows, 0, v8, kHeadValue,
                                                     scaled(v_scale));
    return;
  }
  thread -= kValueThreads;
  if (thread < kRopeThreads) {
    quant_rows<kQuantRope, kVector, kTasks, kHeads>(thread, block, grid, q_rows, kHeadNope, q8,
                                                    kHeadWidth, turned(q_scale));
    return;
  }
  quant_k_pe<false, kVector, kTasks, kHeads>(thread - kRopeThreads, block, grid, k_pe, k_pe_stride,
                                             k8, turned(k_scale));
}

template <bool kVector, int kTasks, int kHeads>
__global__ void __launch_bounds__(kTasks* kCopyWidth)
    mla_kv_concat(unsigned int num_tasks, unsigned int num_heads, unsigned int groups,
                  unsigned int groups_magic, unsigned int groups_shift, char* k_nope, char* k,
                  typename StrideOf<kVector>::Type k_nope_token_stride,
                  typename StrideOf<kVector>::Type k_nope_head_stride, const char* k_pe,
                  typename StrideOf<kVector>::Type k_pe_stride) {
  static_assert(kTasks % 8 == 0, "whole warps do one thing");
  constexpr unsigned int kNopeThreads = kTasks * kCopyNope;
  const TaskGrid grid = {num_tasks, num_heads, groups, groups_magic, groups_shift};
  if (threadIdx.x < kNopeThreads) {
    copy_nope<kVector, kTasks, kHeads>(threadIdx.x, blockIdx.x, grid,
                                       {k_nope, k_nope_token_stride, k_nope_head_stride}, k);
  } else {
    copy_rope<__nv_bfloat16, false, kVector, kTasks, kHeads>(
        threadIdx.x - kNopeThreads, blockIdx.x, grid, k_pe, k_pe_stride, k, RopeTable{});
  }
}

template <typename T, bool kCodes, bool kVector, int kTasks, int kHeads>
__global__ void __launch_bounds__(kTasks*(kQuantWidth + kQuantValue))
    mla_kv_concat_quant(unsigned int num_tasks, unsigned int num_heads, unsigned int groups,
                        unsigned int groups_magic, unsigned int groups_shift, char* k_nope,
                        char* k8, char* v, char* v8,
                        typename StrideOf<kVector>::Type k_nope_token_stride,
                        typename StrideOf<kVector>::Type k_nope_head_stride,
                        typename StrideOf<kVector>::Type v_token_stride,
                        typename StrideOf<kVector>::Type v_head_stride, const char* k_pe,
                        typename StrideOf<kVector>::Type k_pe_stride) {
  static_assert(kTasks % 8 == 0, "whole warps do one thing");
  constexpr unsigned int kNopeThreads = kTasks * kQuantNope;
  constexpr unsigned int kValueThreads = kTasks * kQuantValue;
  const TaskGrid grid = {num_tasks, num_heads, groups, groups_magic, groups_shift};
  const auto plain = [](unsigned int, int) { return PlainCast<T>(); };
  unsigned int thread = threadIdx.x;
  if (thread < kNopeThreads) {
    quant_rows<kQuantNope, kVector, kTasks, kHeads>(
        thread, blockIdx.x, grid, {k_nope, k_nope_token_stride, k_nope_head_stride}, 0, k8,
        kHeadWidth, plain);
    return;
  }
  thread -= kNopeThreads;
  if (thread < kValueThreads) {
    quant_rows<kQuantValue, kVector, kTasks, kHeads>(
        thread, blockIdx.x, grid, {v, v_token_stride, v_head_stride}, 0, v8, kHeadValue, plain);
    return;
  }
  quant_k_pe<kCodes, kVector, kTasks, kHeads>(thread - kValueThreads, blockIdx.x, grid, k_pe,
                                              k_pe_stride, k8, plain);
}

}  // namespace k3cupy
