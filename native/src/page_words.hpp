// Where a page lies, and one thread's share of moving pages: the same lines on the CPU (pages.hpp), in the GPU kernel
// (pages.cu, compiled by NVRTC, which has no standard headers) and in that kernel's emulation (pages_fuzz.cpp).
//
// Invariants: a Placement's page i, for i in [0, pages()), is one (row, head, layer) and every one is some i; over all
// `thread` of `threads` each word of each page is moved once, whatever `threads` is.
#pragma once

#if defined(__CUDACC_RTC__)
#define LIBRA_ANYWHERE __device__ __forceinline__
#define LIBRA_MAY_ALIAS
namespace libra {
using u64 = unsigned long long;
using i64 = long long;
using u32 = unsigned;
}  // namespace libra
#else
#include <cstdint>
#define LIBRA_ANYWHERE inline
#define LIBRA_MAY_ALIAS [[gnu::may_alias]]
namespace libra {
using u64 = std::uint64_t;
using i64 = std::int64_t;
using u32 = std::uint32_t;
}  // namespace libra
#endif

namespace libra {

struct Placement {
  u64 n_layers, n_heads, n_rows;
  u64 block_stride, head_stride, page_bytes, extent_bytes;
  const u64* layers;  // (n_layers,) addresses
  const i64* blocks;  // (n_rows,)
  const u32* table;   // (n_rows, n_heads), C order
  u64 extents;        // address of extent 0

  LIBRA_ANYWHERE u64 pages() const { return n_rows * n_heads * n_layers; }
};

// A job as it is sent to a GPU, in words of 8 bytes: the seven numbers above, the layers, the blocks, the table.
LIBRA_ANYWHERE Placement placement_of(const u64* job, u64 extents) {
  const u64* layers = job + 7;
  const u64* blocks = layers + job[0];
  return {job[0], job[1], job[2], job[3], job[4], job[5], job[6], layers, reinterpret_cast<const i64*>(blocks),
          reinterpret_cast<const u32*>(blocks + job[2]), extents};
}

struct Page {
  u64 cached, staged;  // addresses
};

// Layers run fastest: consecutive pages are neighbours in their extent.
LIBRA_ANYWHERE Page page_at(const Placement& at, u64 i) {
  const u64 l = i % at.n_layers, h = i / at.n_layers % at.n_heads, j = i / at.n_layers / at.n_heads;
  return {at.layers[l] + static_cast<u64>(at.blocks[j]) * at.block_stride + h * at.head_stride,
          at.extents + at.table[j * at.n_heads + h] * at.extent_bytes + l * at.page_bytes};
}

struct alignas(16) LIBRA_MAY_ALIAS Word16 {
  u32 x, y, z, w;
};
struct LIBRA_MAY_ALIAS Word1 {
  unsigned char x;
};

constexpr u64 kLanes = 32;  // threads that move a piece together, so that their accesses are contiguous
constexpr u64 kHeld = 4;    // words that each of them reads before it writes the first: bytes in flight hide the link's latency

// All that thread `thread` of `threads` (a multiple of kLanes) moves. Every address, stride and size must be a multiple
// of sizeof(Word).
template <class Word>
LIBRA_ANYWHERE void move_share(const Placement& at, bool gather, u64 thread, u64 threads) {
  const u64 words = at.page_bytes / sizeof(Word), lane = thread % kLanes;
  const u64 pieces = (words + kLanes * kHeld - 1) / (kLanes * kHeld);
  for (u64 piece = thread / kLanes; piece < at.pages() * pieces; piece += threads / kLanes) {
    const Page page = page_at(at, piece / pieces);
    const Word* from = reinterpret_cast<const Word*>(gather ? page.cached : page.staged);
    Word* to = reinterpret_cast<Word*>(gather ? page.staged : page.cached);
    const u64 first = piece % pieces * kLanes * kHeld + lane;
    Word held[kHeld];
    for (u64 k = 0; k < kHeld; ++k)
      if (first + k * kLanes < words) held[k] = from[first + k * kLanes];
    for (u64 k = 0; k < kHeld; ++k)
      if (first + k * kLanes < words) to[first + k * kLanes] = held[k];
  }
}

}  // namespace libra
