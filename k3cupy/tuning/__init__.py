"""The parts of ``k3cupy.tune``: what is measured, how, on what, and where it is kept."""
