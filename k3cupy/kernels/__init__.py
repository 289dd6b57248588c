"""What a ``.cu`` sees: one module a source, of the same name.

Each has ``KERNEL`` (its name in choices and tables), ``SOURCE``, ``Variant`` (what a call decides),
``Config`` (what is tuned), its parameters in the order of the source, and ``launches``: the grid
and the arguments of a validated call. Nothing here chooses.
"""
