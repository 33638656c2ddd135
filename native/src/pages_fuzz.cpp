// Fuzzes pages.hpp, and the GPU's share of the work emulated thread by thread, against a byte-by-byte oracle. Built and run under the sanitizers by `make sanitize`, never shipped.
// Every buffer is its own heap block of the exact size, so that a byte too far is a report; strides leave gaps, which must
// stay as they were. Usage: pages_fuzz [rounds] [seed]; exits 1 with the round and what differed.
#include "pages.hpp"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>

namespace {

using Bytes = std::vector<char>;
std::mt19937_64 rng;

std::int64_t pick(std::int64_t low, std::int64_t high) { return std::uniform_int_distribution<std::int64_t>(low, high)(rng); }

template <class T>
std::vector<T> some_of(std::int64_t n, std::int64_t count) {
  std::vector<T> all(static_cast<std::size_t>(n));
  std::iota(all.begin(), all.end(), T{0});
  std::shuffle(all.begin(), all.end(), rng);
  all.resize(static_cast<std::size_t>(count));
  return all;
}

void fill(Bytes& bytes) {
  for (auto& byte : bytes) byte = static_cast<char>(rng());
}

struct Case {
  std::int64_t layers = pick(1, 4), pool = pick(1, 9), heads = pick(1, 4), rows = pick(0, pool);
  std::uint64_t page = pick(0, 1) ? static_cast<std::uint64_t>(pick(1, 16)) * 256 : static_cast<std::uint64_t>(pick(1, 3000));
  std::uint64_t unit = pick(0, 1) ? 16 : 1;  // of the gaps
  std::uint64_t head_stride = page + unit * static_cast<std::uint64_t>(pick(0, 1) * pick(0, 30));
  std::uint64_t block_stride = head_stride * static_cast<std::uint64_t>(heads) + unit * static_cast<std::uint64_t>(pick(0, 1) * pick(0, 30));
  std::uint64_t extent = page * static_cast<std::uint64_t>(layers) + unit * static_cast<std::uint64_t>(pick(0, 1) * pick(0, 50));
  std::int64_t count = rows * heads + pick(0, 5);
};

// The job as Python packs it for a GPU.
std::vector<std::uint64_t> packed(const libra::Cache& cache, const libra::Extents& extents, const libra::Rows& rows) {
  const auto n_layers = static_cast<std::uint64_t>(cache.n_layers), n_heads = static_cast<std::uint64_t>(cache.n_heads);
  const auto n_rows = static_cast<std::uint64_t>(rows.count);
  std::vector<std::uint64_t> job{n_layers, n_heads, n_rows, cache.block_stride, cache.head_stride, cache.page_bytes, extents.bytes};
  job.insert(job.end(), cache.layers, cache.layers + n_layers);
  job.insert(job.end(), rows.blocks, rows.blocks + n_rows);
  const std::size_t table = job.size();
  job.resize(table + (n_rows * n_heads + 1) / 2);
  if (n_rows) std::memcpy(job.data() + table, rows.table, n_rows * n_heads * sizeof(std::uint32_t));
  return job;
}

// What the kernel does, one thread after the other and in no order of theirs. In words of 16 bytes wherever it may.
std::uint64_t emulate(const libra::Cache& cache, const libra::Extents& extents, const libra::Rows& rows, bool gather) {
  const auto job = packed(cache, extents, rows);
  const auto at = libra::placement_of(job.data(), reinterpret_cast<std::uint64_t>(extents.base));
  std::uint64_t all = at.block_stride | at.head_stride | at.page_bytes | at.extent_bytes | at.extents;
  for (std::uint64_t l = 0; l < at.n_layers; ++l) all |= at.layers[l];
  const std::uint64_t threads = 32 * static_cast<std::uint64_t>(pick(1, 8));
  for (const auto thread : some_of<std::uint64_t>(static_cast<std::int64_t>(threads), static_cast<std::int64_t>(threads)))
    if (all % 16 == 0)
      libra::move_share<libra::Word16>(at, gather, thread, threads);
    else
      libra::move_share<libra::Word1>(at, gather, thread, threads);
  return at.pages() * at.page_bytes;
}

bool check_round(int round) {
  const Case c;
  std::vector<Bytes> kv(static_cast<std::size_t>(c.layers));
  std::vector<std::uint64_t> addresses;
  for (auto& layer : kv) {
    layer.resize(static_cast<std::size_t>(c.pool) * c.block_stride);
    fill(layer);
    addresses.push_back(reinterpret_cast<std::uint64_t>(layer.data()));
  }
  Bytes arena(static_cast<std::size_t>(c.count) * c.extent);
  fill(arena);
  const auto blocks = some_of<std::int64_t>(c.pool, c.rows);
  const auto table = some_of<std::uint32_t>(c.count, c.rows * c.heads);
  auto kv_expected = kv;
  auto arena_expected = arena;
  const bool gather = pick(0, 1) == 0;
  for (std::int64_t l = 0; l < c.layers; ++l)
    for (std::int64_t j = 0; j < c.rows; ++j)
      for (std::int64_t h = 0; h < c.heads; ++h)
        for (std::uint64_t b = 0; b < c.page; ++b) {
          const auto J = static_cast<std::size_t>(j), H = static_cast<std::size_t>(h), L = static_cast<std::size_t>(l);
          const auto in_kv = static_cast<std::size_t>(blocks[J]) * c.block_stride + H * c.head_stride + b;
          const auto in_arena = table[J * static_cast<std::size_t>(c.heads) + H] * c.extent + L * c.page + b;
          if (gather)
            arena_expected[in_arena] = kv[L][in_kv];
          else
            kv_expected[L][in_kv] = arena[in_arena];
        }
  const libra::Cache cache{addresses.data(), c.layers, c.pool, c.heads, c.block_stride, c.head_stride, c.page};
  const libra::Extents extents{arena.data(), c.count, c.extent};
  const libra::Rows rows{blocks.data(), table.data(), c.rows};
  const auto direction = gather ? libra::Direction::gather : libra::Direction::scatter;
  const bool by_gpu = pick(0, 2) == 0;
  const auto moved = by_gpu ? emulate(cache, extents, rows, gather)
                            : libra::move(cache, extents, rows, direction, static_cast<int>(pick(0, 5)), pick(0, 1) == 0);
  if (moved != static_cast<std::uint64_t>(c.rows * c.heads * c.layers) * c.page || kv != kv_expected || arena != arena_expected) {
    std::fprintf(stderr, "round %d: %s by %s of %lld blocks, page %llu\n", round, gather ? "gather" : "scatter",
                 by_gpu ? "the GPU's kernel" : "threads",
                 static_cast<long long>(c.rows), static_cast<unsigned long long>(c.page));
    return false;
  }
  return true;
}

// A request with one number out of bounds must be refused and leave every byte alone.
bool check_refusal(int round) {
  Bytes layer(4 * 2 * 512), arena(8 * 512);
  fill(layer);
  fill(arena);
  const Bytes layer_before = layer, arena_before = arena;
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(layer.data());
  std::vector<std::int64_t> blocks{0, 3, 1};
  std::vector<std::uint32_t> table{0, 1, 2, 3, 4, 5};
  std::uint64_t extent = 512;
  std::int64_t count = 8;
  switch (pick(0, 3)) {
    case 0: blocks[static_cast<std::size_t>(pick(0, 2))] = pick(0, 1) ? -1 : pick(4, 1000); break;
    case 1: table[static_cast<std::size_t>(pick(0, 5))] = static_cast<std::uint32_t>(pick(8, 0xFFFFFFFFll)); break;
    case 2: extent = 511; break;
    default: count = 5; break;
  }
  const libra::Cache cache{&address, 1, 4, 2, 1024, 512, 512};
  try {
    libra::move(cache, {arena.data(), count, extent}, {blocks.data(), table.data(), 3}, libra::Direction::gather, 2, true);
  } catch (const std::logic_error&) {
    return layer == layer_before && arena == arena_before;
  }
  std::fprintf(stderr, "round %d: a request out of bounds was accepted\n", round);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  rng.seed(argc > 2 ? static_cast<std::uint64_t>(std::atoll(argv[2])) : 1);
  for (int round = 0; round < rounds; ++round) {
    if (!check_round(round) || !check_refusal(round)) return 1;
    if (round % 50 == 0) {
      Bytes from(static_cast<std::size_t>(pick(0, 3 << 20))), to(from.size());
      fill(from);
      libra::copy_contiguous(to.data(), from.data(), from.size(), static_cast<int>(pick(1, 3)), pick(0, 1) == 0);
      if (from != to) return 1;
    }
  }
  std::printf("%d rounds agree\n", rounds);
  return 0;
}
