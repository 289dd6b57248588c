"""The built wheel: what is inside, what it says about itself, and that it works far from here.

One wheel is built, by way of the source archive, and unpacked by pip outside the checkout. The
programs below then run from an empty folder with that folder first on the path.
"""

from __future__ import annotations

import email
import email.message
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CUDA_SRC = ROOT / "cuda_src"
NEEDED = ("build", "hatchling", "pip")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.xdist_group("packaging"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {', '.join(MISSING)}"),
]


@dataclass(frozen=True)
class Built:
    """The two archives, and the folder into which pip installed the wheel."""

    wheel: Path
    sdist: Path
    site: Path
    empty: Path

    @property
    def files(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    @property
    def metadata(self) -> email.message.Message:
        (name,) = (name for name in self.files if name.endswith(".dist-info/METADATA"))
        with zipfile.ZipFile(self.wheel) as archive:
            return email.message_from_bytes(archive.read(name))

    def run(self, *arguments: str) -> str:
        """Run Python on the installed wheel, away from the checkout, and return what it prints."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("K3CUPY_")}
        environment["PYTHONPATH"] = str(self.site)
        return run([sys.executable, *arguments], cwd=self.empty, env=environment)


def run(command: list[str], **options: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, **options)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    dist, site, empty = folder / "dist", folder / "site", folder / "empty"
    empty.mkdir()
    assert ROOT not in folder.parents
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)])
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--no-index", "--no-deps", "--no-compile", "--target", str(site), str(wheel)])
    return Built(wheel, sdist, site, empty)


def source_files() -> set[str]:
    return {
        path.relative_to(CUDA_SRC).as_posix() for path in CUDA_SRC.rglob("*.cu*") if path.is_file()
    }


def test_wheel_is_pure_python(built: Built) -> None:
    assert built.wheel.name.startswith("k3cupy-")
    assert built.wheel.name.endswith("-py3-none-any.whl")


def test_wheel_holds_every_cuda_source_but_those_of_benchmarks(built: Built) -> None:
    prefix = "k3cupy/cuda_src/"
    inside = {name.removeprefix(prefix) for name in built.files if name.startswith(prefix)}
    of_benchmarks = {name for name in source_files() if name.startswith("bench/")}
    assert "mla_decode.cu" in inside
    assert of_benchmarks
    assert inside == source_files() - of_benchmarks


def test_wheel_holds_every_file_of_the_package(built: Built) -> None:
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "k3cupy").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "k3cupy/py.typed" in package
    assert package <= built.files


def test_wheel_holds_the_demo_with_all_that_it_imports(built: Built) -> None:
    """`k3cupy demo` runs it; here for its help, which imports the modules beside it."""
    pytest.importorskip("torch")
    program = "import sys; from k3cupy.cli import main; sys.argv[1:] = ['demo', '-h']; main()"
    assert "Run one Kimi-K3 MLA decode layer" in built.run("-c", program)


def test_wheel_holds_nothing_else(built: Built) -> None:
    top = {name.split("/")[0] for name in built.files}
    (dist_info,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {"k3cupy", dist_info}
    assert not [name for name in built.files if "__pycache__" in name or "test" in name.lower()]


def test_sdist_holds_sources_and_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"cuda_src/{name}" for name in source_files()} <= inside
    assert {"tests/test_packaging.py", "pyproject.toml", "Makefile", "LICENSE"} <= inside


def test_sdist_holds_what_the_documents_link(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folders = {str(parent) for name in inside for parent in Path(name).parents}
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^)#\s:]+)[)#]", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve().relative_to(ROOT).as_posix()
            assert linked in inside | folders, f"{page.name} links to {target}"


def test_license(built: Built) -> None:
    assert built.metadata["License-Expression"] == "Apache-2.0"
    assert built.metadata.get_all("License-File") == ["LICENSE"]
    (name,) = (name for name in built.files if name.endswith("/licenses/LICENSE"))
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_supported_python_versions(built: Built) -> None:
    assert set(built.metadata["Requires-Python"].split(",")) == {">=3.10", "<3.15"}
    classifiers = built.metadata.get_all("Classifier", [])
    for minor in (10, 11, 12, 13, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers


def test_base_install_is_small(built: Built) -> None:
    base = [line for line in built.metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    names = {line.split(">")[0].strip().lower().replace("_", "-") for line in base}
    assert names == {"numpy", "ml-dtypes", "click", "rich", "platformdirs", "filelock"}


def test_no_lock_follows_a_symbolic_link(built: Built) -> None:
    """As those of older versions do: they empty the file behind a link in the lock's place."""
    bounds = [line for line in built.metadata.get_all("Requires-Dist", []) if "filelock" in line]
    assert bounds == ["filelock>=4"]


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("cu12", {"cupy-cuda12x", "cuda-toolkit[cudart,nvrtc]", "cuda-core[cu12]"}),
        ("cu13", {"cupy-cuda13x", "cuda-toolkit[cudart,nvrtc]", "cuda-core[cu13]"}),
        ("torch", {"torch"}),
        ("bench", {"matplotlib"}),
    ],
)
def test_extras(built: Built, extra: str, packages: set[str]) -> None:
    lines = built.metadata.get_all("Requires-Dist", [])
    marked = [line.partition(";")[0] for line in lines if f"extra == '{extra}'" in line]
    assert {line[: min(map(line.find, filter(line.count, "<=>")))] for line in marked} == packages


def test_every_tool_is_pinned(built: Built) -> None:
    lines = built.metadata.get_all("Requires-Dist", [])
    tools = [line.partition(";")[0] for line in lines if "extra == 'dev'" in line]
    assert tools
    assert [line for line in tools if "==" not in line] == []


def test_import_finds_the_installed_wheel(built: Built) -> None:
    printed = built.run("-c", "import k3cupy; print(k3cupy.__file__); print(k3cupy.__version__)")
    path, version = printed.splitlines()
    assert Path(path).resolve().is_relative_to(built.site.resolve())
    assert version == built.metadata["Version"]


def test_import_is_light_and_leaves_the_driver_alone(built: Built) -> None:
    program = """
        import sys
        at_start = set(sys.modules)
        import k3cupy
        heavy = {"cupy", "cupy_backends", "torch", "jax", "cuda"}
        print([name for name in set(sys.modules) - at_start if name.partition(".")[0] in heavy])
        try:
            mapped = open("/proc/self/maps").read()
        except FileNotFoundError:
            mapped = ""
        print([name for name in ("libcuda.so", "libcudart.so", "libnvrtc.so") if name in mapped])
    """
    assert built.run("-c", textwrap.dedent(program)).splitlines() == ["[]", "[]"]


def test_operation_runs_on_cpu(built: Built) -> None:
    program = """
        import numpy as np
        import k3cupy
        rng = np.random.default_rng(0)
        ql_nope, q_pe, kv_c, k_pe = (
            rng.standard_normal(shape).astype(np.float16)
            for shape in [(2, 3, 512), (2, 3, 64), (2, 512), (2, 64)]
        )
        cache = np.full((2, 4, 576), 7, np.float16)
        slots = np.array([5, -1], np.int64)
        out = k3cupy.fused_mla_decode_q_concat_kv_cache_insert(
            ql_nope, q_pe, kv_c, k_pe, cache, slots
        )
        expected = np.full((2, 4, 576), 7, np.float16)
        expected[1, 1] = np.concatenate([kv_c[0], k_pe[0]])
        np.testing.assert_array_equal(np.asarray(out), np.concatenate([ql_nope, q_pe], -1))
        np.testing.assert_array_equal(cache, expected)
        print("same")
    """
    assert built.run("-c", textwrap.dedent(program)) == "same\n"


def test_show_config_runs(built: Built) -> None:
    printed = built.run("-m", "k3cupy", "show-config")
    assert built.metadata["Version"] in printed


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="cuda.core is not installed here",
)
def test_cuda_sources_compile_where_the_wheel_put_them(built: Built) -> None:
    program = """
        from pathlib import Path
        from cuda.core import Program, ProgramOptions
        from cuda.pathfinder import locate_nvidia_header_directory
        import k3cupy
        sources = Path(k3cupy.__file__).parent / "cuda_src"
        headers = locate_nvidia_header_directory("cudart").abs_path
        name = (
            "k3cupy::mla_decode_epilogue<__nv_bfloat16, false, k3cupy::CacheFormat::kSame, "
            "false, false, true, 3, 96, 1>"
        )
        options = ProgramOptions(
            arch="sm_90", std="c++17", include_path=[str(sources), str(headers)]
        )
        code = (sources / "mla_decode.cu").read_text()
        cubin = Program(code, "c++", options).compile("cubin", name_expressions=[name])
        print(bytes(cubin.code[1:4]).decode())
    """
    assert built.run("-c", textwrap.dedent(program)) == "ELF\n"


def test_the_command_has_a_name_of_its_own(built: Built) -> None:
    (name,) = (name for name in built.files if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(built.wheel) as archive:
        lines = archive.read(name).decode().splitlines()
    assert lines[:2] == ["[console_scripts]", "k3cupy = k3cupy.cli:main"]
    assert built.run(str(built.site / "bin/k3cupy"), "--version").startswith("k3cupy, version ")
