// Byte strides. Rows that are moved by 128-bit accesses are less than 4 GiB apart (the host sees to
// it), which saves half of the argument bytes and of the multiplications.
#pragma once

namespace k3cupy {

template <bool kVector>
struct StrideOf {
  using Type = unsigned int;
};
template <>
struct StrideOf<false> {
  using Type = long long;
};

template <typename Stride>
__device__ __forceinline__ long long offset_of(unsigned int index, Stride stride) {
  if constexpr (sizeof(Stride) == 4) {
    return static_cast<long long>(static_cast<unsigned long long>(index) * stride);
  } else {
    return static_cast<long long>(index) * stride;
  }
}

}  // namespace k3cupy
