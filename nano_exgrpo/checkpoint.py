"""Save and resume. A checkpoint holds everything that the next step depends on, so that 2 steps, a resume
and 2 more steps equal 4 steps bit for bit (on a CPU; GPU kernels may sum in another order).

    runs/<name>/checkpoints/step-000040/
        model/      weights, configuration and tokenizer, as `from_pretrained` reads them; with LoRA, the frozen ones
        state.pt    step, optimiser, data order, replay buffer, random states: plain containers and tensors
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nano_exgrpo.lora import has_lora, plain_state_dict
from nano_exgrpo.policy import Policy
from nano_exgrpo.questions import InputError

KEPT = 2  # the last checkpoint, and one before it in case the disk fills up while writing


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` whole or not at all: `write` fills a temporary one, which then takes its name."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")  # two runs may write one warm-up cache
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
    except Exception as error:  # a full disk: OSError, or what torch and safetensors make of it
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(f"{folder} could not be written ({error}); what was saved before is untouched") from None
    replaced = temporary.with_suffix(".old")
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(temporary, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def save_model(policy: Policy, folder: Path, *, merge: bool = True) -> None:
    """Weights (safetensors) and tokenizer: a folder that `from_pretrained`, `--model` and eval.py load.

    merge: LoRA adapters are merged into the weights; otherwise left out."""
    state = plain_state_dict(policy.model, merge=merge) if has_lora(policy.model) else None

    def write(target: Path) -> None:
        from transformers import GenerationConfig

        # save_pretrained refuses a generation_config that from_pretrained took (a temperature without do_sample,
        # say, as some published models have), so it gets a bare one and the model's own is written as it is.
        own, policy.model.generation_config = policy.model.generation_config, GenerationConfig()
        try:
            policy.model.save_pretrained(target, state_dict=state)
        finally:
            policy.model.generation_config = own
        own.to_json_file(target / "generation_config.json")
        policy.tokenizer.save_pretrained(target)

    write_folder(folder, write)


def save_checkpoint(run: Path, step: int, policy: Policy, state: dict[str, Any]) -> Path:
    """Write checkpoint `step` of a run and delete all but the last two. Returns its folder."""

    def write(target: Path) -> None:
        save_model(policy, target / "model", merge=False)  # adapters go into state.pt
        torch.save({**state, "step": step, "random": random_state()}, target / "state.pt")

    folder = run / "checkpoints" / f"step-{step:06d}"
    write_folder(folder, write)
    killed_while_saving = list(folder.parent.glob(".step-*"))
    for old in list_checkpoints(run)[:-KEPT] + killed_while_saving:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def list_checkpoints(run: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(p.parent for p in (run / "checkpoints").glob("step-*/state.pt"))


def load_state(run: Path) -> tuple[Path, dict[str, Any]]:
    """(folder, state) of a run's last checkpoint. Raises InputError where there is none or it is damaged."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise InputError(f"run {run} has no checkpoint to resume from; start it anew with --overwrite")
    try:
        return checkpoints[-1], torch.load(checkpoints[-1] / "state.pt", weights_only=True, map_location="cpu")
    except Exception as error:  # truncated zip, wrong type, refused pickle: each raises its own kind
        raise InputError(
            f"checkpoint {checkpoints[-1]} is damaged ({type(error).__name__}); delete that folder to resume from the one before"
        ) from None


def random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
