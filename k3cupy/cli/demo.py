"""``k3cupy demo``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click

from k3cupy.runtime.toolchain import optional

_FILE = "mla_decode_step.py"


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def demo(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Decode through one Kimi-K3 MLA layer, fused and unfused, and compare; needs PyTorch."""
    with optional("demo"):
        import torch  # noqa: F401
    folder = _examples()
    sys.path.insert(0, str(folder))  # for the modules that lie beside it
    try:
        command = runpy.run_path(str(folder / _FILE), run_name="k3cupy_demo")["main"]
        command.context_settings["help_option_names"] = context.help_option_names
        code = command.main(list(arguments), prog_name=context.command_path, standalone_mode=False)
    finally:
        sys.path.remove(str(folder))
    context.exit(code or 0)


def _examples() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / _FILE).is_file():
            return folder
    raise FileNotFoundError(f"the demo is missing beside {package}; reinstall k3cupy")
