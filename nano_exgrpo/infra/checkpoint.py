"""Save and resume. A checkpoint holds everything that the next step depends on, so that 2 steps, a resume
and 2 more steps equal 4 steps bit for bit (on a CPU; GPU kernels may sum in another order).

    runs/<name>/checkpoints/step-000040/
        model/      weights, configuration and tokenizer, as `from_pretrained` reads them; with LoRA, the frozen ones
        state.pt    step, optimiser, LoRA adapters, data order, replay buffer, random states
        state-1.pt  … the same of every further process
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import distributed
from nano_exgrpo.infra.files import flush, write_text
from nano_exgrpo.infra.loading import without_bars
from nano_exgrpo.infra.precision import has_lora, plain_state_dict
from nano_exgrpo.infra.run_folder import list_checkpoints
from nano_exgrpo.policy import Policy

KEPT = 2  # the last checkpoint, and one before it in case the disk fills up while writing


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` whole or not at all, and onto the disk: `write` fills a temporary one, which then takes its name.

    Raises InputError where it cannot be written. Of two processes that write one folder at once, the first one wins."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for path in temporary.rglob("*"):
            if path.is_file():
                flush(path)
    except Exception as error:  # a full disk: OSError, or what torch and safetensors make of it
        full = folder.parent.is_dir() and shutil.disk_usage(folder.parent).free < 2**20
        reason = "the disk is full; make room" if full else str(error).split("\n")[0]
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(f"{folder} could not be written ({reason}); what was saved before is untouched") from None
    replaced = temporary.with_suffix(".old")
    if folder.exists():
        os.replace(folder, replaced)
    try:
        os.replace(temporary, folder)
    except OSError:  # it is there again: another process has written it
        shutil.rmtree(temporary, ignore_errors=True)
    flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def save_model(policy: Policy, folder: Path) -> None:
    """Weights (safetensors; LoRA adapters merged into them) and tokenizer: a folder that `from_pretrained`, `--model`
    and eval.py load."""
    write_folder(folder, lambda target: write_model(policy, target, merge=True))


def write_model(policy: Policy, target: Path, *, merge: bool) -> None:
    """merge: LoRA adapters are merged into the weights, in fp32; otherwise left out."""
    from transformers import GenerationConfig

    state = plain_state_dict(policy.model, merge=merge) if has_lora(policy.model) else None
    # save_pretrained refuses a generation_config that from_pretrained took (a temperature without do_sample,
    # say, as some published models have), so it gets a bare one and the model's own is written as it is.
    own, policy.model.generation_config = policy.model.generation_config, GenerationConfig()
    try:
        with without_bars():
            policy.model.save_pretrained(target, state_dict=state)
    finally:
        policy.model.generation_config = own
    if state is not None and merge:
        # save_pretrained notes the frozen weights' dtype, in which whoever loads the file would round half of what was
        # learned away.
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
        write_text(target / "config.json", json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    own.to_json_file(target / "generation_config.json")
    policy.tokenizer.save_pretrained(target)


def save_checkpoint(run: Path, step: int, policy: Policy, state: dict[str, Any]) -> Path:
    """Write checkpoint `step` of a run and delete all but the last two. Returns its folder."""
    state = {**state, "random": random_state()}
    folder = run / "checkpoints" / f"step-{step:06d}"
    own_state = folder.with_name(
        f".state-{distributed.rank()}.pt"
    )  # of the other processes; the first one collects them

    def write(target: Path) -> None:
        write_model(policy, target / "model", merge=False)  # adapters go into state.pt
        torch.save(state, target / "state.pt")
        for other in range(1, distributed.world_size()):
            os.replace(folder.with_name(f".state-{other}.pt"), target / f"state-{other}.pt")

    if not distributed.is_main():
        folder.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, own_state)
        distributed.barrier()
        distributed.barrier()
        return folder
    distributed.barrier()  # all have written their states
    write_folder(folder, write)
    distributed.barrier()
    killed_while_saving = list(folder.parent.glob(".step-*"))
    for old in list_checkpoints(run)[:-KEPT] + killed_while_saving:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def load_state(run: Path, steps: int) -> tuple[Path, dict[str, Any]]:
    """(folder, this process's state) of a run's last checkpoint. Raises InputError where there is none, it is damaged,
    another number of processes saved it, or it is beyond `steps`."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise InputError(f"run {run} has no checkpoint to resume from; start it anew with --overwrite")
    name = "state.pt" if distributed.is_main() else f"state-{distributed.rank()}.pt"
    saved = 1 + len(list(checkpoints[-1].glob("state-*.pt")))
    if saved != distributed.world_size():
        raise InputError(
            f"checkpoint {checkpoints[-1]} was saved by {saved} processes, each with its own questions, buffer and "
            f"part of the optimiser, so resume it with torchrun --nproc-per-node {saved}"
            if saved > 1
            else f"checkpoint {checkpoints[-1]} was saved by one process; resume it without torchrun"
        )
    try:
        state = torch.load(checkpoints[-1] / name, weights_only=True, map_location="cpu")
        step = int(state["step"])
        state["random"], state["questions"]  # another file under its name would fail later, less clearly
    except Exception as error:  # truncated zip, wrong type, refused pickle: each raises its own kind
        raise InputError(
            f"checkpoint {checkpoints[-1]} is damaged ({type(error).__name__}); delete that folder to resume from "
            f"the one before"
        ) from None
    if step > steps:
        raise InputError(f"run {run} is already at step {step}; to go on, raise --steps above that")
    return checkpoints[-1], state


def random_state() -> dict[str, Any]:
    """torch's generators on the CPU and on every GPU, a Mac's included; the others are in the sampler's and the
    buffer's state."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """On another device than the one that saved it, the run goes on with other, equally random draws there."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
