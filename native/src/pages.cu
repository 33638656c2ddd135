// Page movement by a GPU, between its KV tensors and extents in pinned host memory. NVRTC compiles it when it is first needed
// (resources/kv/gpu.py); what a job names has been checked against its bounds before the launch.
#include "page_words.hpp"

using libra::u64;

__device__ u64 this_thread() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ u64 all_threads() { return static_cast<u64>(gridDim.x) * blockDim.x; }

extern "C" __global__ void move_16(const u64* job, u64 extents, u64 gather) {
  libra::move_share<libra::Word16>(libra::placement_of(job, extents), gather != 0, this_thread(), all_threads());
}

extern "C" __global__ void move_1(const u64* job, u64 extents, u64 gather) {
  libra::move_share<libra::Word1>(libra::placement_of(job, extents), gather != 0, this_thread(), all_threads());
}
