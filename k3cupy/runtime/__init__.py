"""The only code that knows the GPU toolchain: tensor views, instances, launches, devices.

Nothing here imports another part of k3cupy, and importing it touches neither CuPy nor the driver:
both are loaded at the first call that needs them.
"""
