"""Which kernel for which linear layer."""
