"""The operations on CPU memory, in NumPy: what CPU tensors run, and what the kernels must equal.

NumPy with ml_dtypes rather than PyTorch, so that a machine without PyTorch runs the whole API.
"""
