"""Timing kernels on a GPU, and where a number was measured; the tuner and the benchmarks use it."""
