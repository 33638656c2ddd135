// Python bindings of pages.hpp: pages move with the GIL released, between addresses that native/pages.py has checked.
#include "pages.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace {

template <class T, std::size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

std::uint64_t move_pages(Array<const std::uint64_t, 1> layers, std::int64_t n_blocks, std::int64_t n_heads,
                         std::uint64_t block_stride, std::uint64_t head_stride, std::uint64_t page_bytes,
                         std::uint64_t extents, std::int64_t n_extents, std::uint64_t extent_bytes,
                         Array<const std::int64_t, 1> blocks, Array<const std::uint32_t, 2> table, bool gather, int threads,
                         bool streaming) {
  if (table.shape(0) != blocks.shape(0) || static_cast<std::int64_t>(table.shape(1)) != n_heads)
    throw std::invalid_argument("a table of shape (" + std::to_string(table.shape(0)) + ", " +
                                std::to_string(table.shape(1)) + ") does not fit " + std::to_string(blocks.shape(0)) +
                                " blocks of " + std::to_string(n_heads) + " heads");
  const libra::Cache cache{layers.data(), static_cast<std::int64_t>(layers.shape(0)), n_blocks, n_heads, block_stride,
                           head_stride, page_bytes};
  const libra::Extents target{reinterpret_cast<char*>(extents), n_extents, extent_bytes};
  const libra::Rows rows{blocks.data(), table.data(), static_cast<std::int64_t>(blocks.shape(0))};
  const auto direction = gather ? libra::Direction::gather : libra::Direction::scatter;
  nb::gil_scoped_release release;
  return libra::move(cache, target, rows, direction, threads, streaming);
}

void copy_bytes(Array<std::uint8_t, 1> to, Array<const std::uint8_t, 1> from, int threads, bool streaming) {
  if (to.shape(0) != from.shape(0)) throw std::invalid_argument("copy between arrays of different sizes");
  char* target = reinterpret_cast<char*>(to.data());
  const char* source = reinterpret_cast<const char*>(from.data());
  const std::uint64_t n = from.shape(0);
  nb::gil_scoped_release release;
  libra::copy_contiguous(target, source, n, threads, streaming);
}

}  // namespace

NB_MODULE(_pages, m) {
  m.doc() = "Whole KV pages between paged KV tensors and arena extents";
  m.def("move_pages", &move_pages, nb::arg("layers"), nb::arg("n_blocks"), nb::arg("n_heads"), nb::arg("block_stride"),
        nb::arg("head_stride"), nb::arg("page_bytes"), nb::arg("extents"), nb::arg("n_extents"), nb::arg("extent_bytes"),
        nb::arg("blocks"), nb::arg("table"), nb::arg("gather"), nb::arg("threads"), nb::arg("streaming"));
  m.def("copy_bytes", &copy_bytes, nb::arg("to"), nb::arg("from_"), nb::arg("threads"), nb::arg("streaming"));
  m.def("fence", &libra::drain_stores, "A full memory fence");
}
