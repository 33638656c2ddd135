"""C++ kernels (nanobind) behind thin typed wrappers. No decisions in Python live here."""
