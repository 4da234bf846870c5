"""Checkpoints are whole or absent, and hold all that the next step depends on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ragged

from nano_exgrpo.errors import InputError
from nano_exgrpo.infra import checkpoint
from nano_exgrpo.infra.checkpoint import load_state, save_checkpoint, save_model, set_random_state, write_folder
from nano_exgrpo.infra.loading import load_policy
from nano_exgrpo.policy import Policy


def save(run: Path, step: int, policy: Policy) -> None:
    save_checkpoint(run, step, policy, {"step": step, "questions": "digest"})


def load(run: Path) -> tuple[Path, dict[str, Any]]:
    return load_state(run, steps=99)


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_the_last_two_are_kept(policy, tmp_path):
    for step in (1, 2, 10, 3):
        save(tmp_path, step, policy)
    assert names(tmp_path) == ["step-000003", "step-000010"]
    folder, state = load(tmp_path)
    assert folder.name == "step-000010" and state["step"] == 10


def test_model_comes_back_bit_for_bit(policy, tmp_path):
    rows = ragged(policy, [(3, 4), (2, 2)])
    policy.model.generation_config.top_k = 20  # without do_sample: some published models are as inconsistent
    save_model(policy, tmp_path / "model")
    again = load_policy(str(tmp_path / "model"), device=torch.device("cpu"))
    assert torch.equal(policy.score(rows).logprobs, again.score(rows).logprobs)
    assert again.stop_ids == policy.stop_ids and again.tokenizer.chat_template == policy.tokenizer.chat_template
    assert again.model.generation_config.top_k == 20
    assert (tmp_path / "model" / "model.safetensors").exists() and not list(tmp_path.rglob("*.bin"))


def test_random_state_comes_back(policy, tmp_path):
    torch.manual_seed(5)
    save(tmp_path, 1, policy)
    expected = torch.rand(3)
    torch.manual_seed(6)
    set_random_state(load(tmp_path)[1]["random"])
    assert torch.equal(torch.rand(3), expected)


def test_the_random_state_of_every_gpu_comes_back(policy, tmp_path, monkeypatch):
    """Two GPUs; on a machine with another number of them, theirs are left as they are."""
    states, given = [torch.arange(3, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)], []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
        save(tmp_path, 1, policy)
    saved = load(tmp_path)[1]["random"]
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    for count in (0, 1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)  # noqa: B023
        set_random_state(saved)
    assert len(given) == 1 and all(map(torch.equal, given[0], states))


def test_a_macs_random_state_comes_back_and_is_ignored_elsewhere(policy, tmp_path, mac, monkeypatch):
    torch.manual_seed(5)
    save(tmp_path, 1, policy)
    expected = mac.draw()
    torch.manual_seed(6)
    state = load(tmp_path)[1]["random"]
    set_random_state(state)
    assert torch.equal(mac.draw(), expected)
    torch.manual_seed(6)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    set_random_state(state)  # resumed on another machine
    assert not torch.equal(mac.draw(), expected)


def full_disk_for_the_weights(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_a_failed_save_leaves_the_last_one_and_no_litter(policy, tmp_path, monkeypatch):
    save(tmp_path, 1, policy)

    def full_disk(*args):
        Path(args[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(InputError, match="No space left on device.*saved before is untouched"):
        save(tmp_path, 2, policy)
    assert names(tmp_path) == ["step-000001"]
    monkeypatch.setattr(policy.model, "save_pretrained", full_disk_for_the_weights, raising=False)
    with pytest.raises(InputError) as error:
        save(tmp_path, 2, policy)
    assert str(error.value).count("untouched") == 1 and names(tmp_path) == ["step-000001"]
    assert load(tmp_path)[1]["step"] == 1


def test_replacing_a_folder_is_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "f"
    write_folder(folder, lambda t: (t / "a").write_text("old"))

    def broken(target: Path) -> None:
        (target / "a").write_text("new")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    with pytest.raises(InputError):
        write_folder(folder, broken)
    assert (folder / "a").read_text() == "old"
    write_folder(folder, lambda t: (t / "b").write_text("new"))
    assert [p.name for p in folder.iterdir()] == ["b"] and [p.name for p in tmp_path.iterdir()] == ["f"]


OTHER_STATES = {
    "other": {"weights": torch.zeros(2)},
    "list": [1, 2],
    "a word for the step": {"step": "two", "questions": "digest", "random": {}},
}


@pytest.mark.parametrize("damage", ["truncate", "empty", "text", "pickle", "other", "list", "a word for the step"])
def test_damaged_state_is_named_and_the_one_before_still_works(policy, tmp_path, damage):
    for step in (1, 2):
        save(tmp_path, step, policy)
    state = tmp_path / "checkpoints" / "step-000002" / "state.pt"
    if damage == "pickle":  # an object that would run code when unpickled is refused, not run

        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        torch.save({"x": Hostile()}, state)
    elif damage in OTHER_STATES:
        torch.save(OTHER_STATES[damage], state)
    else:
        data = state.read_bytes()
        state.write_bytes({"truncate": data[: len(data) // 2], "empty": b"", "text": b"hello"}[damage])
    with pytest.raises(InputError, match="step-000002 is damaged .*delete that folder to resume from the one before"):
        load(tmp_path)
    assert not (tmp_path / "executed").exists()
    shutil.rmtree(state.parent)
    assert load(tmp_path)[1]["step"] == 1


def test_no_checkpoint_is_said(tmp_path):
    with pytest.raises(InputError, match="has no checkpoint to resume from"):
        load(tmp_path)


@pytest.mark.parametrize("moment", ["model", "state", "rename", "prune"])
def test_kill_minus_nine_during_a_save_leaves_a_resumable_run(policy, tmp_path, moment):
    """A process that dies at any moment of its third save; the next save clears its litter away."""
    for step in (1, 2):
        save(tmp_path, step, policy)

    def die(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_half_way(state: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        die()

    child = os.fork()
    if child == 0:
        torch_save = torch.save
        if moment == "model":
            policy.tokenizer.save_pretrained = die
        elif moment == "state":
            torch.save = die_half_way
        elif moment == "rename":
            torch.save = lambda *args: (torch_save(*args), setattr(os, "replace", die))
        else:
            checkpoint.list_checkpoints = die
        try:
            save(tmp_path, 3, policy)
        finally:
            os._exit(1)  # not reached
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    folder, state = load(tmp_path)
    assert state["step"] == (3 if moment == "prune" else 2)
    load_policy(str(folder / "model"), device=torch.device("cpu"))
    assert any(name.startswith(".step-") for name in names(tmp_path)) == (moment != "prune")
    save(tmp_path, 4, policy)
    assert names(tmp_path) == [folder.name, "step-000004"]
