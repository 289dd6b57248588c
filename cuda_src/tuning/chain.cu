// What stands around a kernel under measurement, as in a model: something small writes what it reads,
// and something reads what it wrote. `empty_kernel` stands in its own place and does nothing but wait
// for its predecessor: the least that one more launch can cost.

#include "common/chunk.cuh"
#include "common/pdl.cuh"

namespace k3cupy {

// Where a neighbour lets its dependents be scheduled: behind its work, behind its wait, or never, so
// that its end does.
enum class Trigger { kEnd, kEarly, kNone };

__global__ void empty_kernel() {
  wait_for_predecessor(nullptr, nullptr);
}

// A chunk a thread: `chunks` in all, `row_chunks` of each row, into rows `row_bytes` apart.
template <Trigger kTrigger>
__global__ void write_rows(const char* source, unsigned int chunks, unsigned int row_chunks,
                           char* target, long long row_bytes) {
  const unsigned int chunk = blockIdx.x * blockDim.x + threadIdx.x;
  const long long offset = static_cast<long long>(chunk) * kChunkBytes;
  const unsigned int row = chunk / row_chunks;
  char* place = target + row * row_bytes + (chunk - row * row_chunks) * kChunkBytes;
  wait_for_predecessor(source, place);
  if constexpr (kTrigger == Trigger::kEarly) release_dependents();
  if (chunk < chunks) store_chunk<true>(place, load_chunk_streaming<true>(source + offset));
  if constexpr (kTrigger == Trigger::kEnd) release_dependents();
}

// `sink` is written only for one sum in 2^32, which keeps the compiler from dropping the loads.
template <Trigger kTrigger>
__global__ void read_all(const uint4* data, long long count, unsigned int* sink) {
  wait_for_predecessor(data, sink);
  if constexpr (kTrigger == Trigger::kEarly) release_dependents();
  unsigned int sum = 0;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const uint4 v = __ldcg(data + i);
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  if constexpr (kTrigger == Trigger::kEnd) release_dependents();
  if (sum == 0x5eed5eedu) *sink = sum;
}

}  // namespace k3cupy
