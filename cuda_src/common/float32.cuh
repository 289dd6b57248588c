// fp32 arithmetic that keeps subnormal numbers. The run-time compiler is called with -ftz=true,
// which would turn a tiny bf16 input into zero before its scale could lift it; the instructions
// below carry no .ftz and are not contracted, so every instance gives the same bits.
#pragma once

namespace k3cupy {

__device__ __forceinline__ float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

__device__ __forceinline__ float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

// a * b + sum with one rounding.
__device__ __forceinline__ float multiply_add(float a, float b, float sum) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(sum));
  return result;
}

__device__ __forceinline__ float subtract(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

}  // namespace k3cupy
