"""The attention of models that transformers makes from now on; this module needs transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from k3cupy.engines.report import Target
from k3cupy.engines.transformers_attention import LATER, target_of

_own_init: Any = None
"""How transformers makes a decoder layer, while ours stands in for it."""


def exchange_later(exchange: Callable[[nn.Module, Target], Any]) -> None:
    """Exchange the attention of each decoder layer as soon as it is made.

    Transformers' own mapping of patches does the like by a search through all that it could
    import, which fails where one of its models needs a package that is not installed.

    Args:
        exchange: called with the attention and its target.
    """
    global _own_init
    target = target_of(LATER)
    target.install()
    if _own_init is not None:
        return
    _own_init = own = DeepseekV3DecoderLayer.__init__

    @functools.wraps(own)
    def make(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        exchange(self.self_attn, target)

    DeepseekV3DecoderLayer.__init__ = make


def exchange_no_more() -> None:
    """Let transformers make its layers as it did."""
    global _own_init
    if _own_init is not None:
        DeepseekV3DecoderLayer.__init__ = _own_init
        _own_init = None
