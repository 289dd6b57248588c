// Rows of [T, H, width] tensors, and how threads share them: a task is some heads of one token, and a
// thread owns the same piece of the row of each of its heads. Pieces are a chunk, which stays 16-bit,
// or two, which become 16 e4m3 codes.
#pragma once

#include "common/chunk.cuh"
#include "common/fast_divide.cuh"
#include "common/fp8.cuh"
#include "common/strides.cuh"
#include "mla/rope.cuh"

namespace k3cupy {

constexpr int kPieceElements = 2 * kChunkElements;  // 32 bytes become 16 codes

// The host's numbers about the tasks of a launch. A token's heads are `groups` tasks.
struct TaskGrid {
  unsigned int num_tasks;
  unsigned int num_heads;
  unsigned int groups;
  unsigned int groups_magic;
  unsigned int groups_shift;
};

// kHeads heads of one token, fewer in the last task of a token.
template <int kHeads>
struct Task {
  unsigned int token;
  unsigned int head;
  int count;
  unsigned int row;  // of a packed output, of the first head

  __device__ __forceinline__ Task(const TaskGrid& grid, unsigned int index) {
    token = quotient(index, grid.groups_magic, grid.groups_shift);
    head = (index - token * grid.groups) * kHeads;
    const int left = static_cast<int>(grid.num_heads - head);
    count = index < grid.num_tasks ? (left < kHeads ? left : kHeads) : 0;
    row = token * grid.num_heads + head;
  }
};

// Rows of a [T, H, width] tensor.
template <bool kVector>
struct HeadRows {
  using Stride = typename StrideOf<kVector>::Type;

  char* base;
  Stride token_stride;
  Stride head_stride;

  template <int kHeads>
  __device__ __forceinline__ char* of(const Task<kHeads>& task) const {
    return base + offset_of(task.token, token_stride) + offset_of(task.head, head_stride);
  }
};

template <int kRowBytes, int kHeads>
__device__ __forceinline__ char* packed_row(char* base, const Task<kHeads>& task) {
  return base + static_cast<unsigned long long>(task.row) * kRowBytes;
}

// Sixteen values of 16 bits.
struct Piece {
  Chunk chunk[2];
};

template <bool kVector>
__device__ __forceinline__ Piece load_piece(const char* source) {
  Piece piece;
  load_chunk_pair<kVector>(piece.chunk, source);
  return piece;
}

// How a piece becomes e4m3: turned, if there are angles, then scaled and saturated.
template <typename T, bool kTurn>
struct ScaledCast {
  float scale_inv;
  ChunkAngles angles[kTurn ? 2 : 1];

  __device__ __forceinline__ uint4 operator()(const Piece& piece) const {
    uint2 codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float value[kChunkElements];
      widen<T>(piece.chunk[i], value);
      if constexpr (kTurn) rotate(value, angles[i]);
      codes[i] = to_e4m3(value, scale_inv);
    }
    return make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
  }
};

// How a piece becomes e4m3 without a scale.
template <typename T>
struct PlainCast {
  __device__ __forceinline__ uint4 operator()(const Piece& piece) const {
    const uint2 low = cast_e4m3<T>(piece.chunk[0]);
    const uint2 high = cast_e4m3<T>(piece.chunk[1]);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
};

template <bool kVector>
__device__ __forceinline__ void store_piece(char* target, const uint4& codes) {
  if constexpr (kVector) {
    *reinterpret_cast<uint4*>(target) = codes;
  } else {
    store_codes<false>(target, make_uint2(codes.x, codes.y));
    store_codes<false>(target + kChunkElements, make_uint2(codes.z, codes.w));
  }
}

// The same chunk of each head of a task.
template <bool kVector, int kHeads, typename Stride>
__device__ __forceinline__ void load_heads(Chunk (&chunk)[kHeads], const char* source,
                                           Stride head_stride, int count) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < count) chunk[h] = load_chunk_streaming<kVector>(source + offset_of(h, head_stride));
  }
}

template <bool kVector, int kHeads, typename Stride>
__device__ __forceinline__ void load_heads(Piece (&piece)[kHeads], const char* source,
                                           Stride head_stride, int count) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < count) piece[h] = load_piece<kVector>(source + offset_of(h, head_stride));
  }
}

template <bool kVector, int kHeads, typename Cast>
__device__ __forceinline__ void store_heads(const Piece (&piece)[kHeads], char* target,
                                            int row_bytes, int count, const Cast& cast) {
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < count) store_piece<kVector>(target + h * row_bytes, cast(piece[h]));
  }
}

}  // namespace k3cupy
