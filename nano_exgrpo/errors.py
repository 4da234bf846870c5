"""The ways in which a command ends early, each with one sentence for the user."""

from __future__ import annotations

import torch


class InputError(ValueError):
    """The user's input cannot be used. The message is one sentence that names it and the fix.

    Scripts print it and exit with code 2; it never comes with a traceback."""


class Interrupted(Exception):
    """The user ended the run before there was anything to save."""


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has its own exception; the CPU and MPS allocators raise RuntimeError with one of these phrases."""
    phrases = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(p in str(error) for p in phrases)
