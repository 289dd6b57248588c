"""k3cupy inside vLLM: its operators and linear layers run our kernels, with no rebuild.

vLLM finds ``register`` as the plug-in ``k3cupy``, which does nothing unless ``K3CUPY_VLLM`` says
what to stand in for. Nothing of vLLM is imported: each target is taken when vLLM has imported its
module. What an installed vLLM has is compared with what we know first, and left alone where it
differs; calls that we do not take go to vLLM's own code. ``report`` tells both.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Protocol

import k3cupy
from k3cupy.accept import checks
from k3cupy.engines import vllm_facts as facts
from k3cupy.engines.imports import ImportWatch
from k3cupy.engines.overrides import NotOverridableError, Override, Replacement
from k3cupy.engines.report import OF_VARIABLE, EngineReport, Target, named_targets
from k3cupy.runtime import env

logger = logging.getLogger("vllm.k3cupy")
"""Below vLLM's own, so that its lines stand where vLLM's do."""

_KEY = "CUDA"
_WAITING = "vLLM has not imported {}"
_NOT_ASKED, _UNINSTALLED = "it was not asked for", "it was uninstalled"


class _Undoable(Protocol):
    def undo(self) -> None: ...


_lock = threading.RLock()
_targets = {name: Target(name, _NOT_ASKED) for name in facts.TARGETS}
_installed: dict[str, _Undoable] = {}
"""By dotted name what stands in vLLM now."""

_watches: list[ImportWatch] = []
_asked: set[str] = set()
"""What was asked for since the last ``uninstall``, by dotted name: watched for, or dealt with."""

_promised: set[str] = set()
"""Of those the ones that were asked for with ``kv_inputs_ready``."""


def register() -> None:
    """Do what ``K3CUPY_VLLM`` says: vLLM calls this in each of its processes, maybe repeatedly.

    ``1`` installs every target; names with commas between them, in which ``*`` stands for anything,
    install those; without it, or with ``0``, nothing happens. ``K3CUPY_VLLM_KV_READY`` makes the
    promise ``kv_inputs_ready``.

    Raises:
        ValueError: a variable names nothing that exists; the text says what does.
    """
    wanted = env.vllm_targets()
    if wanted is None:
        return
    names = named_targets(env.VLLM, wanted or None, _targets, OF_VARIABLE)
    _install(names, env.vllm_kv_ready())


def install(
    targets: str | Iterable[str] | None = None, *, kv_inputs_ready: bool = False
) -> EngineReport:
    """Stand in for vLLM's operators and functions, each as soon as vLLM has imported its module.

    Before a model is loaded, because graphs that are captured stay what they are. Targets that are
    installed already stay so.

    Args:
        targets: names of them, in which ``*`` stands for anything; None for all.
        kv_inputs_ready: a promise: in decode the kernel before the epilogue neither writes the
            latent, the slots, the positions and the scales, nor touches the cache rows that the
            epilogue writes. In vLLM's model of Kimi-K3 that kernel is a batched product.

    Returns:
        What is installed, and why the rest is not.

    Raises:
        TypeError: ``targets`` is no name and no names, or ``kv_inputs_ready`` no bool.
        ValueError: a name is none of the targets'.

    Example:
        >>> from k3cupy.engines import vllm
        >>> report = vllm.install("dsv3_fused_a_gemm")
        >>> report["dsv3_fused_a_gemm"].why_not
        'vLLM has not imported vllm._custom_ops'
        >>> vllm.uninstall()
    """
    checks.check_flags(locals(), "kv_inputs_ready")
    _install(named_targets("targets", targets, _targets), kv_inputs_ready)
    return report()


def uninstall() -> None:
    """Give vLLM its own code back everywhere. What was counted stays in the report.

    Graphs that were captured meanwhile keep our kernels.
    """
    with _lock:
        while _watches:
            _watches.pop().stop()
        while _installed:
            _installed.popitem()[1].undo()
        for name in _asked_targets():
            _targets[name].leave(_UNINSTALLED)
        _asked.clear()
        _promised.clear()


def report() -> EngineReport:
    """Return what is installed in this process, and the calls served and handed back.

    Calls that a CUDA graph replays count once, at the capture. Linear layers inside code that
    ``torch.compile`` has made are counted by ``k3cupy.dispatch_report`` alone.

    Example:
        >>> from k3cupy.engines import vllm
        >>> vllm.report()["dsv3_fused_a_gemm"].installed
        False
    """
    return EngineReport("vLLM", [target.row() for target in _targets.values()])


# --- What happens when a module of vLLM has been imported ----------------------------------------


def _install(names: tuple[str, ...], kv_inputs_ready: bool) -> None:
    actions: dict[str, list[Callable[[ModuleType], None]]] = {}
    with _lock:
        for dotted in map(_dotted, names):
            if dotted not in _asked:
                if kv_inputs_ready:
                    _promised.add(dotted)
                module = _module_of(dotted)
                _targets[facts.target_of(dotted)].leave(_WAITING.format(module))
                actions.setdefault(module, []).append(
                    functools.partial(_act, dotted, kv_inputs_ready)
                )
        if not actions:
            return
        for dotted in (facts.KERNEL_WARMUP, facts.COMPILE_FACTORS):
            if dotted not in _asked:
                helping = functools.partial(_help, dotted)
                actions.setdefault(_module_of(dotted), []).append(helping)
        if not _asked:
            actions.setdefault(facts.CUSTOM_OPS, []).append(_tell)
        _asked.update((*map(_dotted, names), facts.KERNEL_WARMUP, facts.COMPILE_FACTORS))
        watch = ImportWatch({name: functools.partial(_all, acts) for name, acts in actions.items()})
        _watches.append(watch)
        watch.start()


_DOTTED = {facts.target_of(dotted): dotted for dotted in facts.FUNCTIONS}


def _dotted(name: str) -> str:
    return _DOTTED.get(name, f"{facts.CUSTOM_OPS}:{name}")


def _module_of(dotted: str) -> str:
    return dotted.partition(":")[0]


def _all(acts: list[Callable[[ModuleType], None]], module: ModuleType) -> None:
    with _lock:
        for act in acts:
            act(module)


def _act(dotted: str, kv_inputs_ready: bool, module: ModuleType) -> None:
    """Stand in for a target whose module is there, or note why not."""
    from k3cupy.engines import vllm_targets

    name, modes = facts.target_of(dotted), _modes(kv_inputs_ready)
    target = _targets[name]
    try:
        if name in facts.OPERATORS:
            _installed[dotted] = Override(
                f"{facts.NAMESPACE}::{name}",
                facts.OPERATORS[name],
                lambda own: vllm_targets.operator(name, target, own, modes),
                modes.key,
            )
        else:
            of = vllm_targets.function
            _replace(dotted, module, lambda own: of(dotted, target, own, modes))
    except NotOverridableError as error:
        target.leave(str(error))
        logger.warning("k3cupy leaves %s to vLLM: %s", name, error)
    else:
        target.install()


def _modes(kv_inputs_ready: bool) -> Any:
    from k3cupy.engines.vllm_targets import Modes

    invariant = getattr(sys.modules.get("vllm.envs"), "VLLM_BATCH_INVARIANT", False)
    return Modes(bool(invariant), kv_inputs_ready, _KEY)


def _replace(dotted: str, module: ModuleType, make: Callable[[Any], Any]) -> None:
    *owners, name = facts.target_of(dotted).split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part, None)
    if owner is None:
        raise NotOverridableError(f"{module.__name__} has no {'.'.join(owners)}")
    importers = facts.IMPORTERS.get(dotted, ())
    _installed[dotted] = Replacement(owner, name, facts.FUNCTIONS[dotted], make, importers)


def _help(dotted: str, module: ModuleType) -> None:
    """Wrap what is no target: the warm-up, and what vLLM's cache of compiled graphs depends on."""
    from k3cupy.engines import vllm_warmup

    def installed() -> list[str]:
        return [name for name, target in _targets.items() if target.installed]

    def modes() -> Any:
        return _modes(bool(_promised))

    def make(own: Any) -> Any:
        if dotted == facts.KERNEL_WARMUP:
            return vllm_warmup.kernel_warmup(own, installed, modes, logger)
        return lambda: {**own(), **_compile_factors()}

    try:
        _replace(dotted, module, make)
    except NotOverridableError as error:
        logger.warning("k3cupy leaves %s to vLLM: %s", dotted, error)


def _compile_factors() -> dict[str, Any]:
    """Return what of ours decides what ``torch.compile`` makes of a model."""
    traced = map(facts.target_of, (facts.LINEAR, facts.LM_HEAD))
    asked = [name for name in traced if _dotted(name) in _asked]
    return {env.VLLM: [k3cupy.__version__, *asked]} if asked else {}


def _asked_targets() -> list[str]:
    """Return the targets that were asked for: the same in each process, whatever it imports."""
    return [name for name in _targets if _dotted(name) in _asked]


def _tell(_: ModuleType) -> None:
    """Say in the log that we are there."""
    asked = _asked_targets()
    operators = [name for name in asked if name in facts.OPERATORS]
    logger.info(
        "k3cupy %s in vLLM %s: %d of %d operators run our kernels, and %d functions will",
        k3cupy.__version__,
        getattr(sys.modules.get("vllm"), "__version__", "of no version"),
        sum(_targets[name].installed for name in operators),
        len(operators),
        len(asked) - len(operators),
    )
