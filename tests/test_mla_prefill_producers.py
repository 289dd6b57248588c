"""The prefill and context epilogues called with the arrays of other libraries, and bare objects."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from array_helpers import cupy_of, jax_of, numpy_of, torch_of, wrapped
from helpers import BF16, E4M3, FP16, OldProducer, Producer, run_child
from mla_helpers import (
    INPUTS,
    INSERTS,
    KINDS,
    OUTPUTS,
    MlaCall,
    as_list,
    as_out,
    make_prefill,
    poisoned_outs,
    refused,
    run_and_check,
)


def base(kind: str, device: str = "cpu", **options: Any) -> MlaCall:
    return make_prefill(
        kind, 9, 3, rope=kind in INSERTS, scale_tensors=True, device=device, **options
    )


def as_torch(call: MlaCall, result: Any) -> Any:
    """Outputs of any CPU framework as tensors."""
    pairs = zip(as_list(result), OUTPUTS[call.kind], strict=True)
    return as_out([torch_of(array, call.output_dtype(name)) for array, name in pairs])


# Objects that have nothing but __dlpack__ and __dlpack_device__


@pytest.mark.parametrize("producer", [Producer, OldProducer])
@pytest.mark.parametrize("kind", KINDS)
def test_bare_dlpack_objects(device: str, producer: type[Producer], kind: str) -> None:
    call = base(kind, device)
    before = call.snapshot()
    outs = [box.tensor for box in poisoned_outs(call)]
    given = [producer(out) for out in outs]
    result = call.run(**wrapped(call, producer), out=as_out(given))
    assert all(a is b for a, b in zip(as_list(result), given, strict=True))
    call.check(before, as_out(outs))


@pytest.mark.parametrize("kind", KINDS)
def test_one_bare_object_among_tensors(device: str, kind: str) -> None:
    for name, value in base(kind, device).args.items():
        if isinstance(value, torch.Tensor):
            call = base(kind, device)
            before = call.snapshot()
            outs = as_out([box.tensor for box in poisoned_outs(call)])
            call.check(before, call.run(**wrapped(call, Producer, name), out=outs))


def test_bare_objects_of_slices_with_an_offset(device: str) -> None:
    """The address is data + byte_offset, whichever of the two a producer moves."""
    call = make_prefill("concat_fp8", 9, 3, device=device)
    wide = torch.zeros(9, 2112, dtype=BF16, device=device)
    wide[:, 2048:] = call.args["k_pe"]
    both = torch.zeros(9, 3, 256, dtype=BF16, device=device)
    both[..., :128], both[..., 128:] = call.args["k_nope"], call.args["v"]
    call = call.given(k_pe=wide[:, 2048:], k_nope=both[..., :128], v=both[..., 128:])
    outs = [box.tensor for box in poisoned_outs(call)]
    call.run(**wrapped(call, Producer), out=tuple(map(Producer, outs)))
    call.check_outputs(tuple(outs))


@pytest.mark.parametrize("kind", KINDS)
def test_bare_objects_of_empty_tensors(device: str, kind: str) -> None:
    """No tokens: the addresses are null, and the strides may be anything."""
    call = make_prefill(kind, 0, 3, device=device)
    empty = {
        name: torch.empty(value.shape, dtype=value.dtype, device=device)
        for name, value in call.args.items()
        if name in INPUTS[kind]
    }
    empty["k_nope"] = empty["k_nope"].as_strided((0, 3, 128), (5, 6, 1))
    call = call.given(**empty)
    before = call.snapshot()
    outs = [torch.empty(call.output_shape(n), dtype=call.output_dtype(n), device=device)
            for n in OUTPUTS[kind]]  # fmt: skip
    call.run(**wrapped(call, Producer), out=as_out([*map(Producer, outs)]))
    call.check(before, as_out(outs))


class CopyingProducer(Producer):
    """A producer that makes the memory at the export; the capsule alone keeps it alive."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.clone().__dlpack__(**kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_capsule_is_kept_for_as_long_as_its_memory_is_used(kind: str) -> None:
    call = base(kind)
    before = call.snapshot()
    names = [name for name in call.args if name not in call.boxes]
    outs = as_out([box.tensor for box in poisoned_outs(call)])
    call.check(before, call.run(**wrapped(call, CopyingProducer, *names), out=outs))


class Memory(np.ndarray[Any, Any]):
    """An array that can be referred to weakly and hashed by identity."""

    __hash__ = object.__hash__


def test_a_kept_plan_keeps_no_memory_alive() -> None:
    call = make_prefill("concat", 11, 3)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Watched(Producer):
        """Exports copies, each in memory that NumPy owns and this test watches."""

        def __dlpack__(self, **kwargs: Any) -> Any:
            array = self._tensor.view(torch.int16).numpy().copy().view(Memory)
            alive.add(array)
            return torch.from_numpy(array).view(BF16).__dlpack__(**kwargs)

    call.run(**wrapped(call, Watched, "k_pe"))
    gc.collect()
    assert len(alive) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_tensor_is_named(kind: str) -> None:
    call = base(kind)
    for name in call.args:
        for junk in (object(), [1, 2, 3], "text"):
            refused(call, name, type(junk).__name__, **{name: junk})


# NumPy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_case16_numpy_arrays(kind: str, dtype: torch.dtype) -> None:
    call = base(kind, dtype=dtype)
    before = call.snapshot()
    result = call.run(**wrapped(call, numpy_of))
    for array in as_list(result):
        assert isinstance(array, np.ndarray)
    call.check(before, as_torch(call, result))


def test_case16_k_pe_of_e4m3_from_numpy() -> None:
    for form in (E4M3, torch.uint8):
        call = make_prefill("concat_fp8", 9, 3, k_pe=form)
        call.check({}, as_torch(call, call.run(**wrapped(call, numpy_of))))


def test_case16_other_eight_bit_types_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    call = make_prefill("concat_fp8", 9, 3, k_pe=torch.uint8)
    codes = call.args["k_pe"].numpy()
    for name in ("float8_e5m2", "float8_e4m3fnuz", "float8_e4m3", "float8_e4m3b11fnuz"):
        refused(call, "k_pe", name, k_pe=codes.view(getattr(ml_dtypes, name)))
    refused(call, "k_pe", "int8", k_pe=codes.view(np.int8))


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_outs_are_returned(kind: str) -> None:
    call = base(kind)
    before = call.snapshot()
    outs = [box.tensor for box in poisoned_outs(call)]
    arrays = [numpy_of(out) for out in outs]
    result = call.run(**wrapped(call, numpy_of), out=as_out(arrays))
    assert all(a is b for a, b in zip(as_list(result), arrays, strict=True))
    call.check(before, as_out(outs))


def test_numpy_and_torch_mixed() -> None:
    for kind in INSERTS:
        call = base(kind)
        before = call.snapshot()
        result = call.run(**wrapped(call, numpy_of, "kv_cache", "slot_mapping", "k_pe"))
        call.check(before, result)


@pytest.mark.parametrize("kind", KINDS)
def test_read_only_arrays(kind: str) -> None:
    """Fine as inputs, refused where something is written: the cache, outputs, a turned q."""
    call = base(kind, dtype=FP16)
    written = {"kv_cache", "q"} if kind in ("insert", "ds_mla") else {"kv_cache"}
    for name, value in call.args.items():
        if not isinstance(value, torch.Tensor):
            continue
        arguments = wrapped(call, numpy_of)
        arguments[name].flags.writeable = False
        if name in written:
            refused(call, name, "read-only", **arguments)
            if value.dtype != E4M3:
                refused(call, name, "read-only", **{**arguments, name: Producer(arguments[name])})
        else:
            before = call.snapshot()
            call.check(before, as_torch(call, call.run(**arguments)))
    for i in range(len(OUTPUTS[kind])):
        outs = [numpy_of(box.tensor) for box in poisoned_outs(call)]
        outs[i].flags.writeable = False
        refused(call, r"out(\[\d\])?", "read-only", out=as_out(outs))


def test_a_read_only_query_without_positions_is_fine() -> None:
    call = make_prefill("insert", 9, 3, dtype=FP16)
    arguments = wrapped(call, numpy_of)
    arguments["q"].flags.writeable = False
    before = call.snapshot()
    call.check(before, as_torch(call, call.run(**arguments)))


@pytest.mark.parametrize("kind", KINDS)
def test_case26_negative_strides_of_numpy_are_refused(kind: str) -> None:
    call = base(kind, dtype=FP16)
    for name, value in call.args.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            arguments = wrapped(call, numpy_of)
            arguments[name] = arguments[name][::-1]
            refused(call, name, "negative|-[0-9]", **arguments)


def test_numpy_byte_order_is_not_guessed() -> None:
    call = base("insert", dtype=FP16)
    arguments = wrapped(call, numpy_of)
    for name, swapped in (("k_nope", ">f2"), ("slot_mapping", ">i8"), ("cos_sin_cache", ">f4")):
        wrong = {**arguments, name: arguments[name].astype(swapped)}
        refused(call, name, ">|byte order|big", **wrong)


def test_numpy_arrays_off_their_element_size_are_refused() -> None:
    """An odd address and a row stride of odd bytes: NumPy allows both, no kernel can."""
    call = make_prefill("insert", 5, 2, dtype=FP16, rope=True)
    for name in ("q", "k_nope", "k_pe", "kv_c_normed", "kv_cache"):
        arguments = wrapped(call, numpy_of)
        shape, size = arguments[name].shape, 2 * arguments[name].size
        memory = np.zeros(2 * size + 8192, np.uint8)
        arguments[name] = memory[1 : 1 + size].view(np.float16).reshape(shape)
        refused(call, name, "address|align", **arguments)
        width = 2 * shape[-1] + 1
        strides = (width,) if len(shape) == 2 else (shape[1] * width, width)
        arguments[name] = np.ndarray(shape, np.float16, memory, strides=(*strides, 2))
        refused(call, name, "stride", **arguments)


# JAX


@pytest.mark.parametrize("kind", KINDS)
def test_jax_inputs(kind: str) -> None:
    """All but what is written; its integers are 32 bits wide."""
    pytest.importorskip("jax")
    call = base(kind, slot_dtype=torch.int32)
    if "positions" in call.args:
        call.args["positions"] = call.args["positions"].to(torch.int32)
    names = [n for n in call.args if n != "kv_cache" and (n != "q" or kind == "fp8")]
    before = call.snapshot()
    arguments = wrapped(call, jax_of, *names)
    call.check(before, as_torch(call, call.run(**arguments)))
    before = call.snapshot()
    outs = as_out([box.tensor for box in poisoned_outs(call)])
    call.check(before, call.run(**arguments, out=outs))


def _jax_on_the_gpu() -> None:
    """Run in a process of its own: JAX takes most of a GPU's memory unless told otherwise."""
    import jax

    for kind in ("concat", "concat_fp8"):
        call = make_prefill(kind, 9, 3, device="cuda")
        arguments = {name: jax.dlpack.from_dlpack(t) + 0 for name, t in call.args.items()}
        result = call.run(**arguments)
        found = []
        for name, array in zip(
            OUTPUTS[kind], result if kind != "concat" else [result], strict=True
        ):
            assert isinstance(array, jax.Array), type(array)
            found.append(torch_of(np.asarray(array), call.output_dtype(name)).to("cuda"))
            print(array.device.platform)
        call.check_outputs(as_out(found))


@pytest.mark.gpu
def test_jax_inputs_on_the_gpu() -> None:
    pytest.importorskip("jax")
    # JAX makes the last of several GPUs current, from where PyTorch exports nothing of the first.
    told = run_child(
        _jax_on_the_gpu,
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "0"},
    )
    assert told.split() == ["gpu"] * 3


def test_case27_jax_outputs_are_refused() -> None:
    pytest.importorskip("jax")
    call = make_prefill("insert", 5, 2, dtype=FP16, rope=True)
    for name in ("kv_cache", "q"):
        array = jax_of(call.args[name])
        saved = np.array(array)
        refused(call, name, "(?i)read-only|immutable|jax", **{name: array})
        assert np.array_equal(np.asarray(array), saved, equal_nan=True)
    out = jax_of(poisoned_outs(call)[0].tensor)
    refused(call, "out", "(?i)read-only|immutable|jax", out=out)


# CuPy


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_case16_cupy_arrays(kind: str, dtype: torch.dtype) -> None:
    """CuPy has no float8 and gets the codes as bytes."""
    cupy = pytest.importorskip("cupy")
    call = base(kind, "cuda", dtype=dtype)
    before = call.snapshot()
    torch.cuda.synchronize()
    result = call.run(**wrapped(call, cupy_of))
    cupy.cuda.get_current_stream().synchronize()
    found = []
    for name, array in zip(OUTPUTS[kind], as_list(result), strict=True):
        assert isinstance(array, cupy.ndarray)
        bits = array.view({1: cupy.uint8, 2: cupy.int16}[array.dtype.itemsize])
        found.append(torch.from_dlpack(bits).view(call.output_dtype(name)))
    call.check(before, as_out(found))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_case26_negative_strides_of_cupy_are_refused(kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    call = base(kind, "cuda", dtype=FP16)
    for name in INPUTS[kind]:
        for axis in (0, -1):
            arguments = wrapped(call, cupy_of)
            arguments[name] = cupy.flip(arguments[name], axis)
            refused(call, name, "negative|-[0-9]", **arguments)


def test_torch_subclasses_and_parameters() -> None:
    """An nn.Parameter that asks for no gradient is a tensor like any other."""
    call = make_prefill("concat", 5, 2)
    frozen = torch.nn.Parameter(call.args["k_nope"].clone(), requires_grad=False)
    run_and_check(call.given(k_nope=frozen))
    oracle.assert_same_bits(oracle.bits(frozen), oracle.bits(call.args["k_nope"]), "k_nope")
