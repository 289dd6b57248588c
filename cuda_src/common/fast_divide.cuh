// Division by a number that the host knows, as one multiplication: exact for n < 2^31.
// The host computes both constants (k3cupy/runtime/launch.py, divisor_constants).
#pragma once

namespace k3cupy {

__device__ __forceinline__ unsigned int quotient(unsigned int n, unsigned int magic,
                                                 unsigned int shift) {
  return static_cast<unsigned int>((static_cast<unsigned long long>(n) * magic) >> shift);
}

}  // namespace k3cupy
