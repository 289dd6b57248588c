"""Resolve the README's pip lines as pip would, and check that torch and the extra agree on CUDA.

    python .ci/install_lines.py [--json FILE] [--unless-known FILE]

Nothing is installed. Each `console` block of the README that begins with `pip install` is a way to
install, line by line in an empty environment: what a line resolves to binds the lines below it. An
extra `cu12` or `cu13` must end with a torch for that CUDA, and a way without an extra without CUDA.
Prints what is fetched, and how many megabytes. What a JSON file of an earlier run knows of the same
lines and dependencies is not resolved again with --unless-known. A line whose own index
(`--index-url`) does not answer here is left out, and says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```console\n(pip install .*?)^```", re.MULTILINE | re.DOTALL)
_INSTALLED = ("cu12", "cu13", "torch")
"""Extras that the README's lines have."""

CUDA_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?")


def ways(text: str) -> list[list[list[str]]]:
    """The ways to install of a page: each a list of lines, each the words behind `pip install`."""
    return [
        [shlex.split(line, comments=True)[2:] for line in block.splitlines() if line.strip()]
        for block in BLOCK.findall(text)
    ]


def extra_of(way: list[list[str]]) -> str | None:
    """`12` or `13` where a line of the way has the extra of that CUDA."""
    found = re.search(r"\bcu(\d\d)\b", " ".join(word for line in way for word in line))
    return found[1] if found else None


def wrong(way: list[list[str]], versions: dict[str, str]) -> str:
    """What does not fit in the packages that a way ends with, or nothing."""
    want, cuda = extra_of(way), [v for n, v in versions.items() if CUDA_RUNTIME.fullmatch(n)]
    majors = {version.partition(".")[0] for version in cuda}
    if want is None:
        return f"expected no CUDA, got {cuda}" if cuda else ""
    if "torch" in versions and majors != {want}:
        return f"cu{want}: expected torch {versions['torch']} for CUDA {want}, got CUDA {cuda}"
    if f"cupy-cuda{want}x" not in versions:
        return f"cu{want}: expected cupy-cuda{want}x, got none"
    return ""


def resolve(words: list[str], pins: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """What pip would install for a line, where `pins` are there already."""
    constraints, report = folder / "pins.txt", folder / "report.json"
    constraints.write_text("".join(f"{n}=={v}\n" for n, v in pins.items()), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
    command += ["--use-feature=fast-deps", "--report", str(report), "-c", str(constraints), *words]
    subprocess.run(command, cwd=ROOT, check=True)
    found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return found


def size_of(url: str) -> int:
    """Bytes of a file of an index."""
    if url.startswith("file:"):
        path = Path(urllib.request.url2pathname(url.removeprefix("file://")))
        return path.stat().st_size if path.is_file() else 0
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
        return int(answer.headers["Content-Length"])


def answers(words: list[str]) -> bool:
    """Whether the index that a line names can be reached from here."""
    if "--index-url" not in words:
        return True
    try:
        urllib.request.urlopen(words[words.index("--index-url") + 1], timeout=10).close()
    except OSError:
        return False
    return True


def follow(way: list[list[str]], folder: Path) -> dict[str, Any]:
    """Resolve a way line by line: its packages, megabytes, and what is wrong."""
    text = "; ".join(shlex.join(["pip", "install", *line]) for line in way)
    if not all(map(answers, way)):
        return {"way": text, "skipped": "its index does not answer here"}
    pins: dict[str, str] = {}
    size = 0
    for line in way:
        for item in resolve(line, pins, folder):
            name = item["metadata"]["name"].lower().replace("_", "-")
            if name not in pins and name != "k3cupy":
                size += size_of(item["download_info"]["url"])
                pins[name] = item["metadata"]["version"]
    return {
        "way": text,
        "megabytes": round(size / 1e6),
        "versions": pins,
        "wrong": wrong(way, pins),
    }


def digest() -> str:
    """What tells the README's lines and the package's dependencies from others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = ways((ROOT / "README.md").read_text("utf-8"))
    extras = {n: d for n, d in project["optional-dependencies"].items() if n in _INSTALLED}
    inputs = json.dumps([lines, project["requires-python"], project["dependencies"], extras])
    return hashlib.sha256(inputs.encode()).hexdigest()[:16]


def main() -> int:
    """Follow every way of the README; 1 where one is wrong, or none is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what was found there")
    parser.add_argument("--unless-known", type=Path, help="a file of an earlier run")
    given = parser.parse_args()
    file, known = given.json, given.unless_known
    if known is not None and json.loads(known.read_text("utf-8")).get("inputs") == digest():
        print(f"{known} knows these lines and dependencies.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = [follow(way, Path(folder)) for way in ways((ROOT / "README.md").read_text("utf-8"))]
    for one in found:
        torch = one.get("versions", {}).get("torch", "none")
        said = one.get("skipped") or f"{one['megabytes']} MB, torch {torch} {one['wrong']}"
        print(f"{one['way']}\n    {said}")
    if file is not None:
        python = ".".join(map(str, sys.version_info[:2]))
        document = {"python": python, "inputs": digest(), "ways": found}
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(not found or any(one.get("wrong") for one in found))


if __name__ == "__main__":
    sys.exit(main())
