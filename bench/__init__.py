"""Benchmarks: one question per file, seeded, each printing a table and writing JSON to `bench/results/`."""
