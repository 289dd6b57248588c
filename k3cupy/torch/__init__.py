"""The package inside frameworks: PyTorch modules and the operator for its compiler."""
