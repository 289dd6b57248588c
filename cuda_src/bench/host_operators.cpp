// Two operators as a C++ extension of PyTorch has them, for `bench host`: what a call costs that
// Python only hands over. They check their tensors as such extensions do, take the current stream,
// and launch with the attribute for programmatic dependent launch. Written by us.
//
// Built without CUDA's headers: the driver's structures stand here, its function comes as a number.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <cstdint>
#include <optional>

namespace {

struct LaunchAttribute {  // CUlaunchAttribute
  std::uint64_t id;
  std::uint32_t value[16];
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned int grid[3];
  unsigned int block[3];
  unsigned int shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned int num_attributes;
};

using Launch = int (*)(const LaunchConfig*, void*, void**, void**);

constexpr std::uint64_t kProgrammaticStreamSerialization = 6;
constexpr unsigned int kThreads = 256;

Launch launch_kernel = nullptr;
void* decode_kernel = nullptr;
void* gemm_kernel = nullptr;

// The driver's cuLaunchKernelEx and the two kernels.
void use(std::int64_t launch, std::int64_t decode, std::int64_t gemm) {
  launch_kernel = reinterpret_cast<Launch>(launch);
  decode_kernel = reinterpret_cast<void*>(decode);
  gemm_kernel = reinterpret_cast<void*>(gemm);
}

void queue(void* kernel, unsigned int blocks, const at::Tensor& like, void** arguments) {
  const c10::impl::VirtualGuardImpl guard(like.device().type());
  LaunchAttribute attribute{kProgrammaticStreamSerialization, {1}};
  const LaunchConfig config{{blocks, 1, 1},
                            {kThreads, 1, 1},
                            0,
                            guard.getStream(like.device()).native_handle(),
                            &attribute,
                            1};
  const int error = launch_kernel(&config, kernel, arguments, nullptr);
  TORCH_CHECK(error == 0, "the driver refused the launch: ", error);
}

void check(const at::Tensor& t, const char* name, std::int64_t rank, at::ScalarType type) {
  TORCH_CHECK(t.is_cuda(), name, " must be a CUDA tensor");
  TORCH_CHECK(t.dim() == rank, name, " must have ", rank, " dimensions");
  TORCH_CHECK(t.scalar_type() == type, name, " has another type");
  TORCH_CHECK(t.stride(rank - 1) == 1, name, " must have inner stride 1");
}

using Optional = std::optional<at::Tensor>;

// The decode epilogue of bf16 query and cache, with the comparison kernel (public_structure.cu). The
// arguments are those of the operation; what has a default is left out by the benchmark.
void decode(const at::Tensor& ql_nope, const at::Tensor& q_pe, const at::Tensor& kv_c_normed,
            const at::Tensor& k_pe, at::Tensor kv_cache, const at::Tensor& slot_mapping,
            at::Tensor out, bool ds_mla, const Optional& q_scale_inv,
            const Optional& cache_scale_inv, const Optional& positions,
            const Optional& cos_sin_cache, bool /*pdl*/, bool /*kv_inputs_ready*/) {
  TORCH_CHECK(!ds_mla && !q_scale_inv && !cache_scale_inv && !positions && !cos_sin_cache,
              "formats that this operator does not have");
  check(ql_nope, "ql_nope", 3, at::kBFloat16);
  check(q_pe, "q_pe", 3, at::kBFloat16);
  check(kv_c_normed, "kv_c_normed", 2, at::kBFloat16);
  check(k_pe, "k_pe", 2, at::kBFloat16);
  check(kv_cache, "kv_cache", 3, at::kBFloat16);
  check(slot_mapping, "slot_mapping", 1, at::kLong);
  check(out, "out", 3, at::kBFloat16);
  int num_tokens = static_cast<int>(ql_nope.size(0));
  int num_heads = static_cast<int>(ql_nope.size(1));
  TORCH_CHECK(ql_nope.size(2) == 512 && q_pe.size(2) == 64 && out.size(2) == 576, "widths");
  TORCH_CHECK(q_pe.size(0) == num_tokens && q_pe.size(1) == num_heads, "q_pe: shape");
  TORCH_CHECK(out.size(0) == num_tokens && out.size(1) == num_heads, "out: shape");
  TORCH_CHECK(kv_c_normed.size(0) == num_tokens && kv_c_normed.size(1) == 512, "kv_c: shape");
  TORCH_CHECK(k_pe.size(0) == num_tokens && k_pe.size(1) == 64, "k_pe: shape");
  TORCH_CHECK(slot_mapping.size(0) >= num_tokens && out.is_contiguous(), "slot_mapping, out");
  const c10::OptionalDeviceGuard guard(ql_nope.device());
  const void* pointers[] = {ql_nope.const_data_ptr(),     q_pe.const_data_ptr(),
                            kv_c_normed.const_data_ptr(), k_pe.const_data_ptr(),
                            out.mutable_data_ptr(),       kv_cache.mutable_data_ptr(),
                            slot_mapping.const_data_ptr()};
  const void* no_scale = nullptr;
  long long strides[] = {ql_nope.stride(0),     ql_nope.stride(1),      q_pe.stride(0),
                         q_pe.stride(1),        kv_c_normed.stride(0),  k_pe.stride(0),
                         kv_cache.stride(0) * 2, kv_cache.stride(1) * 2};
  int block_size = static_cast<int>(kv_cache.size(1));
  std::array<void*, 20> arguments = {
      &pointers[0], &strides[0], &strides[1], &pointers[1], &strides[2],  &strides[3], &pointers[2],
      &strides[4],  &pointers[3], &strides[5], &pointers[4], &pointers[5], &strides[6], &strides[7],
      &pointers[6], &no_scale,   &no_scale,   &num_tokens,  &num_heads,   &block_size};
  const unsigned int warps = static_cast<unsigned int>(num_tokens * (num_heads + 1));
  queue(decode_kernel, (warps * 32 + kThreads - 1) / kThreads, out, arguments.data());
}

// The fused-A GEMM; its kernel has the arguments of the public one and computes nothing.
void gemm(at::Tensor output, const at::Tensor& mat_a, const at::Tensor& mat_b,
          const Optional& residual, bool /*pdl*/, bool /*weight_is_static*/,
          bool /*batch_invariant*/) {
  TORCH_CHECK(!residual, "a residual");
  check(output, "output", 2, at::kBFloat16);
  check(mat_a, "mat_a", 2, at::kBFloat16);
  check(mat_b, "mat_b", 2, at::kBFloat16);
  int num_tokens = static_cast<int>(mat_a.size(0));
  int row_stride = static_cast<int>(mat_a.stride(0));
  TORCH_CHECK(mat_a.size(1) == mat_b.size(1) && num_tokens <= 16, "shapes");
  TORCH_CHECK(output.size(0) == num_tokens && output.size(1) == mat_b.size(0), "output: shape");
  TORCH_CHECK(output.is_contiguous() && mat_b.is_contiguous(), "layouts");
  const c10::OptionalDeviceGuard guard(mat_a.device());
  void* out = output.mutable_data_ptr();
  const void* a = mat_a.const_data_ptr();
  const void* b = mat_b.const_data_ptr();
  std::array<void*, 5> arguments = {&out, &a, &b, &num_tokens, &row_stride};
  const auto blocks = static_cast<unsigned int>(mat_b.size(0) / 16);
  queue(gemm_kernel, blocks, output, arguments.data());
}

}  // namespace

TORCH_LIBRARY(k3cupy_bench, m) {
  m.def("use(int launch, int decode, int gemm) -> ()", &use);
  m.def(
      "decode(Tensor ql_nope, Tensor q_pe, Tensor kv_c_normed, Tensor k_pe, Tensor(a!) kv_cache, "
      "Tensor slot_mapping, Tensor(b!) out, bool ds_mla=False, Tensor? q_scale_inv=None, "
      "Tensor? cache_scale_inv=None, Tensor? positions=None, Tensor? cos_sin_cache=None, "
      "bool pdl=True, bool kv_inputs_ready=False) -> ()");
  m.def(
      "gemm(Tensor(a!) output, Tensor mat_a, Tensor mat_b, Tensor? residual=None, bool pdl=True, "
      "bool weight_is_static=False, bool batch_invariant=False) -> ()");
}

TORCH_LIBRARY_IMPL(k3cupy_bench, CUDA, m) {
  m.impl("decode", &decode);
  m.impl("gemm", &gemm);
}
