"""``python -m k3cupy``: the command line."""

from __future__ import annotations

from k3cupy.cli import main

if __name__ == "__main__":
    main()
