"""Ctrl-C, SIGTERM and a closed terminal end a run after its current step, with a checkpoint."""

from __future__ import annotations

import signal
import sys
from typing import Any

from nano_exgrpo.infra import distributed


class StopRequest:
    """As a context manager: Ctrl-C, SIGTERM or SIGHUP sets `requested`; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        kinds = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        self.handlers = {kind: signal.signal(kind, self.request) for kind in kinds}
        return self

    def __exit__(self, *exception: object) -> None:
        for kind, handler in self.handlers.items():
            signal.signal(kind, handler)

    def request(self, number: int, frame: Any) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True
        if distributed.world_size() == 1:
            print("\nstopping after this step (once more to stop at once)", file=sys.stderr)
        elif distributed.is_main():
            patience = "30 s, or as --shutdown-timeout or TORCH_ELASTIC_SHUTDOWN_TIMEOUT says"
            print(
                f"\nstopping after this step, if it ends before torchrun loses patience ({patience})", file=sys.stderr
            )
