// Movement of whole KV pages between a rank's paged KV tensors and the extents of a staging arena. No Python here, so that
// the same code runs under the sanitizers (pages_fuzz.cpp).
//
//   cache   : one tensor a layer; the page of (block b, local head h) is `page_bytes` contiguous bytes at
//             layers[l] + b * block_stride + h * head_stride
//   extents : extent e holds the pages of one (block, head) of all layers, [layer][page_bytes], at extents + e * extent_bytes
//   table   : extent of (row j, head h); row j stands for block blocks[j]. Head re-sharding is the choice of its columns.
//
// Invariants: nothing outside the named pages is read or written; a Move that names anything out of bounds is refused
// before the first byte moves; when move() returns, every store is visible to other threads and processes.
#pragma once

#include "page_words.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace libra {

struct Cache {
  const std::uint64_t* layers;  // addresses
  std::int64_t n_layers;
  std::int64_t n_blocks;
  std::int64_t n_heads;
  std::uint64_t block_stride;  // bytes
  std::uint64_t head_stride;   // bytes
  std::uint64_t page_bytes;
};

struct Extents {
  char* base;
  std::int64_t count;
  std::uint64_t bytes;  // of one extent
};

struct Rows {
  const std::int64_t* blocks;  // (count,)
  const std::uint32_t* table;  // (count, n_heads of the cache), C order
  std::int64_t count;
};

enum class Direction { gather, scatter };  // cache → extents, extents → cache

inline void check(const Cache& cache, const Extents& extents, const Rows& rows) {
  const auto need = static_cast<std::uint64_t>(cache.n_layers) * cache.page_bytes;
  if (need > extents.bytes)
    throw std::invalid_argument("an extent of " + std::to_string(extents.bytes) + " B cannot hold " +
                                std::to_string(cache.n_layers) + " pages of " + std::to_string(cache.page_bytes) + " B");
  for (std::int64_t j = 0; j < rows.count; ++j)
    if (rows.blocks[j] < 0 || rows.blocks[j] >= cache.n_blocks)
      throw std::out_of_range("block " + std::to_string(rows.blocks[j]) + " of row " + std::to_string(j) + ": the cache has " +
                              std::to_string(cache.n_blocks));
  for (std::int64_t i = 0; i < rows.count * cache.n_heads; ++i)
    if (static_cast<std::int64_t>(rows.table[i]) >= extents.count)
      throw std::out_of_range("extent " + std::to_string(rows.table[i]) + ": the arena has " + std::to_string(extents.count));
}

// -- copying one page -----------------------------------------------------------------------------
// Streaming stores bypass the cache: an ordinary copy reads each destination line before it overwrites it, three bytes of
// memory traffic for each byte copied instead of two. The hardware prefetcher stops at every 4 KiB; the software prefetch
// runs across, into the page that is copied next.

#if defined(__x86_64__)
constexpr std::size_t kAhead = 1024;

__attribute__((target("avx512f"))) inline void stream512(char* to, const char* from, std::size_t n, const char* next) {
  for (std::size_t i = 0; i < n; i += 256) {
    const char* ahead = i + kAhead < n ? from + i + kAhead : next + (i + kAhead - n);
    for (int k = 0; k < 4; ++k) _mm_prefetch(ahead + 64 * k, _MM_HINT_T0);
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + 64);
    const __m512i c = _mm512_loadu_si512(from + i + 128), d = _mm512_loadu_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
}

__attribute__((target("avx2"))) inline void stream256(char* to, const char* from, std::size_t n, const char* next) {
  for (std::size_t i = 0; i < n; i += 256) {
    const char* ahead = i + kAhead < n ? from + i + kAhead : next + (i + kAhead - n);
    for (int k = 0; k < 4; ++k) _mm_prefetch(ahead + 64 * k, _MM_HINT_T0);
    for (int k = 0; k < 8; ++k)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32 * k),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32 * k)));
  }
}

inline int vector_level() {
  static const int level = __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
  return level;
}
#else
inline int vector_level() { return 0; }
#endif

// `next` is where the next copy of this thread begins to read; it is only prefetched, never read.
inline void copy_page(char* to, const char* from, std::size_t n, const char* next, bool streaming) {
#if defined(__x86_64__)
  if (streaming && vector_level() > 0 && n >= 512) {
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
    const std::size_t body = (n - head) / 256 * 256;
    std::memcpy(to, from, head);
    if (vector_level() == 2)
      stream512(to + head, from + head, body, next);
    else
      stream256(to + head, from + head, body, next);
    std::memcpy(to + head + body, from + head + body, n - head - body);
    return;
  }
#else
  (void)next;
  (void)streaming;
#endif
  std::memcpy(to, from, n);
}

inline void drain_stores() {
#if defined(__x86_64__)
  _mm_sfence();  // streaming stores are weakly ordered
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

// -- many threads ---------------------------------------------------------------------------------

// Calls body(begin, end) over 0…n in chunks taken as threads come free: one that is preempted does not hold up the rest.
template <class Body>
void parallel(std::int64_t n, int threads, const Body& body) {
  const auto workers = static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>(threads, n)));
  const std::int64_t chunk = std::max<std::int64_t>(1, n / (static_cast<std::int64_t>(workers) * 16));
  std::atomic<std::int64_t> next{0};
  const auto loop = [&] {
    for (;;) {
      const std::int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n) break;
      body(begin, std::min(n, begin + chunk));
    }
    drain_stores();
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<std::size_t>(workers));
  try {
    for (int i = 1; i < workers; ++i) others.emplace_back(loop);
  } catch (const std::system_error&) {
    // No more threads to be had: those that started, and this one, do the work.
  }
  loop();
  for (auto& thread : others) thread.join();
}

// Moves every page of `rows`; returns the bytes moved. Blocks and extents must not repeat on the side written to.
inline std::uint64_t move(const Cache& cache, const Extents& extents, const Rows& rows, Direction direction, int threads,
                          bool streaming) {
  check(cache, extents, rows);
  const bool gather = direction == Direction::gather;
  const Placement at{static_cast<u64>(cache.n_layers), static_cast<u64>(cache.n_heads), static_cast<u64>(rows.count),
                     cache.block_stride, cache.head_stride, cache.page_bytes, extents.bytes, cache.layers, rows.blocks,
                     rows.table, reinterpret_cast<u64>(extents.base)};
  const auto page = [&](std::int64_t i, char*& cached, char*& staged) {
    const Page found = page_at(at, static_cast<u64>(i));
    cached = reinterpret_cast<char*>(found.cached);
    staged = reinterpret_cast<char*>(found.staged);
  };
  parallel(static_cast<std::int64_t>(at.pages()), threads, [&](std::int64_t begin, std::int64_t end) {
    char *cached, *staged, *next_cached, *next_staged;
    page(begin, cached, staged);
    for (std::int64_t i = begin; i < end; ++i) {
      page(std::min(i + 1, end - 1), next_cached, next_staged);
      if (gather)
        copy_page(staged, cached, cache.page_bytes, next_cached, streaming);
      else
        copy_page(cached, staged, cache.page_bytes, next_staged, streaming);
      cached = next_cached;
      staged = next_staged;
    }
  });
  return at.pages() * cache.page_bytes;
}

// The limit that page movement is measured against: one contiguous copy by as many threads with the same stores.
inline void copy_contiguous(char* to, const char* from, std::uint64_t n, int threads, bool streaming) {
  constexpr std::uint64_t kPiece = 1u << 20;
  parallel(static_cast<std::int64_t>((n + kPiece - 1) / kPiece), threads, [&](std::int64_t begin, std::int64_t end) {
    const auto first = static_cast<std::uint64_t>(begin) * kPiece;
    const auto last = std::min(n, static_cast<std::uint64_t>(end) * kPiece);
    copy_page(to + first, from + first, last - first, from + first, streaming);
  });
}

}  // namespace libra
