"""The package inside frameworks: PyTorch modules, and operators for its compiler."""
