// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78) of a contiguous buffer, slicing-by-8 with the GIL released.
// Used for journal records and for the tensors of published weights.
#include <array>
#include <cstdint>
#include <cstring>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1u) ? kPolynomial : 0u);
    t[0][i] = c;
  }
  for (std::uint32_t i = 0; i < 256; ++i)
    for (int s = 1; s < 8; ++s) t[s][i] = (t[s - 1][i] >> 8) ^ t[0][t[s - 1][i] & 0xFFu];
  return t;
}

constexpr Tables kTables = make_tables();

std::uint32_t crc32c(const unsigned char* p, std::size_t n, std::uint32_t crc) {
  crc = ~crc;
  while (n >= 8) {
    // Bytes are combined explicitly so that the result does not depend on the machine's byte order.
    const std::uint32_t low = crc ^ (std::uint32_t(p[0]) | std::uint32_t(p[1]) << 8 | std::uint32_t(p[2]) << 16 |
                                     std::uint32_t(p[3]) << 24);
    crc = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
          kTables[4][low >> 24] ^ kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
    p += 8;
    n -= 8;
  }
  while (n--) crc = (crc >> 8) ^ kTables[0][(crc ^ *p++) & 0xFF];
  return ~crc;
}

}  // namespace

NB_MODULE(_checksum, m) {
  m.doc() = "CRC-32C of contiguous byte buffers";
  m.def(
      "crc32c_bytes",
      [](nb::bytes data, std::uint32_t seed) {
        const auto* p = reinterpret_cast<const unsigned char*>(data.c_str());
        const std::size_t n = data.size();
        nb::gil_scoped_release release;
        return crc32c(p, n, seed);
      },
      nb::arg("data"), nb::arg("seed") = 0u);
  m.def(
      "crc32c_array",
      [](nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> data, std::uint32_t seed) {
        const unsigned char* p = data.data();
        const std::size_t n = data.shape(0);
        nb::gil_scoped_release release;
        return crc32c(p, n, seed);
      },
      nb::arg("data"), nb::arg("seed") = 0u);
}
