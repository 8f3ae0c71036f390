"""Benchmarks: importable, tested at small size, one JSON object per case."""
