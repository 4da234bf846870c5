"""The metrics of a run in a tracker, to watch a run of hours live: --tracker tensorboard, wandb or trackio."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nano_exgrpo.config import TrainConfig
from nano_exgrpo.errors import InputError

Track = Callable[[int, dict[str, Any]], None]


def open_tracker(config: TrainConfig) -> Track:
    """A function that takes each row of metrics.jsonl, under the same names. wandb stays offline unless WANDB_MODE says
    otherwise. Raises InputError where the package is missing."""
    package, run = tracker_package(config.tracker), Path(config.run)
    if package is None:
        return lambda step, row: None
    if config.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run / "tensorboard"))

        def track(step: int, row: dict[str, Any]) -> None:
            for name, value in numbers(row).items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return track
    offline = {"mode": os.environ.get("WANDB_MODE", "offline"), "dir": str(run)} if config.tracker == "wandb" else {}
    package.init(project="nano-exgrpo", name=run.name, config=asdict(config), **offline)
    return lambda step, row: package.log(numbers(row), step=step)


def tracker_package(name: str) -> Any:
    """The package of a tracker; None where there is no tracker. Raises InputError where it is missing."""
    if name == "none":
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"--tracker {name} needs: pip install {name}") from None


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The figures of a row that are there, those of each bucket by a name of its own.

    >>> numbers({"reward": 0.5, "entropy": None, "replay/started": True, "buffer/buckets": {1: 3}})
    {'reward': 0.5, 'replay/started': 1.0, 'buffer/buckets/1': 3.0}
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat.update(
            {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        )
    return {name: float(value) for name, value in flat.items() if isinstance(value, (int, float))}
