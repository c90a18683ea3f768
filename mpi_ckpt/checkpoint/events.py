"""What a checkpointer tells its observer: one dict an event, `event` and `step` always among its entries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

Event = dict[str, Any]


def forgiving(on_event: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """An observer that cannot keep its rank, by failing, from what the others wait for: its exceptions are logged."""

    def tell(event: Event) -> None:
        try:
            if on_event is not None:
                on_event(event)
        except Exception:
            logger.exception("on_event failed, going on: %s", event)

    return tell
