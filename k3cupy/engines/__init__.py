"""The package inside serving engines that are installed as they come: one module an engine.

Nothing here is imported by the rest of the package, and importing an engine's module imports
neither the engine nor PyTorch.
"""
