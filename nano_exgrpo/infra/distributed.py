"""Several devices: data parallelism over processes that torchrun starts. With one process everything here does nothing.

    torchrun --nproc-per-node 8 -- train.py --model Qwen2.5-Math-1.5B
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -- train.py ...   (on each
    node)

Every process has the whole model, its own share of the questions and its own replay buffer. It samples and scores its
B/N groups alone. Then gradients are *summed*: the loss is divided by the rows and tokens of all processes together, so
an update equals one process's update on the whole batch, whatever the lengths. ρ is taken of each process's share.

Only the optimiser's state is sharded (ZeroRedundancyOptimizer): rollouts need the whole weights for every token. How to
start, stop and size such a run is in docs/gpus.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nano_exgrpo.errors import InputError

T = TypeVar("T")
PATIENCE = timedelta(minutes=60)  # the longest that processes wait for the slowest one's rollouts


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the process that writes files and speaks."""
    return rank() == 0


def speaks() -> bool:
    """`is_main`, known before the processes have met, from what torchrun tells each."""
    return int(os.environ.get("RANK", 0)) == 0


def start(device: str) -> None:
    """Join the processes that torchrun started, if it did. device: as --device names it."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        return
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    if not is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - one process speaks


def lost_another(error: BaseException) -> bool:
    """Whether an error says that another process has ended, and no more than that: NCCL's have a type of their own,
    gloo's are plain RuntimeErrors that name its file ("…/gloo/transport/tcp/pair.cc:553] Connection closed by
    peer")."""
    return world_size() > 1 and (isinstance(error, dist.DistError) or "gloo/transport" in str(error))


def finish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(items: Sequence[T]) -> list[T]:
    """Every N-th item, beginning at this process's rank."""
    return list(items[rank() :: world_size()])


def share_of(count: int, flag: str) -> int:
    """count / N. Raises InputError where the processes cannot share it evenly."""
    if count % world_size():
        raise InputError(
            f"{flag} {count} cannot be shared by {world_size()} processes; make it a multiple of {world_size()}"
        )
    return count // world_size()


def total(values: dict[str, float]) -> dict[str, float]:
    """Sums over all processes; each calls it with the same names."""
    if world_size() == 1:
        return values
    return dict(zip(values, summed(torch.tensor(list(values.values()), dtype=torch.float64)).tolist()))


def mean(values: Sequence[float]) -> float:
    """Over the values of all processes."""
    sums = total({"sum": sum(values), "count": len(values)})
    return sums["sum"] / sums["count"]


def gather(rows: list[list[float]]) -> list[list[float]]:
    """The rows of all processes, one after the other; each process has some, all of the same length."""
    if world_size() == 1:
        return rows
    counts = torch.zeros(world_size(), dtype=torch.float64)
    counts[rank()] = len(rows)
    ends = summed(counts).cumsum(0).long().tolist()
    whole = torch.zeros(ends[-1], len(rows[0]), dtype=torch.float64)  # [rows of all, columns]
    whole[ends[rank()] - len(rows) : ends[rank()]] = torch.tensor(rows, dtype=torch.float64)
    return summed(whole).tolist()


def summed(values: Tensor) -> Tensor:
    """A tensor on the CPU summed over all processes."""
    moved = values.to("cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(moved)
    return moved.cpu()


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Gradients summed over all processes; one that had no rows to train on adds zero."""
    if world_size() == 1:
        return
    waiting = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            waiting.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in waiting:
        work.wait()


def same_everywhere(parameters: Iterable[Tensor]) -> None:
    """All processes take process 0's weights."""
    if world_size() > 1:
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)


def barrier() -> None:
    """Wait for all processes."""
    total({"arrived": 1.0})
