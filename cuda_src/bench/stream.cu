// The floor of a weight-streaming kernel: reads every byte once with 16-byte loads and does nothing
// with them. It lets its consumer be scheduled first of all, and waits for its predecessor last, which
// a product that reads x cannot: so no product that reads its weight once should do better.
//
// The bytes are dealt out in one of two ways. Each block reads a part of its own, or all blocks read
// side by side; the host says which by three numbers: where a block begins, how far a thread's loads
// lie apart, and where a block ends. A thread has kInFlight loads on their way, and asks for the next
// one as soon as one has come.

#include "common/pdl.cuh"
#include "common/vector.cuh"

namespace k3cupy {

template <int kBlockSize, int kInFlight>
__global__ void __launch_bounds__(kBlockSize)
    stream_bytes(const char* data, long long vectors, long long block_step, long long thread_step,
                 long long of_block, unsigned int* sink) {
  release_dependents();
  const long long begin = blockIdx.x * block_step;
  const long long end = min(begin + of_block, vectors);
  Vector<8> value[kInFlight];
  const auto load = [&](int j, long long at) {
    if (at < end) load_streaming(value[j], data + 16 * at);
  };
  long long at = begin + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kInFlight; ++j) {
    value[j] = {};
    load(j, at + j * thread_step);
  }
  unsigned int sum = 0;
  const long long round = kInFlight * thread_step;
#pragma unroll 1
  for (; at < end; at += round) {
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      sum += value[j].word[0] ^ value[j].word[1] ^ value[j].word[2] ^ value[j].word[3];
      load(j, at + j * thread_step + round);
    }
  }
  wait_for_predecessor(data, sink);
  if (sum == 0x5eed5eedu) *sink = sum;
}

}  // namespace k3cupy
