"""The MLA decode epilogue called with the arrays of other libraries, and bare DLPack objects."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from array_helpers import cupy_of, jax_of, numpy_of, torch_of, wrapped
from helpers import (
    BF16,
    CACHE_KINDS,
    E4M3,
    FP16,
    OldProducer,
    Producer,
    make_call,
    poisoned_out,
    refused,
    run_and_check,
    run_child,
)

TENSORS = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "kv_cache", "slot_mapping")
OPTIONAL = ("q_scale_inv", "cache_scale_inv", "positions", "cos_sin_cache", "out")


# Objects that have nothing but __dlpack__ and __dlpack_device__


@pytest.mark.parametrize("producer", [Producer, OldProducer])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_bare_dlpack_objects(device: str, producer: type[Producer], kind: str) -> None:
    call = make_call(
        9, 3, cache=kind, q_fp8=kind == "fp8", rope=True, scale_tensors=True, device=device
    )
    before, out = call.cache.snapshot(), poisoned_out(call)
    given = producer(out.tensor)
    assert call.run(**wrapped(call, producer), out=given) is given
    call.check(before, out.tensor)


@pytest.mark.parametrize("name", [*TENSORS, "positions", "cos_sin_cache"])
def test_one_bare_object_among_tensors(device: str, name: str) -> None:
    call = make_call(9, 3, rope=True, device=device)
    before = call.cache.snapshot()
    mqa_q = call.run(**wrapped(call, Producer, name), out=poisoned_out(call).tensor)
    call.check(before, mqa_q)


def test_bare_objects_of_slices_with_an_offset(device: str) -> None:
    """The address is data + byte_offset, whichever of the two a producer moves."""
    call = make_call(9, 3, device=device)
    wide = torch.zeros(9, 2112, dtype=BF16, device=device)
    wide[:, 1000:1512], wide[:, 2048:] = call.kv_c_normed, call.k_pe
    slots = torch.cat((torch.tensor([3, 3], device=device), call.slot_mapping))
    call = call.with_tensors(
        kv_c_normed=wide[:, 1000:1512], k_pe=wide[:, 2048:], slot_mapping=slots[2:]
    )
    before, out = call.cache.snapshot(), poisoned_out(call)
    call.run(**wrapped(call, Producer), out=Producer(out.tensor))
    call.check(before, out.tensor)


def test_bare_objects_of_empty_tensors(device: str) -> None:
    """No tokens: the addresses are null, and the strides may be anything."""
    call = make_call(0, 3, rope=True, device=device)
    call = call.with_tensors(
        ql_nope=torch.empty(0, 3, 512, dtype=BF16, device=device),
        q_pe=torch.empty(0, 3, 64, dtype=BF16, device=device).as_strided((0, 3, 64), (5, 6, 1)),
        kv_c_normed=torch.empty(0, 512, dtype=BF16, device=device),
        k_pe=torch.empty(0, 1, 64, dtype=BF16, device=device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
    )
    before = call.cache.snapshot()
    out = torch.empty(0, 3, 576, dtype=BF16, device=device)
    call.run(**wrapped(call, Producer), out=Producer(out))
    call.check_cache(before)


class CopyingProducer(Producer):
    """A producer that makes the memory at the export; the capsule alone keeps it alive."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.clone().__dlpack__(**kwargs)


def test_the_capsule_is_kept_for_as_long_as_its_memory_is_used() -> None:
    call = make_call(64, 3, rope=True)
    before, out = call.cache.snapshot(), poisoned_out(call)
    names = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping", "cos_sin_cache")
    call.run(**wrapped(call, CopyingProducer, *names), out=out.tensor)
    call.check(before, out.tensor)


def test_a_kept_plan_keeps_no_memory_alive() -> None:
    call = make_call(11, 3, rope=True)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Watched(Producer):
        """Exports copies, each in memory that NumPy owns and this test watches."""

        def __dlpack__(self, **kwargs: Any) -> Any:
            array = self._tensor.view(torch.int16).numpy().copy().view(Memory)
            alive.add(array)
            return torch.from_numpy(array).view(BF16).__dlpack__(**kwargs)

    call.run(**wrapped(call, Watched, "ql_nope", "kv_c_normed"))
    gc.collect()
    assert len(alive) == 0


class Memory(np.ndarray[Any, Any]):
    """An array that can be referred to weakly and hashed by identity."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("name", [*TENSORS, *OPTIONAL])
def test_what_is_no_tensor_is_named(name: str) -> None:
    call = make_call(4, 2, q_fp8=True, cache="fp8", rope=True)
    for junk in (object(), [1, 2, 3], "text"):
        refused({**call.arguments(), name: junk}, name, type(junk).__name__, box=call.cache)


# NumPy


@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_case16_numpy_arrays(kind: str, dtype: torch.dtype) -> None:
    call = make_call(
        9, 3, dtype=dtype, cache=kind, q_fp8=kind == "fp8", rope=True, scale_tensors=True
    )
    before = call.cache.snapshot()
    mqa_q = call.run(**wrapped(call, numpy_of))
    assert isinstance(mqa_q, np.ndarray)
    call.check(before, torch_of(mqa_q, E4M3 if kind == "fp8" else dtype))


def test_numpy_out_is_returned() -> None:
    call = make_call(9, 3, q_fp8=True)
    before, out = call.cache.snapshot(), poisoned_out(call)
    array = numpy_of(out.tensor)
    assert call.run(**wrapped(call, numpy_of), out=array) is array
    call.check(before, out.tensor)


def test_numpy_and_torch_mixed() -> None:
    call = make_call(9, 3, rope=True)
    before = call.cache.snapshot()
    mqa_q = call.run(**wrapped(call, numpy_of, "kv_cache", "slot_mapping", "positions"))
    assert isinstance(mqa_q, torch.Tensor)
    call.check(before, mqa_q)


@pytest.mark.parametrize("name", ["ql_nope", "kv_c_normed", "slot_mapping", "cos_sin_cache"])
def test_read_only_inputs_are_fine(name: str) -> None:
    call = make_call(5, 2, dtype=FP16, rope=True)
    before = call.cache.snapshot()
    arguments = wrapped(call, numpy_of)
    arguments[name].flags.writeable = False
    call.check(before, torch_of(call.run(**arguments), FP16))


@pytest.mark.parametrize("name", ["kv_cache", "out"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_read_only_outputs_are_refused(name: str, dtype: torch.dtype) -> None:
    call = make_call(5, 2, dtype=dtype)
    out = poisoned_out(call)
    arguments = {**wrapped(call, numpy_of), "out": numpy_of(out.tensor)}
    arguments[name].flags.writeable = False
    before = out.snapshot()
    refused(arguments, name, "read-only", box=call.cache)
    if dtype == FP16:
        bare = {**arguments, name: Producer(arguments[name])}
        refused(bare, name, "read-only", box=call.cache)
    oracle.assert_same_bits(out.snapshot(), before, "out after a refused call")


@pytest.mark.parametrize("name", TENSORS)
def test_case26_negative_strides_of_numpy_are_refused(name: str) -> None:
    call = make_call(5, 2, dtype=FP16)
    arguments = wrapped(call, numpy_of)
    arguments[name] = arguments[name][::-1]
    refused(arguments, name, "negative|-[0-9]", box=call.cache)


def test_case16_numpy_e5m2_and_fnuz_caches_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    call = make_call(5, 2, cache="fp8")
    codes = call.cache.tensor.view(torch.uint8).numpy()
    for name in ("float8_e5m2", "float8_e4m3fnuz", "float8_e4m3", "float8_e4m3b11fnuz"):
        arguments = {**call.arguments(), "kv_cache": codes.view(getattr(ml_dtypes, name))}
        refused(arguments, "kv_cache", name, box=call.cache)


def test_numpy_byte_order_is_not_guessed() -> None:
    call = make_call(5, 2, dtype=FP16)
    arguments = wrapped(call, numpy_of)
    for name, swapped in (("kv_c_normed", ">f2"), ("slot_mapping", ">i8")):
        wrong = {**arguments, name: arguments[name].astype(swapped)}
        refused(wrong, name, ">|byte order|big", box=call.cache)


@pytest.mark.parametrize("name", ["kv_c_normed", "kv_cache"])
def test_numpy_arrays_off_their_element_size_are_refused(name: str) -> None:
    """An odd address and a row stride of odd bytes: NumPy allows both, no kernel can."""
    call = make_call(5, 2, dtype=FP16)
    arguments = wrapped(call, numpy_of)
    shape = arguments[name].shape
    memory = np.zeros(2 * arguments[name].size + 4096, np.uint8)
    size = 2 * arguments[name].size
    arguments[name] = memory[1 : 1 + size].view(np.float16).reshape(shape)
    refused(arguments, name, "address|align", box=call.cache)
    width = 2 * shape[-1] + 1
    strides = (width,) if len(shape) == 2 else (shape[1] * width, width)
    arguments[name] = np.ndarray(shape, np.float16, memory, strides=(*strides, 2))
    refused(arguments, name, "stride", box=call.cache)


@pytest.mark.parametrize("scale", [np.float32(0.3), np.float64(0.3), 2, np.array([0.3], "f4")])
def test_scales_as_other_numbers(scale: Any) -> None:
    """Python ints, NumPy numbers and NumPy arrays of one element are scales too."""
    call = make_call(5, 2, q_fp8=True, cache="fp8")
    value = torch.tensor(scale if isinstance(scale, np.ndarray) else [float(scale)])
    before = call.cache.snapshot()
    mqa_q = call.run(q_scale_inv=scale, cache_scale_inv=scale)
    call.options.update(q_scale_inv=value.float(), cache_scale_inv=value.float())
    call.check(before, mqa_q)


# JAX


@pytest.mark.parametrize("q_fp8", [False, True], ids=["q16", "q8"])
def test_jax_inputs(q_fp8: bool) -> None:
    pytest.importorskip("jax")
    call = make_call(9, 3, q_fp8=q_fp8, rope=True, slot_dtype=torch.int32)
    call.options["positions"] = call.options["positions"].to(torch.int32)
    names = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping", "positions", "cos_sin_cache")
    before = call.cache.snapshot()
    arguments = wrapped(call, jax_of, *names)
    mqa_q = call.run(**arguments)
    call.check(before, torch_of(mqa_q, E4M3 if q_fp8 else BF16))
    before = call.cache.snapshot()
    out = poisoned_out(call)
    call.run(**arguments, out=out.tensor)
    call.check(before, out.tensor)


def _jax_on_the_gpu() -> None:
    """Run in a process of its own: JAX takes most of a GPU's memory unless told otherwise."""
    import jax

    for q_fp8 in (False, True):
        call = make_call(9, 3, q_fp8=q_fp8, rope=True, device="cuda")
        names = ("ql_nope", "q_pe", "kv_c_normed", "k_pe", "slot_mapping", "cos_sin_cache")
        before = call.cache.snapshot()
        arguments = {
            # JAX imports what PyTorch shares; without 64-bit mode its integers are 32 bits wide.
            name: jax.dlpack.from_dlpack(value.int() if name == "slot_mapping" else value)
            for name, value in call.arguments().items()
            if name in names
        }
        arguments = {name: array + 0 for name, array in arguments.items()}
        mqa_q = call.run(**arguments)
        assert isinstance(mqa_q, jax.Array), type(mqa_q)
        assert mqa_q.dtype == (jax.numpy.float8_e4m3fn if q_fp8 else jax.numpy.bfloat16)
        torch.cuda.synchronize()
        found = torch_of(np.asarray(mqa_q), E4M3 if q_fp8 else BF16)
        call.check(before, found.to("cuda"))
        print(mqa_q.device.platform)


@pytest.mark.gpu
def test_jax_inputs_on_the_gpu() -> None:
    pytest.importorskip("jax")
    # JAX makes the last of several GPUs current, from where PyTorch exports nothing of the first.
    told = run_child(
        _jax_on_the_gpu,
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "0"},
    )
    assert told.split() == ["gpu", "gpu"]


@pytest.mark.parametrize("name", ["kv_cache", "out"])
def test_case27_jax_outputs_are_refused(name: str) -> None:
    pytest.importorskip("jax")
    call = make_call(5, 2, dtype=FP16)
    array = jax_of(call.cache.tensor if name == "kv_cache" else poisoned_out(call).tensor)
    saved = np.array(array)
    text = refused({**call.arguments(), name: array}, name, "(?i)read-only|immutable|jax")
    assert (
        "cannot be written" in text
        or "writable" in text
        or "writeable" in text
        or "immutable" in text
    )
    assert np.array_equal(np.asarray(array), saved, equal_nan=True)


# CuPy


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHE_KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_case16_cupy_arrays(kind: str, dtype: torch.dtype) -> None:
    cupy = pytest.importorskip("cupy")
    call = make_call(9, 3, dtype=dtype, cache=kind, rope=True, scale_tensors=True, device="cuda")
    before = call.cache.snapshot()
    torch.cuda.synchronize()
    mqa_q = call.run(**wrapped(call, cupy_of))
    assert isinstance(mqa_q, cupy.ndarray)
    cupy.cuda.get_current_stream().synchronize()
    integers = torch.from_dlpack(mqa_q.view(cupy.int16))
    call.check(before, integers.view(dtype))


@pytest.mark.gpu
def test_cupy_out_as_bytes() -> None:
    cupy = pytest.importorskip("cupy")
    call = make_call(9, 3, q_fp8=True, device="cuda")
    before, out = call.cache.snapshot(), poisoned_out(call)
    array = cupy_of(out.tensor)
    torch.cuda.synchronize()
    assert call.run(**wrapped(call, cupy_of), out=array) is array
    cupy.cuda.get_current_stream().synchronize()
    call.check(before, out.tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ql_nope", "kv_c_normed", "slot_mapping"])
def test_case26_negative_strides_of_cupy_are_refused(name: str) -> None:
    cupy = pytest.importorskip("cupy")
    call = make_call(5, 2, dtype=FP16, device="cuda")
    arguments = wrapped(call, cupy_of)
    arguments[name] = cupy.flip(arguments[name], 0)
    refused(arguments, name, "negative|-[0-9]", box=call.cache)
    if name != "slot_mapping":
        arguments[name] = cupy.flip(arguments[name], -1)
        refused(arguments, name, "negative|-[0-9]", box=call.cache)


def test_torch_subclasses_and_parameters() -> None:
    """An nn.Parameter that asks for no gradient is a tensor like any other."""
    call = make_call(5, 2)
    frozen = torch.nn.Parameter(call.kv_c_normed.clone(), requires_grad=False)
    run_and_check(call.with_tensors(kv_c_normed=frozen))
