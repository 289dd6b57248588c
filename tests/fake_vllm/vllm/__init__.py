"""What stands for vLLM in the tests: its names, with slow kernels behind its operators."""

__version__ = "0.33.0"
