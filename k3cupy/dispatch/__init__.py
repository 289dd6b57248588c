"""Which kernel for which linear layer: plans, their reasons, and what came of them."""
