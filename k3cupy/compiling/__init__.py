"""The parts of ``k3cupy.compile``: what is looked at, what the compiler says of it, its times."""
