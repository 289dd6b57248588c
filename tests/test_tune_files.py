"""What the tuner keeps: the user cache, interruptions, several at once, shared files, commands."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gemm_table_helpers import in_processes
from helpers import refused, run_child
from tune_helpers import GPU, H200, FakeMeter, job, run, use_fake_gpu, write_export

import k3cupy
from k3cupy.choose import cache
from k3cupy.choose.table import GEMM, Entry, kernels_digest, parts_of
from k3cupy.cli import main
from k3cupy.runtime import devices
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.tuning import files
from k3cupy.tuning import tune as tuning
from k3cupy.tuning.engine import Measured
from k3cupy.tuning.entries import Candidate
from k3cupy.tuning.report import watch
from k3cupy.tuning.targets import Target

SHAPE, SMALL = (2112, 7168), (96, 256)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path / "cache"))
    use_fake_gpu(monkeypatch)
    yield
    cache.reload()


def kept(gpu: DeviceInfo = GPU, family: str = GEMM) -> dict[tuple[str, int], Entry]:
    """The user cache as it is on the disk."""
    return {entry.key: entry for entry in cache.table(family, gpu.name)}


def exporting(meter: FakeMeter, export: Path, *args: Any) -> None:
    """Tune with a fake and an export."""
    tuning.run(job(*args), meter, progress=False, export=export)


def row(tokens: int, shape: tuple[int, int] = SHAPE) -> tuple[str, int]:
    return f"bfloat16 {shape[0]}x{shape[1]}", tokens


# Going on after an interruption


def test_a_second_run_measures_nothing_and_says_the_same() -> None:
    first = run(FakeMeter(), tokens=[1, 8])
    meter = FakeMeter()
    second = run(meter, tokens=[1, 8])
    assert meter.timed == meter.compiled == []
    assert [e.config for e in second.entries] == [e.config for e in first.entries]
    assert second.num_measured == 0
    assert "0 measured now, 4 before with the same kernels" in str(second)


def test_again_measures_anew() -> None:
    run(FakeMeter(), tokens=[1, 8])
    meter = FakeMeter(us=lambda t, c, effort: 5.0 if c.config else 6.0)
    report = run(meter, tokens=[8], again=True)
    assert report.num_measured == 2
    assert {e.linear_us for e in report.entries} == {6.0}
    assert kept()[row(1)].linear_us == 20.0, "not asked for, not touched"


@pytest.mark.parametrize("calls", [0, 1, 7, 20])
def test_an_interruption_loses_nothing_that_was_measured(calls: int) -> None:
    meter = FakeMeter(interrupt_at=calls)
    with pytest.raises(KeyboardInterrupt):
        run(meter, [SHAPE, SMALL], [1, 2, 8, 16])
    done = meter.targets[:-1] if calls % 2 else meter.targets
    assert {t.key for t in done} <= set(kept()) <= {t.key for t in meter.targets}
    assert meter.closed == 1
    before = set(kept())
    rest = FakeMeter()
    report = run(rest, [SHAPE, SMALL], [1, 2, 8, 16])
    assert not before & {t.key for t in rest.targets}, "nothing twice"
    assert len(report.entries) == len(kept()) == 16


def test_an_interruption_while_the_cache_is_written_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add, calls = cache.add, []

    def interrupted(family: str, entries: Any, gpu: DeviceInfo) -> Path | None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return add(family, entries, gpu)

    monkeypatch.setattr(cache, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(FakeMeter(), tokens=[1, 8, 16])
    assert set(kept()) == {row(1), row(8)}


@pytest.mark.parametrize("calls", [1, 7, 13])
def test_an_interrupted_run_leaves_an_export_of_what_it_measured(
    calls: int, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "export.json"
    with pytest.raises(KeyboardInterrupt):
        exporting(FakeMeter(interrupt_at=calls), path, [SHAPE, SMALL], [1, 8])
    if not kept():
        assert not path.exists(), "nothing was measured, and a file of nothing would be none"
        return
    _, entries = files.read_export(path)
    assert {entry.key for entry in entries} == set(kept())
    exporting(FakeMeter(), path, [SHAPE, SMALL], [1, 8])
    assert len(files.read_export(path)[1]) == len(kept()) == 8
    assert list(path.parent.iterdir()) == [path]


def test_an_export_is_written_as_measurements_come(tmp_path: Path) -> None:
    """A run that is killed has no last word."""
    path, seen = tmp_path / "export.json", list[set[tuple[str, int]]]()

    def us(target: Target, candidate: Candidate, effort: Any) -> float:
        seen.append({e.key for e in files.read_export(path)[1]} if path.exists() else set())
        assert seen[-1] == set(kept())
        return 10.0

    exporting(FakeMeter(us=us), path, [SHAPE], [1, 8])
    assert len(seen[-1]) == 3


def test_an_export_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    meter = FakeMeter()
    with pytest.raises(OSError, match=re.escape(str(tmp_path))):
        exporting(meter, tmp_path, [SHAPE], [1, 8, 16])
    assert len(meter.targets) == 1 and len(kept()) == 1


def test_what_is_known_narrows_what_is_measured_later() -> None:
    run(FakeMeter(), tokens=[16], residual=False)
    meter = FakeMeter()
    run(meter, tokens=[12], residual=False)
    assert len(meter.checked) == 4 + 6


def test_older_kernels_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    run(FakeMeter(), tokens=[8], residual=False)
    monkeypatch.setattr(cache, "kernels_digest", lambda family: "another")
    with pytest.warns(UserWarning, match="kernels of another version"):
        report = run(FakeMeter(), tokens=[8], residual=False)
    assert report.num_measured == 1


def test_where_nothing_can_be_kept_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path / "file"))
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.warns(UserWarning, match="cannot be written"),
    ):
        report = run(FakeMeter(), tokens=[8], residual=False)
    assert report.path is None and "kept nowhere: see the warning" in str(report)
    assert len(report.entries) == 1


def _tune_as_one_of_many(i: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_fake_gpu(patch)
        run(FakeMeter(), [(96 + 16 * i, 256), (512, 256)], [1, 8])


def _tune_in_eight_processes() -> None:
    in_processes(8, _tune_as_one_of_many)


def test_eight_processes_tune_at_once(tmp_path: Path) -> None:
    env = {"K3CUPY_CACHE_DIR": str(tmp_path / "shared")}
    assert run_child(_tune_in_eight_processes, env=env) == ""
    (path,) = tmp_path.glob("shared/*/*/*.json")
    _, problems = parts_of(path.read_text())
    assert sum(map(len, problems.values())) == 8 * 4 + 4


# Files to share


def exported(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A file with four measurements; the cache is empty again."""
    path = tmp_path / "folder" / "export.json"
    write_export(path, GEMM, run(FakeMeter(), tokens=[1, 8]).entries)
    cache.path_of(GEMM, GPU.name).unlink()
    cache.reload()
    return path


def test_an_export_is_a_table_with_what_it_was_measured_on(export: Path) -> None:
    document = exported(export)
    problems = document.pop("problems")
    assert document["gpu"] == GPU.name and document["arch"] == "sm_90"
    assert (document["family"], document["schema"]) == (GEMM, 2)
    assert document["sources"] == kernels_digest(GEMM)
    assert (document["commit"], document["num_sms"]) == ("0123", 100)
    assert document["packages"]["numpy"] and document["date"]
    assert list(problems) == ["bfloat16 2112x7168", "bfloat16 2112x7168 + residual"]
    assert {tuple(row) for rows in problems.values() for row in rows} == {("size", "us")}


def test_an_import_gives_what_was_exported(export: Path) -> None:
    assert kept() == {}
    files.import_file(export, GPU)
    found = kept()
    assert len(found) == 4
    header, entries = files.read_export(export)
    assert header["gpu"] == GPU.name
    for entry in entries:
        assert files.undated(found[entry.key]) == entry
    meter = FakeMeter()
    assert run(meter, tokens=[1, 8]).num_measured == 0


def of_another_gpu(document: dict[str, Any]) -> None:
    document["gpu"] = "NVIDIA B200"


def of_other_kernels(document: dict[str, Any]) -> None:
    document["sources"] = "0123"


def measured_alone(document: dict[str, Any]) -> None:
    document["unit"] = "us a launch, cold weights"


def not_measured(document: dict[str, Any]) -> None:
    document["problems"]["bfloat16 2112x7168"][0] = {"size": 1, "kernel": "skinny", "config": None}


def of_an_architecture(document: dict[str, Any]) -> None:
    document["gpu"] = None


def of_a_later_schema(document: dict[str, Any]) -> None:
    document["schema"] = 3


def of_no_family(document: dict[str, Any]) -> None:
    document["family"] = "gemv"


def without_facts(document: dict[str, Any]) -> None:
    del document["sources"]


def with_a_slower_choice(document: dict[str, Any]) -> None:
    entry = document["problems"]["bfloat16 2112x7168"][0]
    times = entry["us"] = {"fused_a": entry["us"]["fused_a"]}
    entry["preferred"] = max(times["fused_a"], key=times["fused_a"].get)


def with_an_impossible_config(document: dict[str, Any]) -> None:
    entry = document["problems"]["bfloat16 2112x7168"][0]
    entry["us"]["fused_a"]["8/16/512/1/1/8/1/1/4"] = 9.0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (of_another_gpu, "^those of NVIDIA B200 in"),
        (of_other_kernels, "^those of"),
        (measured_alone, "^'us a launch, cold weights' in"),
        (not_measured, "figures that nobody measured"),
        (of_an_architecture, "figures that nobody measured"),
        (of_a_later_schema, "expected schema 2, got 3"),
        (of_no_family, "there is no family 'gemv'"),
        (without_facts, "KeyError: 'sources'"),
        (with_a_slower_choice, "is not as good as the fastest"),
        (with_an_impossible_config, "cannot run the configuration '8/16/512/1/1/8/1/1/4'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_whole(
    export: Path, spoil: Callable[[dict[str, Any]], None], text: str
) -> None:
    document = exported(export)
    spoil(document)
    export.write_text(json.dumps(document))
    found = refused({"path": export, "gpu": GPU}, "import", text, operation=files.import_file)
    assert str(export) in found
    assert kept() == {}


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null", b'{"schema": 2}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    arguments = {"path": path, "gpu": GPU}
    refused(arguments, "import", rf"^{path}, which is not one", operation=files.import_file)


# What is shown


def test_a_line_a_shape_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = job([SHAPE, SMALL], [1, 8])

    def why_wrong(target: Target, candidate: Candidate) -> str | None:
        is_it = target.key == row(8, SMALL) and candidate.kernel == "skinny"
        return "not finite" if is_it else None

    tuning.run(wanted, FakeMeter(why_wrong=why_wrong))
    lines = capsys.readouterr().err.splitlines()
    shown = [line for line in lines if not line.startswith("refused")]
    assert [line.split(":")[0] for line in shown] == [
        "bfloat16 2112x7168",
        "bfloat16 96x256",
        "bfloat16 2112x7168 + residual",
        "bfloat16 96x256 + residual",
    ]
    assert all(": 2 measured, 1." in line for line in shown)
    assert lines[1].startswith("refused, not recorded: bfloat16 96x256, M = 8, skinny 8/")


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    targets = job([SHAPE], [8]).todo
    with watch(targets) as note:
        note(Measured(targets[0], None, {}))
    shown = capsys.readouterr().err
    assert "measuring bfloat16 2112x7168, M = 8" in shown
    assert "bfloat16 2112x7168 + residual, M = 8" in shown and "1/2" in shown


# Commands


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["tune", "--device", "0", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_dry_run_lists_what_would_be_measured() -> None:
    run(FakeMeter(), tokens=[8], residual=False)
    code, output = command("--shape", "2112x7168", "--tokens", "8", "--tokens", "12", "--dry-run")
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == "Test GPU: 3 to measure, 1 are known"
    assert lines[1].startswith("  bfloat16 2112x7168: M = 12; ") and lines[1].endswith(
        " candidates"
    )
    assert lines[2] == "  bfloat16 2112x7168 + residual: M = 8, 12; the best of these"
    assert len(lines) == 3


def test_the_parts_of_a_preset_are_all_of_it_and_share_nothing() -> None:
    """Each GPU measures its own, and `bench apply` makes one table of them."""

    def named(*arguments: str) -> list[str]:
        code, output = command(*arguments, "--tokens", "8", "--no-residual", "--dry-run")
        assert code == 0, output
        return [line.partition(":")[0] for line in output.splitlines()[1:]]

    every = named("--preset", "kimi-k3-tp8")
    parts = [named("--preset", "kimi-k3-tp8", "--part", f"{i}/3") for i in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == sorted(every)
    assert {len(part) for part in parts} <= {len(every) // 3, len(every) // 3 + 1}


def test_import_from_the_command_line(export: Path) -> None:
    code, output = command("--import", str(export))
    assert (code, output) == (0, "4 measurements of Test GPU were added\n")
    assert len(kept()) == 4


def test_import_for_a_gpu_that_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a bundle for it is made; the file must be of that GPU all the same."""
    file = tmp_path / "h200.json"
    write_export(file, GEMM, run(FakeMeter(), tokens=[1, 8]).entries, H200)

    def no_gpu(_: Any) -> Any:
        raise k3cupy.ToolchainError("the driver gives no GPU")

    monkeypatch.setattr(devices, "ordinal_of", no_gpu)
    code, output = command("--import", str(file))
    assert code == 1 and "--gpu: expected the name of a GPU, as h200, for none is" in output
    code, output = command("--import", str(file), "--gpu", "h200")
    assert (code, output) == (0, "4 measurements of NVIDIA H200 were added\n")
    code, output = command("--import", str(file), "--gpu", "a100")
    assert code == 1 and "import: expected measurements of NVIDIA A100" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Error: shapes: expected one of shapes, preset and module, got none"),
        (
            ("--op", "mla_decode", "--preset", "kimi-k3"),
            "preset: expected None with op='mla_dec",
        ),
        (
            ("--shape", "96x256", "--heads", "12"),
            "num_heads: expected None with .*got 12",
        ),
        (("--op", "mla_decode", "--kind", "fp4+fp4"), "kinds: expected some of .*, got 'fp4.fp4'"),
        (("--op", "mla_prefill", "--tokens", "0"), "tokens: expected integers above 0, got 0"),
        (("--op", "mla_prefill", "--heads", "0"), "num_heads: expected integers above 0, got 0"),
        (("--op", "mla_train"), "is not one of"),
        (
            ("--shape", "2112x7168", "--preset", "kimi-k3"),
            "got (shapes|preset) and ",
        ),
        (("--shape", "2112x7168", "--tokens", "9"), "Error: tokens: expected some of .*, got 9"),
        (("--from-module", "nowhere"), "Error: module: expected .*, got 'nowhere'"),
        (("--preset", "kimi-k2"), "is not one of"),
        (
            ("--preset", "kimi-k3", "--part", "0/3"),
            "'0/3' is no part; write the second of three as",
        ),
        (("--preset", "kimi-k3", "--part", "4/3"), "'4/3' is no part"),
        (("--shape", "96x256", "--part", "1/3"), "--part is of a --preset"),
    ],
)
def test_wrong_options_are_one_clear_line(arguments: tuple[str, ...], text: str) -> None:
    code, output = command(*arguments)
    assert code != 0 and re.search(text, output)
    assert "Traceback" not in output


def test_a_command_that_is_interrupted_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "tune", interrupted)
    code, output = command("--shape", "2112x7168")
    assert code == 130
    assert "What was measured so far is kept; the same command goes on from there." in output
    _, output = command("--shape", "2112x7168", "--export", "h200.json")
    assert "so far is kept and written to h200.json; the same command goes" in output


def test_an_interrupted_command_has_written_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure = tmp_path / "h200.json", tuning.run

    def interrupted(job: tuning.Job, **options: Any) -> Any:
        return measure(job, FakeMeter(interrupt_at=3), **{**options, "progress": False})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(tuning, "run", interrupted)
    arguments = ("--shape", "2112x7168", "--tokens", "1", "--tokens", "8", "--no-residual")
    code, output = command(*arguments, "--export", str(path))
    assert code == 130 and f"and written to {path}" in output
    assert [entry.key for entry in files.read_export(path)[1]] == [row(1)]


def test_a_place_that_takes_no_export_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(*, export: Path, **_: Any) -> Any:
        write_export(export, GEMM, run(FakeMeter(), tokens=[8]).entries)

    monkeypatch.setattr(tuning, "tune", fake)
    code, output = command("--shape", "2112x7168", "--export", str(tmp_path))
    assert code == 2
    assert "Error: Invalid value for '--export'" in output and str(tmp_path) in output


def test_the_command_shows_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "out.json", []

    def fake(*, op: str, shapes: Any, preset: str, tokens: Any, export: Path, **more: Any) -> Any:
        asked.append((op, shapes, preset, tokens, more))
        report = run(FakeMeter(), [SHAPE], tokens)
        write_export(export, GEMM, report.entries)
        return report

    monkeypatch.setattr(tuning, "tune", fake)
    arguments = ("--preset", "kimi-k3-tp8", "--tokens", "1", "--export", str(path))
    code, output = command(*arguments, "--no-residual", "--again")
    assert code == 0 and f"wrote {path}" in output
    ((op, shapes, preset, tokens, options),) = asked
    assert (op, shapes, preset, tokens) == ("low_latency_linear", None, "kimi-k3-tp8", (1,))
    given = {name: value for name, value in options.items() if value is not None}
    assert given == {"residual": False, "again": True, "device": 0}
    assert sum(map(len, exported(path)["problems"].values())) == 2


def test_gpus_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run(FakeMeter(), tokens=[8])
    use_fake_gpu(monkeypatch, H200)
    assert run(FakeMeter(gpu=H200), tokens=[8]).num_measured == 2
    assert len(kept()) == len(kept(H200)) == 2
