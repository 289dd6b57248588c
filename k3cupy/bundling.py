"""Making bundles: all that a model's calls will need on a kind of GPU, compiled without one."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import k3cupy
from k3cupy import projections
from k3cupy.constants import Q_LORA_RANK, QK_HEAD_DIM
from k3cupy.kernels.fused_a_gemm import K_MULTIPLE
from k3cupy.ops.warmup import EVERY_CACHE, wanted_of
from k3cupy.projections import Projection
from k3cupy.runtime import binaries, bundles, offline, sources, toolchain
from k3cupy.runtime.bundles import Bundle
from k3cupy.runtime.devices import DeviceInfo
from k3cupy.runtime.errors import ToolchainError, reject
from k3cupy.runtime.instances import Instance, threads_of

_FLAGS = (False, True)
_FLOAT32, _FUSED_A, _Q_B = "float32", "qkv_a_proj", "q_b_proj"
"""In a projection's name: its outputs; that engines call the fused-A GEMM for it by name; that it
has the rows of a query head for each head."""

_BY_NAME = range(1, 17)
"""Tokens of such calls. With static weights vLLM's plans have them for other projections too."""


def instances_of(
    model: str,
    tp: int,
    gpu: DeviceInfo,
    *,
    batch_invariant: bool = False,
    kv_inputs_ready: bool = False,
    **fewer: Any,
) -> Iterator[Instance]:
    """Yield every instance that a model's calls get on a GPU, some of them more than once.

    Those are the linear layers at every number of tokens, with weights that are static and not,
    packed and strided x, and a residual where the model has one; the other kernels of an MLA layer
    in each cache format, with RoPE and without. What runs is chosen as in a call on that GPU.

    Args:
        model: one of ``projections.MODELS``.
        tp: degree of tensor parallelism.
        gpu: as ``devices.named`` describes it.
        batch_invariant: also for that mode of linear layers.
        kv_inputs_ready: also for decode calls with that promise.
        **fewer: ``weight_is_static``, ``kv_cache`` or ``rope``, some values alone, as of warm-ups;
            ``ONE_SERVER`` has them.

    Raises:
        ValueError: there is no such model, or nothing is known of it at this degree.
    """
    local = projections.of_degree(model, tp)
    options = {"weight_is_static": _FLAGS, "kv_cache": EVERY_CACHE, "rope": _FLAGS, **fewer}
    statics = options.pop("weight_is_static")
    ready = _FLAGS if kv_inputs_ready else (False,)
    heads = {p.n // QK_HEAD_DIM: None for p in local if p.k == Q_LORA_RANK and _Q_B in p.name}
    wanted = [*_epilogues(ready, statics, list(heads), **options)]
    for invariant in (False, True)[: 1 + batch_invariant]:
        wanted += _products(local, statics, invariant)
    for op, of_op in wanted:
        yield from wanted_of(op, of_op)(gpu)


ONE_SERVER: dict[str, Any] = {"weight_is_static": (True,), "kv_cache": ("fp8",), "rope": (False,)}
"""What one server of a model without RoPE calls, that loads its weights once."""


def _epilogues(
    ready: Sequence[bool],
    statics: Sequence[bool],
    heads: Sequence[int],
    kv_cache: Sequence[str],
    rope: Sequence[bool],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield operations with the options of their warm-ups.

    They come first: they take long to compile, and products long to choose.
    """
    yield "mla_prefill", {"kv_cache": kv_cache, "rope": rope}
    query: dict[str, Any] = {"rope": rope, "weight_is_static": statics, "heads": heads}
    decode: dict[str, Any] = {"rope": rope, "kv_inputs_ready": ready}
    for op, flags in (("mla_decode", decode), *([("mla_query", query)] if heads else ())):
        yield op, {"kv_cache": kv_cache, **flags}
        if "fp8" in kv_cache:
            yield op, {"kv_cache": "fp8", "query_fp8": False, **flags}
    yield "mla_value", {"gate": _FLAGS, "transposed": True, "weight_is_static": statics}


def _products(
    local: Sequence[Projection], statics: Sequence[bool], invariant: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the same for linear layers, and for the fused-A GEMM where it is called by name."""
    linear = {"weight_is_static": statics, "batch_invariant": invariant}
    for which, options in (
        (lambda p: True, {}),
        (lambda p: p.residual, {"residual": True}),
        (lambda p: _FLOAT32 in p.name, {"out_dtype": "float32"}),
    ):
        pairs = dict.fromkeys((p.n, p.k) for p in local if which(p))
        if pairs:
            yield "low_latency_linear", {"shapes": list(pairs), **linear, **options}
    for static in statics:
        by_name = [p for p in local if p.k % K_MULTIPLE == 0 and (static or _FUSED_A in p.name)]
        if by_name:
            modes = {"weight_is_static": static, "batch_invariant": invariant}
            pairs = dict.fromkeys((p.n, p.k) for p in by_name)
            yield "fused_a_gemm", {"shapes": list(pairs), "tokens": _BY_NAME, **modes}


def take_folder(folder: Path, *, for_wheels: bool = False) -> set[Path]:
    """Make a folder where there is none, and return the binaries that are there.

    Args:
        folder: of a bundle.
        for_wheels: it is one of wheels, which may hold anything.

    Raises:
        ValueError: it holds something else than a bundle.
        OSError: it cannot be made or read, or others can write there.
    """
    try:
        toolchain.make_private(folder)
        before = set(folder.glob(f"{binaries.path_in(folder, '*').name}*"))
        others = set(folder.iterdir()) - before
    except OSError as error:
        got = f"{folder}: {error.strerror}"
        reject("out", "a folder that can be made and read", got, error=type(error))
    if for_wheels:
        return set()
    if problem := binaries.problem(folder.stat()):
        expected = "a folder that you alone can write"
        reject("out", expected, f"{folder}, which {problem}", error=PermissionError)
    # Without a manifest they are of a run that was interrupted.
    if others and folder / bundles.MANIFEST not in others:
        reject("out", "an empty folder or a bundle", f"{folder}, which is none")
    return before


def make(
    instances: list[Instance],
    model: str,
    gpu: DeviceInfo,
    folder: Path,
    *,
    max_workers: int | None = None,
    on_done: Callable[[Instance], None] = lambda _: None,
) -> Bundle:
    """Compile instances into a folder, which becomes a bundle; no GPU is needed.

    Args:
        instances: what to compile, each once.
        model: whose they are, in words.
        gpu: what they are for.
        folder: made where it is not there; a bundle that is there is replaced.
        max_workers: compiling threads, by default one per CPU core.
        on_done: called with each instance that is compiled.

    Raises:
        ValueError: the folder holds something else.
        OSError: the folder cannot be written, or others can write there.
        CompileError, ToolchainError: the kernels cannot be compiled here.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    threads = threads_of(max_workers)
    if sources.overridden() is not None:
        raise ToolchainError(
            "K3CUPY_SOURCE_DIR: expected the sources of the package, got an edited copy, whose "
            "binaries no other machine would use. Unset it"
        )
    before = take_folder(folder)
    digests = {source: sources.load(source).digest for source in {i.source for i in instances}}
    names: dict[str, dict[str, str]] = {}

    def compile_one(instance: Instance) -> tuple[Instance, str]:
        arch = instance.arch_on(gpu.arch)
        content = offline.binary_of(instance.source, instance.name_expression, arch)
        key = bundles.key_of(instance, digests[instance.source], gpu.arch)
        return instance, binaries.write(folder, key, content).name

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(compile_one, instance) for instance in instances]
        try:
            for future in as_completed(futures):
                instance, file = future.result()
                names[file] = {
                    "source": instance.source,
                    "name_expression": instance.name_expression,
                    "arch": instance.arch_on(gpu.arch),
                }
                on_done(instance)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    bundle = Bundle(
        folder=folder,
        package=k3cupy.__version__,
        model=model,
        gpu=gpu.name,
        arch=gpu.arch,
        compiler="NVRTC {}.{}".format(*toolchain.nvrtc_version()),
        kernels=digests,
        instances=len(names),
    )
    bundles.write_manifest(bundle, dict(sorted(names.items())))
    for path in before:
        if path.name not in names:
            path.unlink(missing_ok=True)
    return bundle


def make_wheel(
    instances: list[Instance], model: str, gpu: DeviceInfo, folder: Path, **how: Any
) -> Path:
    """Compile instances into a wheel in a folder, and return it; arguments as of ``make``.

    ``pip install`` puts a folder into the namespace package ``k3cupy_bundles``, where it is found.
    """
    name = re.sub(r"[^a-z0-9]+", "_", f"{model} {gpu.name.removeprefix('NVIDIA ')}".lower())
    take_folder(folder, for_wheels=True)
    with TemporaryDirectory() as place:
        bundle = make(instances, model, gpu, Path(place, "bundle"), **how)
        contents = {
            f"{bundles.PACKAGE}/{name}/{path.name}": path.read_bytes()
            for path in sorted(bundle.folder.iterdir())
        }
    return _write_wheel(folder, f"k3cupy_bundle_{name}", str(bundle).partition(": ")[2], contents)


def _write_wheel(folder: Path, name: str, summary: str, contents: dict[str, bytes]) -> Path:
    """Write a wheel of files, in PyPA's format; of equal contents come equal wheels."""
    info = f"{name}-{k3cupy.__version__}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\n"
    metadata += f"Version: {k3cupy.__version__}\nSummary: {summary}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: k3cupy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents = {
        **contents,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    lines = [f"{path},{_record_of(data)},{len(data)}\n" for path, data in contents.items()]
    contents[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    path = folder / f"{name}-{k3cupy.__version__}-py3-none-any.whl"
    partial = path.with_suffix(".tmp")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in contents.items():
                entry = zipfile.ZipInfo(member)  # of 1980, always
                entry.external_attr = 0o644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _record_of(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
