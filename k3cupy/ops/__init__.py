"""The public functions, one file an operation: each joins accept, choose, kernels and call."""
