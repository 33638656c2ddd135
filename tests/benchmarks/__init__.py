"""Benchmarks: ``make bench`` runs them all and writes ``build/bench.json``. They print; they assert nothing."""
