"""The documents say what is true: code runs and prints what it should, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib.util
import itertools
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import docs_helpers
import pytest
import torch
from click.testing import CliRunner
from docs_helpers import MARKS, Outcome, blocks, prose

import k3cupy
from k3cupy import projections
from k3cupy.choose.table import KERNELS, config_of, key_of, slug
from k3cupy.cli import main as command_line
from k3cupy.ops.dispatch_report import logger
from k3cupy.runtime.devices import NAMED
from k3cupy.runtime.offline import ARCHITECTURES
from k3cupy.tuning.tune import FAMILY_OF

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "tests")
    for path in folder.glob("*.md")
)
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(k3cupy.__path__, prefix="k3cupy.")
    if not module.name.endswith("__main__")
)  # fmt: skip

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FOLDERS = ("k3cupy/", "cuda_src/", "tests/", "examples/", "docs/", ".ci/")

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Docstrings


def test_the_api_reference_has_every_public_name() -> None:
    listed = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", read(ROOT / "docs/api.rst"), re.M)
    assert sorted(listed) == sorted(k3cupy.__all__)


def test_pages_and_api_reference_lead_to_each_other() -> None:
    """By the labels of its sections, which are the anchors of their headings too."""
    label, page = r"^\.\. _([\w-]+):\n\n.+\n-+\n\n", r"(?:Its|Their) page: :doc:`(\w+)`\.$"
    found = re.findall(label + page, read(ROOT / "docs/api.rst"), re.M)
    pages = {page: label for label, page in found}
    assert len(pages) == len(found) == read(ROOT / "docs/api.rst").count("\n---")
    for path in (ROOT / "docs").glob("*.md"):
        links = re.findall(r"\(api\.rst#([\w-]+)\)", read(path))
        assert links == ([pages.pop(path.stem)] if path.stem in pages else []), path.name
    assert not pages, "no such page"


@pytest.mark.parametrize("name", ["k3cupy", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    if name.startswith("k3cupy.engines.transformers_"):
        pytest.importorskip("transformers")
    if name == "k3cupy.bench.triton_norms":
        pytest.importorskip("triton")
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_every_public_function_has_an_example_or_needs_none() -> None:
    """What a newcomer calls shows how; a class of data, an error and a report need no example."""
    operations = [name for name in k3cupy.__all__ if name.startswith("fused_")]
    assert len(operations) >= 6
    for name in (*operations, "explain_mla_prefill", "warmup", "source_dir"):
        assert ">>>" in (getattr(k3cupy, name).__doc__ or ""), name
    for name in k3cupy.__all__:
        assert getattr(k3cupy, name).__doc__, f"{name} has no docstring"


# Documents


def test_there_are_documents() -> None:
    assert ROOT / "README.md" in DOCUMENTS


@each_document
def test_python_in_documents_is_python(path: Path) -> None:
    """Also that of blocks which do not run on this machine."""
    for block in blocks(read(path), "python"):
        ast.parse(block.text)


@each_document
def test_marks_of_code_blocks_are_known(path: Path) -> None:
    """A mark that is misspelt would keep its block from ever running, or from being compared."""
    code_before = False
    for block in blocks(read(path)):
        where = f"{path.name}:{block.line}"
        assert block.marks <= MARKS.get(block.language, set()), where
        code_before |= block.language == "python"
        assert code_before or not block.marks, f"{where}: the output of which code?"


@each_document
def test_names_of_the_package_in_documents_exist(path: Path) -> None:
    """Whatever a document calls as `k3cupy.name` is public, a module, or the logger."""
    for block in blocks(read(path), "python"):
        for name in re.findall(r"\bk3cupy\.\w+", block.text):
            is_public = name.removeprefix("k3cupy.") in k3cupy.__all__
            assert is_public or name in (*MODULES, logger.name), name


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(prose(read(path))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {link}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name} links to {link}"


@each_document
def test_paths_in_documents_exist(path: Path) -> None:
    """A path in backquotes that begins like one of ours names a file or a pattern of files."""
    for quoted in re.findall(r"`([^`\s]+)`", prose(read(path))):
        if quoted.startswith(FOLDERS) and "<" not in quoted:
            found = list(ROOT.glob(quoted.rstrip("/")))
            assert found, f"{path.name} names {quoted}"


@each_document
def test_documents_have_one_title(path: Path) -> None:
    assert len(re.findall(r"^# ", prose(read(path)), re.MULTILINE)) == 1


# Their tables


def table_below(header: str, page: str = "README.md") -> list[list[str]]:
    """The rows of a page's table with that header."""
    _, _, rest = read(ROOT / page).partition(f"\n| {header} |")
    lines = rest.splitlines()[2:]
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_readme_names_the_models_that_are_known() -> None:
    tables = ROOT / "k3cupy/choose/tables/nvidia_h200"
    measured = json.loads(read(tables / "gemm.json"))["problems"]
    *named, others = table_below("model")
    assert others[0] == "other models"
    for (name, has), model in zip(named, projections.MODELS, strict=True):
        assert name.lower().startswith(model)
        assert "measured configurations for its projections" in has
        of = projections.shapes(model)
        assert {f"bfloat16 {p.n}x{p.k}" for p in of} <= measured.keys()
        if "epilogues" in has:
            assert {path.stem for path in tables.iterdir()} > {"mla_decode", "mla_prefill"}


def test_the_readme_names_the_gpus_that_ci_compiles_for() -> None:
    rows = table_below("GPU")
    named = [arch for gpu, _ in rows for arch in re.findall(r"sm_\d+", gpu)]
    assert sorted(set(named)) == sorted(ARCHITECTURES)
    run = [gpu for gpu, state in rows if state.startswith("run, tested, measured")]
    assert run == ["H200 (sm_90)"]
    tables = {path.parent.name for path in (ROOT / "k3cupy/choose/tables").glob("*/*.json")}
    (public,) = (gpu for gpu, state in rows if "public figures" in state)
    assert tables == {slug(NAMED["h200"].name), *re.findall(r"sm_\d+", public)}


def test_the_concepts_name_the_fields_of_every_configuration() -> None:
    rows = table_below("kernel", "docs/concepts.md")
    assert {name.strip("`") for name, *_ in rows} == KERNELS.keys()
    for name, named, example in rows:
        kernel = name.strip("`")
        fields = [field.name for field in dataclasses.fields(KERNELS[kernel].Config)]
        assert named == ", ".join(fields)
        assert key_of(config_of(kernel, example.strip("`"))) == example.strip("`")


def test_lists_of_pages_are_whole() -> None:
    """What is named, known or written elsewhere in the package."""
    linear, serving = read(ROOT / "docs/low_latency_linear.md"), read(ROOT / "docs/serving.md")
    (kept,) = re.findall(r"a family of kernels: (.+?) in `tables", linear, re.DOTALL)
    assert re.findall(r"`(\w+)\.json`", kept) == sorted(set(FAMILY_OF.values()))
    (gpus,) = re.findall(r"^`--gpu` is (.+?);", serving, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", gpus)) == {*NAMED, "sm_90"}
    extras = {extra for extra, *_ in table_below("extra", "docs/dependencies.md")}
    assert extras == EXTRAS.keys() - {"cu12", "cu13", "dev"}
    results = re.findall(r"^## (Results on an H200.+)$", read(ROOT / "docs/benchmarks.md"), re.M)
    linked = {
        link for row in table_below("figures below", "docs/benchmarks.md")
        for link in LINK.findall(row[0])
    }  # fmt: skip
    assert {f"#{re.sub('[^a-z0-9-]', '', r.lower().replace(' ', '-'))}" for r in results} < linked
    measured = command_line.commands["bench"].commands.keys() - {"plot", "apply"}
    for said in (r"measures: decode \(the default\), (.+?)\n\n?#   HUNT", r"BENCH=decode, (.+?)\n"):
        (names,) = re.findall(said, MAKEFILE, re.DOTALL)
        assert {"decode", *re.findall(r"\b[a-z]+\b", names)} - {"or"} == measured


def test_the_readme_names_every_operation() -> None:
    text = read(ROOT / "README.md") + read(ROOT / "docs/prefill_epilogues.md")
    for name in k3cupy.__all__:
        if name.startswith(("fused_", "explain_")):
            assert f"`{name}`" in text, name


# Their code, run


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, str]]]:
    """By page and line: what became of each `python` block, all of them run by one child."""
    folder = tmp_path_factory.mktemp("docs")
    results = folder / "results.json"
    pages = dict.fromkeys(str(path) for path, _ in CODE)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("K3CUPY_")}
    environment |= {"K3CUPY_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, docs_helpers.__file__, str(results), *pages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text(encoding="utf-8"))


CODE = [(path, block.line) for path in DOCUMENTS for block in blocks(read(path), "python")]


@pytest.mark.timeout(600)  # on a GPU many kernels are compiled, and some are tuned
@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize(("path", "line"), CODE, ids=[f"{path.name}:{n}" for path, n in CODE])
def test_code_in_documents_runs(
    path: Path, line: int, outcomes: dict[str, dict[str, dict[str, str]]]
) -> None:
    outcome = Outcome(**outcomes[str(path)][str(line)])
    if outcome.skipped:
        pytest.skip(f"{path.name}:{line} {outcome.skipped}")
    if outcome.failed:
        pytest.fail(outcome.failed, pytrace=False)


PAGE = """
```python
x = 6
print(x * 7)
```

It prints:

```text output
{shown}
```

```python gpu
import k3cupy

{on_gpu}
```

```python
print(x + 1)  # -> {more}
```
"""


@pytest.mark.parametrize(
    ("on_gpu", "wrong"),
    [
        ("raise k3cupy.ToolchainError('there is no GPU')", ""),
        ("k3cupy.warmup('no_such_operation')", "ValueError: op: expected"),
        ("print(42)", "it needs no GPU"),
    ],
)
def test_a_block_for_a_gpu_runs_until_it_is_asked_for(on_gpu: str, wrong: str) -> None:
    page = PAGE.format(shown="42", more="7", on_gpu=on_gpu)
    first, gpu, last = docs_helpers.run_page(page, "page", frozenset({"output", "cpu"})).values()
    assert (first, last) == (Outcome(), Outcome())
    assert (wrong in gpu.failed) if wrong else gpu == Outcome()


@pytest.mark.parametrize(
    ("shown", "more", "failed"),
    [
        ("42", "7", [False, False]),
        ("4...", "7", [False, False]),
        ("41", "7", [True, False]),
        ("42\n43", "7", [True, False]),
        ("42", "8", [False, True]),
        ("42", "7\nprint(y)", [False, True]),
    ],
)
def test_what_is_wrong_in_a_page_is_found(shown: str, more: str, failed: list[bool]) -> None:
    page = PAGE.format(shown=shown, more=more, on_gpu="raise k3cupy.ToolchainError")
    first, _, last = docs_helpers.run_page(page, "page", frozenset({"output", "cpu"})).values()
    assert [bool(first.failed), bool(last.failed)] == failed


def test_the_text_of_another_machine_is_not_compared() -> None:
    page = "```python\nprint(1)\n```\n```text {}\n2\n```\n"
    for mark, failed in (("gpu", False), ("", False), ("cpu", True), ("output", True)):
        outcomes = docs_helpers.run_page(page.format(mark), "page", frozenset({"output", "cpu"}))
        assert bool(outcomes[1].failed) is failed, mark


def test_code_that_fails_only_the_second_time_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nimport os\n\nos.mkdir('copy')\n```\n", encoding="utf-8")
    (outcome,) = docs_helpers.run_twice(page, frozenset({"output", "cpu"})).values()
    assert outcome.failed.startswith("in the second run")
    assert "FileExistsError" in outcome.failed


# Their commands, parsed

PROJECT = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = read(ROOT / "Makefile")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^(?:#   )?([A-Z_]+) ?\??=", MAKEFILE, re.MULTILINE))


def check_command_line(words: list[str], complete: bool) -> None:
    """Parse what follows `k3cupy` with the real options."""
    command: click.Command = command_line
    while isinstance(command, click.Group) and words:
        assert words[0] in command.commands, f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    try:
        # A command keeps the names of its option --help from its first context.
        command.make_context(command.name, words, **command_line.context_settings)
    except click.exceptions.Exit as end:  # --help
        assert end.exit_code == 0
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        if complete:
            raise


FILES = {
    "benchmarks": "benchmarks",
    "my_cuda_src": "cuda_src",
    **{name: name for name in ("README.md", "docs/benchmarks.md", "docs/comparison.md")},
    **dict.fromkeys(
        ("run1.json", "run2.json", "h200.json"), "benchmarks/results/tune_mla_norm_h200_chain.json"
    ),
}
"""What the documents' commands find in their folder, and what it is here."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands find what they read."""
    (tmp_path / "docs").mkdir()
    for name, here in FILES.items():
        put = os.symlink if (ROOT / here).is_dir() else shutil.copy
        put(ROOT / here, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_make(words: list[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert name in (VARIABLES if is_variable else TARGETS), f"make does not know {name}"


def check_pip(words: list[str]) -> None:
    """Only PyTorch and this package are installed by hand, with extras that it has."""
    if re.match(r"torch\b", words[0]):
        assert words[1:] in ([], ["--index-url", "https://download.pytorch.org/whl/cpu"])
        return
    assert len(words) == 1
    extras = re.fullmatch(r"(?:\.|k3cupy)(?:\[([\w,]+)\])?", words[0])
    assert extras, f"pip install {words[0]}"
    for extra in filter(None, (extras[1] or "").split(",")):
        assert extra in EXTRAS, f"no extra {extra}"


def check_command(command: str, complete: bool = True) -> None:
    words = shlex.split(command, comments=True)
    if words[:1] == ["k3cupy"]:
        check_command_line(words[1:], complete)
    elif words[:1] == ["make"]:
        check_make(words[1:])
    elif words[:2] == ["pip", "install"]:
        check_pip(words[2:])
    elif words[0].startswith(".venv/bin/"):
        tools = {tool.partition("==")[0] for tool in EXTRAS["dev"]}
        assert words[0].removeprefix(".venv/bin/") in tools, f"{words[0]} is not in the extra dev"
    else:
        raise AssertionError(f"no rule for checking {command!r}")


def lines_of(text: str) -> list[str]:
    """The commands of the `console` blocks of a document."""
    shown = (block.text.replace("\\\n", " ") for block in blocks(text, "console"))
    return [line for text in shown for line in text.splitlines() if line]


@each_document
@pytest.mark.usefixtures("folder")
def test_commands_in_documents_exist(path: Path) -> None:
    """Commands of `console` blocks, and those in backquotes, which may leave out arguments."""
    for line in lines_of(read(path)):
        check_command(line)
    for quoted in re.findall(r"`([^`]+)`", prose(read(path))):
        command = " ".join(quoted.split())
        if command.startswith(("k3cupy ", "make ", "pip install ")):
            check_command(command, complete=False)


@pytest.mark.parametrize(
    "command",
    [
        "k3cupy no-such-thing",
        "k3cupy warmup --no-such-option",
        "k3cupy warmup --shape wide",
        "k3cupy bench apply",
        "make no-such-target",
        "make test NO_SUCH_VARIABLE=1",
        'pip install ".[no_such_extra]"',
        "pip install torch something-else",
        "pip install something-else",
        ".venv/bin/no-such-tool",
        "rm -rf /",
    ],
)
def test_commands_that_do_not_exist_are_found(command: str) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check_command(command)


# Their commands, run

COMMANDS = sorted({line for path in DOCUMENTS for line in lines_of(read(path))})
NOT_RUN = {
    "k3cupy bundle": "takes minutes for a whole model; test_bundles.py makes small ones",
    "pip install": "needs a network; .ci/install_lines.py resolves these lines",
    ".venv/bin/pre-commit": "installs a hook of git",
}
NEEDS_GPU = re.compile(r"k3cupy (?:tune|warmup|bench (?!plot|apply))")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_in_documents_run(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what needs a GPU all runs that needs none: options are looked at before it is asked for.

    `make` says what it would run: the demo has tests of its own, and of `make test` this is one.
    """
    for beginning, why in NOT_RUN.items():
        if command.startswith(beginning):
            pytest.skip(why)
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        dry_run = ["make", "-n", *words[1:]]
        done = subprocess.run(dry_run, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    if importlib.util.find_spec("cuda") is None and words[1] in ("compile", "bench"):
        pytest.skip("needs a compiler, or what draws")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder / "cache"))
    needs_gpu = bool(NEEDS_GPU.match(command))
    if needs_gpu and torch.cuda.is_available():
        pytest.skip("measures or compiles for minutes on this GPU")
    done = CliRunner().invoke(command_line, words[1:])
    assert done.exit_code == needs_gpu, done.output
    assert not needs_gpu or re.search(r"^Error: .*\bGPU\b", done.output, re.M), done.output
