"""The README's ways to install, as `make check-install` resolves them; here without a network."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("install_lines", ROOT / ".ci/install_lines.py")
install_lines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(install_lines)

WAYS = install_lines.ways((ROOT / "README.md").read_text(encoding="utf-8"))
CUDA_13 = [["torch>=2.11"], [".[cu13,torch]"]]


def test_the_readme_has_a_way_for_every_machine() -> None:
    assert [install_lines.extra_of(way) for way in WAYS] == ["13", "12", None, None]


def test_what_was_resolved_is_what_the_readme_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of the README are of these lines and dependencies; others are resolved in CI."""
    known = ROOT / "benchmarks/results/install_lines.json"
    document = json.loads(known.read_text(encoding="utf-8"))
    assert document["inputs"] == install_lines.digest()
    assert len(document["ways"]) == len(WAYS) and not any(w.get("wrong") for w in document["ways"])
    monkeypatch.setattr("sys.argv", ["install_lines.py", "--unless-known", str(known)])
    monkeypatch.setattr(install_lines, "follow", None)
    assert install_lines.main() == 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_torch_comes_before_the_extra(way: list[list[str]]) -> None:
    """In one command pip walks torch back to another CUDA."""
    names = [words[0] for words in way]
    assert names[-1].startswith(".")
    assert [name.startswith("torch") for name in names] == [True, False][2 - len(names) :]


@pytest.mark.parametrize(
    ("way", "versions", "found"),
    [
        (CUDA_13, {"torch": "2.14", "nvidia-cuda-runtime": "13.0.96", "cupy-cuda13x": "14.2"}, ""),
        (
            CUDA_13,
            {"torch": "2.10", "nvidia-cuda-runtime-cu12": "12.8.90", "cupy-cuda13x": "14.2"},
            "cu13: expected torch 2.10 for CUDA 13, got CUDA ['12.8.90']",
        ),
        (CUDA_13, {"torch": "2.14"}, "cu13: expected torch 2.14 for CUDA 13, got CUDA []"),
        (CUDA_13, {"numpy": "2.5"}, "cu13: expected cupy-cuda13x, got none"),
        ([[".[torch]"]], {"torch": "2.14", "numpy": "2.5"}, ""),
        ([["."]], {"nvidia-cuda-runtime": "13.0.96"}, "expected no CUDA, got ['13.0.96']"),
    ],
)
def test_another_cuda_is_found(way: list[list[str]], versions: dict[str, str], found: str) -> None:
    assert install_lines.wrong(way, versions) == found


def test_an_index_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    way = [["torch", "--index-url", "http://127.0.0.1:9/whl/cpu"]]
    assert install_lines.follow(way, tmp_path)["skipped"] == "its index does not answer here"
