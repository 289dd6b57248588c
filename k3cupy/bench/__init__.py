"""Measurement: CUDA graphs, medians, everything that is compared in one run, results as JSON."""
