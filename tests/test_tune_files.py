"""What the tuner keeps: the user cache, interruptions, several at once, shared files, commands."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gemm_table_helpers import in_processes
from helpers import refused, run_child
from k3cupy.dispatch import tune as tuning
from k3cupy.ops.gemm_entry import GemmEntry
from tune_helpers import GPU, H200, FakeMeter, run, use_fake_gpu

from k3cupy.cli import main
from k3cupy.ops import gemm_cache, gemm_tables
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.tuning import files
from k3cupy.tuning.candidates import Candidate, Target
from k3cupy.tuning.report import Watch

SHAPE, SMALL = (2112, 7168), (96, 256)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("K3CUPY_CACHE_DIR", str(tmp_path / "cache"))
    use_fake_gpu(monkeypatch)
    yield
    gemm_tables.reload()


def kept(gpu: DeviceInfo = GPU) -> dict[tuple[int, int, int, bool], GemmEntry]:
    """The user cache as it is on the disk."""
    return {e.key: e for e in gemm_cache.read(gemm_cache.path_of(gpu), gpu.name)}


# Going on after an interruption


def test_a_second_run_measures_nothing_and_says_the_same() -> None:
    first = run(FakeMeter(), tokens=[1, 8])
    meter = FakeMeter()
    second = run(meter, tokens=[1, 8])
    assert meter.timed == meter.compiled == []
    assert [e.chosen for e in second.entries] == [e.chosen for e in first.entries]
    assert second.num_measured == 0
    assert "0 products measured now, 4 before with the same kernels" in str(second)


def test_again_measures_anew() -> None:
    run(FakeMeter(), tokens=[1, 8])
    meter = FakeMeter(us=lambda t, c, effort: 5.0 if c.config else 6.0)
    report = run(meter, tokens=[8], again=True)
    assert report.num_measured == 2
    assert {e.linear_us for e in report.entries} == {6.0}
    assert kept()[(*SHAPE, 1, False)].linear_us == 20.0, "not asked for, not touched"


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
    add, calls = gemm_cache.add, []

    def interrupted(entries: Any, device: DeviceInfo) -> Path | None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return add(entries, device)

    monkeypatch.setattr(gemm_cache, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(FakeMeter(), tokens=[1, 8, 16])
    assert set(kept()) == {(*SHAPE, 1, False), (*SHAPE, 8, False)}


def test_what_is_known_narrows_what_is_measured_later() -> None:
    run(FakeMeter(), tokens=[16], residual=False)
    meter = FakeMeter()
    run(meter, tokens=[12], residual=False)
    assert len(meter.checked) == 4


def test_older_kernels_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    run(FakeMeter(), tokens=[8], residual=False)
    monkeypatch.setattr(gemm_cache, "sources_digest", lambda: "another")
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
    (path,) = tmp_path.glob("shared/*/*.json")
    found = gemm_cache.read(path, GPU.name)
    assert len(found) == 8 * 4 + 4


# Files to share


def exported(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A file with four measurements; the cache is empty again."""
    path = tmp_path / "folder" / "export.json"
    files.write_export(path, run(FakeMeter(), tokens=[1, 8]).entries, GPU, commit="0123")
    gemm_cache.path_of(GPU).unlink()
    gemm_tables.reload()
    return path


def test_an_export_is_a_table_with_what_it_was_measured_on(export: Path) -> None:
    document = exported(export)
    entries = document.pop("entries")
    assert document["gpu"] == GPU.name and document["arch"] == "sm_90"
    assert document["measured_by_us"] is True and document["schema"] == 1
    assert document["sources"] == gemm_cache.sources_digest()
    assert (document["commit"], document["num_sms"]) == ("0123", 100)
    assert document["packages"]["numpy"] and document["date"]
    assert {tuple(row) for row in entries} == {
        ("n", "k", "tokens", "residual", "linear_us", "us", "chosen")
    }


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


def not_measured(document: dict[str, Any]) -> None:
    document["measured_by_us"] = False


def of_a_later_schema(document: dict[str, Any]) -> None:
    document["schema"] = 2


def without_facts(document: dict[str, Any]) -> None:
    del document["sources"]


def with_a_slower_choice(document: dict[str, Any]) -> None:
    row = document["entries"][0]
    slowest = max(row["us"]["fused_a"], key=row["us"]["fused_a"].get)
    row["chosen"] = {"backend": "fused_a", "config": slowest}


def with_an_impossible_config(document: dict[str, Any]) -> None:
    document["entries"][0]["us"]["fused_a"]["8/16/512/1/1/8/1/1/4"] = 9.0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (of_another_gpu, "^those of NVIDIA B200 in"),
        (of_other_kernels, "^those of"),
        (not_measured, "figures that nobody measured"),
        (of_a_later_schema, "schema 2 instead of 1"),
        (without_facts, "KeyError: 'sources'"),
        (with_a_slower_choice, "is not the fastest of what was measured"),
        (with_an_impossible_config, "cannot run the configuration '8/16/512/1/1/8/1/1/4'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_whole(
    export: Path, spoil: Callable[[dict[str, Any]], None], text: str
) -> None:
    document = exported(export)
    spoil(document)
    export.write_text(json.dumps(document))
    found = refused({"path": export, "device": GPU}, "import", text, operation=files.import_file)
    assert str(export) in found
    assert kept() == {}


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null", b'{"schema": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    arguments = {"path": path, "device": GPU}
    refused(arguments, "import", rf"^{path}, which is not one", operation=files.import_file)


# What is shown


def test_a_line_a_shape_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    job = tuning.prepare([SHAPE, SMALL], [1, 8], device=0)

    def why_wrong(target: Target, candidate: Candidate) -> str | None:
        is_it = target == Target(*SMALL, 8) and candidate.backend == "skinny"
        return "not finite" if is_it else None

    tuning.run(job, FakeMeter(why_wrong=why_wrong))
    lines = capsys.readouterr().err.splitlines()
    shown = [line for line in lines if not line.startswith("refused")]
    assert [line.split(":")[0] for line in shown] == [
        "2112x7168",
        "96x256",
        "2112x7168 + residual",
        "96x256 + residual",
    ]
    assert all(": 2 measured, 1." in line for line in shown)
    assert lines[1].startswith("refused, not recorded: 96x256, M = 8, skinny 8/")


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    targets = tuning.prepare([SHAPE], [8], device=0).todo
    with Watch(targets) as watch:
        assert watch._bar is not None
    assert "measuring" in capsys.readouterr().err


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
    assert lines[0] == "Test GPU: 3 products to measure, 1 are known"
    assert lines[1].startswith("  2112x7168: M = 12; ") and lines[1].endswith(" candidates")
    assert lines[2] == "  2112x7168 + residual: M = 8, 12; the best of these"
    assert len(lines) == 3


def test_import_from_the_command_line(export: Path) -> None:
    code, output = command("--import", str(export))
    assert (code, output) == (0, "4 measurements of Test GPU were added\n")
    assert len(kept()) == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "name the weights by one of --preset, --shape and --from-module"),
        (("--shape", "2112x7168", "--preset", "kimi-k3"), "name the weights by one of"),
        (("--shape", "2112x7168", "--tokens", "9"), "Error: tokens: expected some of .*, got 9"),
        (("--from-module", "nowhere"), "Error: module: expected .*, got 'nowhere'"),
        (("--preset", "kimi-k2"), "is not one of"),
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


def test_the_command_shows_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "out.json", []

    def fake(shapes: Any, *, export: Path, **options: Any) -> Any:
        asked.append((shapes, options))
        report = run(FakeMeter(), shapes, options["tokens"])
        files.write_export(export, report.entries, GPU)
        return report

    monkeypatch.setattr(tuning, "tune", fake)
    arguments = ("--preset", "kimi-k3-tp8", "--tokens", "1", "--export", str(path))
    code, output = command(*arguments, "--no-residual", "--again")
    assert code == 0 and f"wrote {path}" in output
    ((shapes, options),) = asked
    assert len(shapes) == 13
    assert options == {"tokens": (1,), "residual": False, "again": True, "device": 0}
    assert len(exported(path)["entries"]) == 26


def test_gpus_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run(FakeMeter(), tokens=[8])
    use_fake_gpu(monkeypatch, H200)
    assert run(FakeMeter(device=H200), tokens=[8]).num_measured == 2
    assert len(kept()) == len(kept(H200)) == 2
