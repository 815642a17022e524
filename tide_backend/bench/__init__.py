"""Benchmark of single collectives beside the stock backend: ``python -m tide_backend.bench --help``."""
