// The small kernels that stand between the products of a layer, written as a good implementation
// has them: 16-byte accesses, gains read before the dependency wait, the release after a thread's
// last store. A window runs the same ones whatever computes its products, so that only these differ.

#include "common/chunk.cuh"
#include "common/pdl.cuh"

namespace k3cupy {

using bf16 = __nv_bfloat16;
constexpr int kThreads = 256;

// RMSNorm of columns 0 .. kFirst - 1 and, where kSecond is not 0, of the kSecond columns behind
// them, each with its own mean: a block a norm and row.
template <int kFirst, int kSecond>
__global__ void __launch_bounds__(kThreads)
    rms_norms(const bf16* x, long long x_row_stride, const bf16* gains, bf16* first, bf16* second,
              float epsilon) {
  constexpr int kNorms = kSecond == 0 ? 1 : 2;
  constexpr int kMost = kFirst > kSecond ? kFirst : kSecond;
  constexpr int kCount = (kMost / kChunkElements + kThreads - 1) / kThreads;
  const long long row = blockIdx.x / kNorms;
  const bool is_second = kNorms == 2 && blockIdx.x % kNorms == 1;
  const int begin = is_second ? kFirst : 0;
  const int chunks = (is_second ? kSecond : kFirst) / kChunkElements;
  const bf16* source = x + row * x_row_stride + begin;
  bf16* target = is_second ? second + row * kSecond : first + row * kFirst;

  Chunk gain[kCount];
  Chunk chunk[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (c < chunks) gain[i] = load_chunk_streaming<true>(gains + begin + c * kChunkElements);
  }
  wait_for_predecessor(source, target);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (c < chunks) chunk[i] = load_chunk_streaming<true>(source + c * kChunkElements);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (threadIdx.x + i * kThreads >= chunks) continue;
    float value[kChunkElements];
    widen<bf16>(chunk[i], value);
#pragma unroll
    for (int j = 0; j < kChunkElements; ++j) sum += value[j] * value[j];
  }

  __shared__ float sums[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) total += sums[w];
  const float scale = rsqrtf(total / (chunks * kChunkElements) + epsilon);

#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (c >= chunks) continue;
    float value[kChunkElements];
    float factor[kChunkElements];
    widen<bf16>(chunk[i], value);
    widen<bf16>(gain[i], factor);
#pragma unroll
    for (int j = 0; j < kChunkElements; ++j) value[j] *= scale * factor[j];
    store_chunk<true>(target + c * kChunkElements, narrow<bf16>(value));
  }
  release_dependents();
}

// out[b, h * kWidth + i] = value[h, b, i] * sigmoid(gate[b, h * kWidth + i]), the gate's rows apart:
// a thread a chunk.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    gate_heads(const bf16* value, const bf16* gate, long long gate_row_stride, bf16* out,
               int num_tokens, int num_heads) {
  constexpr int kChunks = kWidth / kChunkElements;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int token = i / (num_heads * kChunks);
  const int head = i / kChunks % num_heads;
  const int column = i % kChunks * kChunkElements;
  const bf16* source =
      value + (static_cast<long long>(head) * num_tokens + token) * kWidth + column;
  const bf16* factors = gate + token * gate_row_stride + head * kWidth + column;
  wait_for_predecessor(source, factors);
  if (token < num_tokens) {
    float heads[kChunkElements];
    float gates[kChunkElements];
    widen<bf16>(load_chunk_streaming<true>(source), heads);
    widen<bf16>(load_chunk_streaming<true>(factors), gates);
#pragma unroll
    for (int j = 0; j < kChunkElements; ++j) heads[j] /= 1.0f + __expf(-gates[j]);
    store_chunk<true>(out + static_cast<long long>(i) * kChunkElements, narrow<bf16>(heads));
  }
  release_dependents();
}

// SiTU: out[m, i] = tanh(gate[m, i]) * sigmoid(gate[m, i]) * up[m, i], of rows that hold gate and
// then up, `width` columns each: a thread a chunk.
__global__ void __launch_bounds__(kThreads)
    situ_and_multiply(const bf16* gate_up, bf16* out, int num_tokens, int width) {
  const int chunks = width / kChunkElements;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  const int token = i / chunks;
  const bf16* source =
      gate_up + static_cast<long long>(token) * 2 * width + i % chunks * kChunkElements;
  wait_for_predecessor(source, out);
  if (token < num_tokens) {
    float gate[kChunkElements];
    float up[kChunkElements];
    widen<bf16>(load_chunk_streaming<true>(source), gate);
    widen<bf16>(load_chunk_streaming<true>(source + width), up);
#pragma unroll
    for (int j = 0; j < kChunkElements; ++j) up[j] *= tanhf(gate[j]) / (1.0f + __expf(-gate[j]));
    store_chunk<true>(out + static_cast<long long>(i) * kChunkElements, narrow<bf16>(up));
  }
  release_dependents();
}

}  // namespace k3cupy
