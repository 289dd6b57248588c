// The floor of a weight-streaming kernel: reads every byte once with 16-byte loads, eight in flight
// per thread, then waits for its predecessor. No product that reads its weight once does much better.

#include "common/pdl.cuh"

namespace k3cupy {

constexpr int kInFlight = 8;

__global__ void __launch_bounds__(512)
    stream_bytes(const uint4* data, long long count, unsigned int* sink) {
  unsigned int sum = 0;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  for (long long i = first; i < count; i += threads * kInFlight) {
    uint4 value[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const long long at = i + j * threads;
      value[j] = at < count ? __ldcg(data + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) sum += value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
  }
  wait_for_predecessor(data, sink);
  if (sum == 0x5eed5eedu) *sink = sum;
}

}  // namespace k3cupy
