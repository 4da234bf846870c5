"""Ctrl-C and SIGTERM end a run after its current step, with a checkpoint."""

from __future__ import annotations

import signal
import sys
from typing import Any

from nano_exgrpo.infra import distributed


class StopRequest:
    """As a context manager: Ctrl-C or SIGTERM sets `requested`; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self.handlers = {kind: signal.signal(kind, self.request) for kind in (signal.SIGINT, signal.SIGTERM)}
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
            print(
                "\nstopping after this step, if it ends before torchrun loses patience (30 s, or as --shutdown-timeout or TORCH_ELASTIC_SHUTDOWN_TIMEOUT says)",
                file=sys.stderr,
            )
