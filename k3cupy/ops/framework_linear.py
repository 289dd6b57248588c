"""The framework's own linear, for what no kernel of ours should run."""

from __future__ import annotations

from typing import Any

from k3cupy.call import outputs
from k3cupy.runtime import producers, streams
from k3cupy.runtime.errors import reject
from k3cupy.runtime.tensors import pytorch


def linear(x: Any, weight: Any, residual: Any, stream: Any, float32_out: bool) -> Any:
    """Return ``x @ weight.T (+ residual)`` of the framework that the tensors come from.

    In float32 on demand, of sums that no narrower type has seen.

    Raises:
        TypeError: the tensors are of no framework with a linear, or of several.
    """
    torch = pytorch()
    if torch is None or not (
        isinstance(x, torch.Tensor)
        and isinstance(weight, torch.Tensor)
        and (residual is None or isinstance(residual, torch.Tensor))
    ):
        framework = _framework_of({"x": x, "weight": weight, "residual": residual})
        if stream is not None and framework == "cupy":
            with streams.current_for_cupy(streams.handle_of(stream), x.device.id):
                return _array_linear(x, weight, residual, float32_out)
        return _array_linear(x, weight, residual, float32_out)
    of_torch = torch_float32 if float32_out else torch_linear
    device = x.device.index if x.device.type == "cuda" else None
    if stream is None or device is None:
        return of_torch(torch, x, weight, residual)
    handle = streams.handle_of(stream)
    with outputs.allocated_for("torch", device, handle):
        out = of_torch(torch, x, weight, residual)
    outputs.keep_for_stream([x, weight, residual], device, handle)
    return out


def _framework_of(given: dict[str, Any]) -> str:
    """Return the framework of x, which must be that of the others and have a linear."""
    found = {name: producers.view(t, name).framework for name, t in given.items() if t is not None}
    framework, what = found["x"], "PyTorch, CuPy, NumPy or JAX"
    for name, other in found.items():
        if other != framework or framework not in ("torch", "numpy", "cupy", "jax"):
            expected = f"a tensor of {what}, whose linear has to run here"
            hint = "explain_low_latency_gemm says why no kernel runs"
            reject(name, expected, f"one of {other}", hint, TypeError)
        what = f"{framework} like x"
    return framework


def torch_linear(torch: Any, x: Any, weight: Any, residual: Any) -> Any:
    """Multiply and add as PyTorch does."""
    if residual is None:
        return torch.nn.functional.linear(x, weight)
    if x.is_nested:  # of such PyTorch has no addmm
        return torch.nn.functional.linear(x, weight) + residual
    if x.dim() == 2 or weight.dim() != 2:
        return torch.addmm(residual, x, weight.t())
    n, k = weight.shape
    # Rows are counted: of no elements PyTorch cannot infer how many there are.
    count, shape = x.shape[:-1].numel(), (*x.shape[:-1], n)
    added = residual.expand(shape).reshape(count, n)
    return torch.addmm(added, x.reshape(count, k), weight.t()).reshape(shape)


def torch_float32(
    torch: Any, x: Any, weight: Any, residual: Any, stores_sums: bool | None = None
) -> Any:
    """Multiply and add in float32: by cuBLAS, which can store its sums, else of widened inputs.

    Whether it can is what compiled code says by ``stores_sums``, because it cannot ask.
    """
    linear, kinds = torch.nn.functional.linear, (torch.bfloat16, torch.float16)
    narrow = x.dtype == weight.dtype and x.dtype in kinds
    follows = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if stores_sums is None:
        stores_sums = "dtype" in torch.ops.aten.mm.overloads()  # from PyTorch 2.8 on
    stored, where = x.is_cuda and stores_sums, x.device.type
    if where not in ("cpu", "cuda") and not torch.amp.is_autocast_available(where):
        where = "cpu"
    with torch.autocast(where, enabled=False):  # it would round
        if not narrow:
            out = linear(x, weight)
        elif stored and not follows and not x.is_nested and x.dim() and weight.dim() == 2:
            rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
            out = torch.mm(rows, weight.t(), out_dtype=torch.float32)
            out = out.view(*x.shape[:-1], weight.shape[0])
        else:
            out = linear(x.float(), weight.float())
        if residual is not None:
            out = out + (residual if x.is_nested else residual.expand(out.shape))
        return out.float()


def _array_linear(x: Any, weight: Any, residual: Any, float32_out: bool) -> Any:
    """Multiply in fp32 at least: no rounding but the last one is to a type of 16 bits."""
    narrow = x.dtype.itemsize <= 2
    terms = [t.astype("float32") if narrow and t is not None else t for t in (x, weight, residual)]
    out = terms[0] @ terms[1].T
    if residual is not None:
        shape, out = out.shape, out + terms[2]
        if out.shape != shape:
            reject("residual", f"shape {list(shape)}", f"shape {list(residual.shape)}")
    return out.astype("float32" if float32_out else x.dtype)
