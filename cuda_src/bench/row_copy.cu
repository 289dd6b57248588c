// What the prefill kernels are compared with for few tokens: rows copied as they are, one warp a row.
// The benchmark gives it as many bytes as the kernel reads and writes.

#include "common/chunk.cuh"
#include "common/pdl.cuh"

namespace k3cupy {

constexpr int kCopyChunks = 72;  // of a row: 1,152 bytes

__global__ void copy_rows(const char* source, char* target, unsigned int num_rows) {
  const unsigned int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const unsigned long long offset =
      static_cast<unsigned long long>(row) * kCopyChunks * kChunkBytes;
  wait_for_predecessor(source + offset, target + offset);
  if (row >= num_rows) return;
  constexpr int kCount = (kCopyChunks + 31) / 32;
  Chunk chunk[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = lane + 32 * i;
    if (c < kCopyChunks) {
      chunk[i] = load_chunk_streaming<true>(source + offset + c * kChunkBytes);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = lane + 32 * i;
    if (c < kCopyChunks) store_chunk<true>(target + offset + c * kChunkBytes, chunk[i]);
  }
}

}  // namespace k3cupy
