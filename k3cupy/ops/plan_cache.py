"""Plans by the signature of their calls: everything about a call but its addresses and numbers."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from k3cupy.ops.arguments import Values


class Plan(Protocol):
    """What repeats a call for other tensors of the same layout."""

    def run(self, values: Values, addresses: list[int], stream: Any) -> Any:
        """Compute a call; values and addresses are in the order of the operation's arguments."""


class PlanCache:
    """The plans of one operation, bounded; ``get(key)`` is a dictionary's own look-up."""

    def __init__(self, limit: int = 4096) -> None:
        self._plans: dict[Any, Plan] = {}
        self._lock = threading.Lock()
        self._limit = limit
        self.get = self._plans.get

    def remember(self, key: Any, plan: Plan) -> None:
        """Keep a plan; a full cache begins anew."""
        with self._lock:
            if len(self._plans) >= self._limit:
                self._plans.clear()
            self._plans[key] = plan
