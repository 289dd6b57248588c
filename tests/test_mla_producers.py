"""The MLA epilogues called with the arrays of other libraries, and bare DLPack objects."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from array_helpers import (
    as_torch,
    check_numpy_arrays,
    check_one_bare_object,
    check_outs_are_returned,
    cupy_of,
    jax_of,
    numpy_of,
    torch_of,
    wrapped,
)
from helpers import BF16, E4M3, FP16, OldProducer, Producer, exactly, run_child
from mla_helpers import (
    FORMS,
    Form,
    MlaCall,
    as_list,
    as_out,
    each_form,
    each_form_with_a_cache,
    poisoned_outs,
    refused,
    run_and_check,
)

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
READ_ONLY = exactly("a read-only tensor")
IMMUTABLE = exactly("an immutable JAX array")


def base(form: Form, device: str = "cpu", **options: Any) -> MlaCall:
    return form.make(9, 3, rope=True, scale_tensors=True, device=device, **options)


# Objects that have nothing but __dlpack__ and __dlpack_device__


@pytest.mark.parametrize("producer", [Producer, OldProducer])
@each_form
def test_bare_dlpack_objects(device: str, producer: type[Producer], form: Form) -> None:
    check_outs_are_returned(base(form, device), producer)


@each_form
def test_one_bare_object_among_tensors(device: str, form: Form) -> None:
    for name in form.tensors:
        check_one_bare_object(base(form, device), name)


@each_form
def test_bare_objects_of_slices_with_an_offset(device: str, form: Form) -> None:
    """The address is data + byte_offset, whichever of the two a producer moves."""
    call = base(form, device)
    changes = {}
    for name in form.inputs:
        tensor = call.args[name]
        if name not in call.boxes:
            wide = torch.zeros(*tensor.shape[:-1], 2112, dtype=BF16, device=device)
            changes[name] = wide[..., 1000 : 1000 + tensor.shape[-1]]
            changes[name].copy_(tensor)
    if form.has_cache:
        slots = call.args["slot_mapping"]
        changes["slot_mapping"] = torch.cat((slots[:2], slots))[2:]
    call = call.given(**changes)
    before = call.snapshot()
    outs = [box.tensor for box in poisoned_outs(call)]
    call.run(**wrapped(call, Producer), out=as_out([*map(Producer, outs)]))
    call.check(before, as_out(outs))


@each_form
def test_bare_objects_of_empty_tensors(device: str, form: Form) -> None:
    """No tokens: the addresses are null, and the strides may be anything."""
    call = form.make(0, 3, rope=True, device=device)
    empty = {
        name: torch.empty(value.shape, dtype=value.dtype, device=device)
        for name, value in call.args.items()
        if name in form.inputs
    }
    odd = form.inputs[1] if form.kind != "concat" else form.inputs[0]
    empty[odd] = empty[odd].as_strided(empty[odd].shape, (5, 6, 1)[-empty[odd].ndim :])
    empty["k_pe"] = torch.empty(0, 1, 64, dtype=BF16, device=device)
    if form.has_cache:
        empty["slot_mapping"] = torch.empty(0, dtype=torch.int64, device=device)
    call = call.given(**empty)
    before = call.snapshot()
    outs = [
        torch.empty(call.output_shape(name), dtype=call.output_dtype(name), device=device)
        for name in form.outputs
    ]
    call.run(**wrapped(call, Producer), out=as_out([*map(Producer, outs)]))
    call.check(before, as_out(outs))


class CopyingProducer(Producer):
    """A producer that makes the memory at the export; the capsule alone keeps it alive."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.clone().__dlpack__(**kwargs)


@each_form
def test_the_capsule_is_kept_for_as_long_as_its_memory_is_used(form: Form) -> None:
    call = form.make(64, 3, rope=True, scale_tensors=True)
    before = call.snapshot()
    names = [name for name in call.args if name not in call.boxes]
    outs = as_out([box.tensor for box in poisoned_outs(call)])
    call.check(before, call.run(**wrapped(call, CopyingProducer, *names), out=outs))


class Memory(np.ndarray[Any, Any]):
    """An array that can be referred to weakly and hashed by identity."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("name", ["decode", "concat"])
def test_a_kept_plan_keeps_no_memory_alive(name: str) -> None:
    call = FORMS[name].make(11, 3)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    seen = []

    class Watched(Producer):
        """Exports copies, each in memory that NumPy owns and this test watches."""

        def __dlpack__(self, **kwargs: Any) -> Any:
            array = self._tensor.view(torch.int16).numpy().copy().view(Memory)
            alive.add(array)
            seen.append(len(alive))
            return torch.from_numpy(array).view(BF16).__dlpack__(**kwargs)

    call.run(**wrapped(call, Watched, FORMS[name].inputs[0], "k_pe"))
    gc.collect()
    assert max(seen) > 0
    assert len(alive) == 0


# NumPy


@DTYPES
@each_form
def test_case16_numpy_arrays(form: Form, dtype: torch.dtype) -> None:
    check_numpy_arrays(base(form, dtype=dtype))


def test_case16_k_pe_of_e4m3_from_numpy() -> None:
    for k_pe in (E4M3, torch.uint8):
        call = FORMS["concat_fp8"].make(9, 3, k_pe=k_pe)
        call.check({}, as_torch(call, call.run(**wrapped(call, numpy_of))))


def test_case16_other_eight_bit_types_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, argument, told in (
        ("concat_fp8", "k_pe", ""),
        ("decode-fp8", "kv_cache", ""),
        ("fp8", "kv_cache", " rows of 576"),
    ):
        options = {"k_pe": torch.uint8} if argument == "k_pe" else {}
        call = FORMS[name].make(9, 3, **options)
        codes = call.args[argument].view(torch.uint8).numpy()
        for dtype in ("float8_e5m2", "float8_e4m3fnuz", "float8_e4m3", "float8_e4m3b11fnuz"):
            wrong = codes.view(getattr(ml_dtypes, dtype))
            refused(call, argument, exactly(dtype + told), **{argument: wrong})
        refused(call, argument, exactly("int8" + told), **{argument: codes.view(np.int8)})


@each_form
def test_numpy_outs_are_returned(form: Form) -> None:
    check_outs_are_returned(base(form), numpy_of)


@each_form_with_a_cache
def test_numpy_and_torch_mixed(form: Form) -> None:
    call = base(form)
    before = call.snapshot()
    names = ("kv_cache", "slot_mapping", "positions", "k_pe")
    result = call.run(**wrapped(call, numpy_of, *names))
    assert all(isinstance(tensor, torch.Tensor) for tensor in as_list(result))
    call.check(before, result)


@DTYPES
@each_form
def test_read_only_arrays(form: Form, dtype: torch.dtype) -> None:
    """Fine as inputs, refused where something is written: the cache, outputs, a turned q."""
    call = base(form, dtype=dtype)
    for name in form.tensors:
        arguments = wrapped(call, numpy_of)
        arguments[name].flags.writeable = False
        if name in form.written(rope=True):
            refused(call, name, READ_ONLY, **arguments)
            if call.args[name].dtype in (FP16, torch.uint8):
                bare = {**arguments, name: Producer(arguments[name])}
                refused(call, name, READ_ONLY, **bare)
        else:
            before = call.snapshot()
            call.check(before, as_torch(call, call.run(**arguments)))
    for i in range(len(form.outputs)):
        boxes = poisoned_outs(call)
        saved = [box.snapshot() for box in boxes]
        outs = [numpy_of(box.tensor) for box in boxes]
        outs[i].flags.writeable = False
        refused(call, r"out(\[\d\])?", READ_ONLY, **wrapped(call, numpy_of), out=as_out(outs))
        for box, before in zip(boxes, saved, strict=True):
            oracle.assert_same_bits(box.snapshot(), before, "out after a refused call")


def test_a_read_only_query_without_positions_is_fine() -> None:
    call = FORMS["insert"].make(9, 3, dtype=FP16)
    arguments = wrapped(call, numpy_of)
    arguments["q"].flags.writeable = False
    before = call.snapshot()
    call.check(before, as_torch(call, call.run(**arguments)))


@each_form
def test_case26_negative_strides_of_numpy_are_refused(form: Form) -> None:
    call = base(form, dtype=FP16)
    for name in form.tensors:
        arguments = wrapped(call, numpy_of)
        if arguments[name].size > 1:
            arguments[name] = arguments[name][::-1]
            stride = arguments[name].strides[0] // arguments[name].itemsize
            refused(call, name, exactly(f"stride {stride} at axis 0"), **arguments)


def test_numpy_byte_order_is_not_guessed() -> None:
    for form in (FORMS["decode"], FORMS["insert"]):
        call = base(form, dtype=FP16)
        arguments = wrapped(call, numpy_of)
        swapped = ((form.inputs[1], ">f2"), ("slot_mapping", ">i8"), ("cos_sin_cache", ">f4"))
        for name, order in swapped:
            wrong = {**arguments, name: arguments[name].astype(order)}
            refused(call, name, ">|byte order|big", **wrong)


@each_form
def test_numpy_arrays_off_their_element_size_are_refused(form: Form) -> None:
    """An odd address and a row stride of odd bytes: NumPy allows both, no kernel can."""
    call = base(form, dtype=FP16)
    for name in (*form.inputs, *(("kv_cache",) if form.has_cache else ())):
        arguments = wrapped(call, numpy_of)
        shape, size = arguments[name].shape, 2 * arguments[name].size
        if arguments[name].itemsize == 1:
            continue
        memory = np.zeros(2 * size + 8192, np.uint8)
        memory = memory[-memory.ctypes.data % 16 :]
        odd = memory[1 : 1 + size].view(np.float16).reshape(shape)
        refused(call, name, exactly(f"address 0x{odd.ctypes.data:x}"), **{**arguments, name: odd})
        width = 2 * shape[-1] + 1
        strides = (width,) if len(shape) == 2 else (shape[1] * width, width)
        odd = np.ndarray(shape, np.float16, memory, strides=(*strides, 2))
        refused(call, name, "stride", **{**arguments, name: odd})


@pytest.mark.parametrize("scale", [np.float32(0.3), np.float64(0.3), 2, np.array([0.3], "f4")])
def test_scales_as_other_numbers(scale: Any) -> None:
    """Python ints, NumPy numbers and NumPy arrays of one element are scales too."""
    value = torch.tensor(scale if isinstance(scale, np.ndarray) else [float(scale)]).float()
    for form in (FORMS["decode-fp8"], FORMS["fp8"]):
        call = form.make(5, 2)
        before = call.snapshot()
        result = call.run(**dict.fromkeys(form.scales, scale))
        call.given(**dict.fromkeys(form.scales, value)).check(before, result)


def test_a_time_is_no_scale() -> None:
    """NumPy counts its times among the integers."""
    call = FORMS["decode-fp8"].make(5, 2)
    for name in FORMS["decode-fp8"].scales:
        refused(call, name, exactly("timedelta64"), **{name: np.timedelta64(1, "s")})


@each_form
def test_masked_arrays_are_refused(form: Form) -> None:
    """Their memory holds what their mask takes away; also behind the plan of a plain array."""
    call = base(form, dtype=FP16)
    call.run(**wrapped(call, numpy_of))
    for name in form.tensors:
        arguments = wrapped(call, numpy_of)
        arguments[name] = np.ma.masked_array(arguments[name], mask=True)
        refused(call, name, exactly("MaskedArray"), **arguments)


# JAX


@each_form
def test_jax_inputs(form: Form) -> None:
    """All but what is written; its integers are 32 bits wide."""
    pytest.importorskip("jax")
    call = base(form, slot_dtype=torch.int32)
    if form.has_cache:
        call.args["positions"] = call.args["positions"].to(torch.int32)
    names = [name for name in form.tensors if name not in form.written(rope=True)]
    before = call.snapshot()
    arguments = wrapped(call, jax_of, *names)
    call.check(before, as_torch(call, call.run(**arguments)))
    before = call.snapshot()
    outs = as_out([box.tensor for box in poisoned_outs(call)])
    call.check(before, call.run(**arguments, out=outs))


def _jax_on_the_gpu() -> None:
    """Run in a process of its own: JAX takes most of a GPU's memory unless told otherwise."""
    import jax

    for name in ("decode", "decode-fp8", "concat", "concat_fp8"):
        form = FORMS[name]
        call = form.make(9, 3, rope=True, device="cuda")
        given = [n for n in form.tensors if n != "kv_cache" and n not in form.scales]
        before = call.snapshot()
        arguments = {
            # JAX imports what PyTorch shares; without 64-bit mode its integers are 32 bits wide.
            n: jax.dlpack.from_dlpack(
                call.args[n].int() if n in ("slot_mapping", "positions") else call.args[n]
            )
            + 0
            for n in given
        }
        result = call.run(**arguments)
        found = []
        for output, array in zip(form.outputs, as_list(result), strict=True):
            assert isinstance(array, jax.Array), type(array)
            fp8 = call.output_dtype(output) == E4M3
            assert array.dtype == (jax.numpy.float8_e4m3fn if fp8 else jax.numpy.bfloat16)
            torch.cuda.synchronize()
            found.append(torch_of(np.asarray(array), call.output_dtype(output)).to("cuda"))
            print(array.device.platform)
        call.check(before, as_out(found))


@pytest.mark.gpu
def test_jax_inputs_on_the_gpu() -> None:
    pytest.importorskip("jax")
    # JAX makes the last of several GPUs current, from where PyTorch exports nothing of the first.
    told = run_child(
        _jax_on_the_gpu,
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": "0"},
    )
    assert told.split() == ["gpu"] * 5


@each_form
def test_case27_jax_outputs_are_refused(form: Form) -> None:
    pytest.importorskip("jax")
    call = form.make(5, 2, dtype=FP16, rope=True)
    for name in form.written(rope=True):
        array = jax_of(call.args[name])
        saved = np.array(array)
        refused(call, name, IMMUTABLE, **{name: array})
        assert np.array_equal(np.asarray(array), saved, equal_nan=True)
    outs = [box.tensor for box in poisoned_outs(call)]
    for i in range(len(outs)):
        array = jax_of(outs[i])
        given = as_out([*outs[:i], array, *outs[i + 1 :]])
        refused(call, r"out(\[\d\])?", IMMUTABLE, out=given)


# CuPy


@pytest.mark.gpu
@DTYPES
@each_form
def test_case16_cupy_arrays(form: Form, dtype: torch.dtype) -> None:
    """CuPy has no float8 and gets the codes as bytes."""
    cupy = pytest.importorskip("cupy")
    call = base(form, "cuda", dtype=dtype)
    before = call.snapshot()
    torch.cuda.synchronize()
    result = call.run(**wrapped(call, cupy_of))
    cupy.cuda.get_current_stream().synchronize()
    found = []
    for name, array in zip(form.outputs, as_list(result), strict=True):
        assert isinstance(array, cupy.ndarray)
        bits = array.view({1: cupy.uint8, 2: cupy.int16}[array.dtype.itemsize])
        found.append(torch.from_dlpack(bits).view(call.output_dtype(name)))
    call.check(before, as_out(found))


@pytest.mark.gpu
@each_form
def test_cupy_outs_are_returned(form: Form) -> None:
    """Those of fp8 as bytes."""
    cupy = pytest.importorskip("cupy")
    call = base(form, "cuda")
    before = call.snapshot()
    outs = [box.tensor for box in poisoned_outs(call)]
    arrays = [cupy_of(out) for out in outs]
    torch.cuda.synchronize()
    result = call.run(**wrapped(call, cupy_of), out=as_out(arrays))
    assert all(a is b for a, b in zip(as_list(result), arrays, strict=True))
    cupy.cuda.get_current_stream().synchronize()
    call.check(before, as_out(outs))


@pytest.mark.gpu
@each_form
def test_case26_negative_strides_of_cupy_are_refused(form: Form) -> None:
    cupy = pytest.importorskip("cupy")
    call = base(form, "cuda", dtype=FP16)
    for name in (*form.inputs, *(("slot_mapping",) if form.has_cache else ())):
        for axis in (0, -1):
            arguments = wrapped(call, cupy_of)
            arguments[name] = cupy.flip(arguments[name], axis)
            refused(call, name, r"^stride -\d+ at axis \d$", **arguments)


@each_form
def test_torch_subclasses_and_parameters(form: Form) -> None:
    """An nn.Parameter that asks for no gradient is a tensor like any other."""
    call = form.make(5, 2, rope=True)
    for name in form.inputs:
        if name not in call.boxes:
            frozen = torch.nn.Parameter(call.args[name].clone(), requires_grad=False)
            run_and_check(call.given(**{name: frozen}))
            oracle.assert_same_bits(oracle.bits(frozen), oracle.bits(call.args[name]), name)
