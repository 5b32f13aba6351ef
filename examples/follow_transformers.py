"""Trains a GPT-2 of `transformers` in one process, and generates text with it in another
one, which always has the weights of the newest snapshot.

    python examples/follow_transformers.py --root /tmp/ckpts --versions 5

It needs `pip install transformers`, and downloads nothing: the model is built from a
configuration, and its tokens are the bytes of a text.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ckptd

TEXT = "the daemon saves the state of the training without stopping it. " * 20
PROMPT = "the daemon "


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def tokens(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()))


def train() -> None:
    model, data = build(), tokens(TEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    agent = ckptd.Agent("gpt2")
    recovered = agent.recover({"model": model, "optim": optimizer})
    step = recovered.step if recovered else -1
    while True:
        step += 1
        at = torch.randint(len(data) - 32, (16,))
        batch = torch.stack([data[start : start + 32] for start in at.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        agent.snapshot({"model": model, "optim": optimizer}, step=step)


def generate(model: Any) -> str:
    model.eval()
    prompt = tokens(PROMPT)[None]
    found = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    return bytes(found[0].tolist()).decode(errors="replace")


def follow(versions: int) -> None:
    model = build()
    for number, version in enumerate(ckptd.follow("gpt2", into=model, timeout=120.0), 1):
        text = generate(model)
        assert text == generate(model), "the weights stay those of one version"
        print(f"step {version.step}: {text!r}", flush=True)
        if number == versions:
            return
    sys.exit("the training has ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", choices=("train",))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=5)
    given = parser.parse_args()
    root = given.root.absolute()
    os.environ["CKPTD_ROOT"] = str(root)
    if given.role:
        train()
        return
    trainer = subprocess.Popen([sys.executable, __file__, "train", "--root", str(root)])
    try:
        follow(given.versions)
    finally:
        trainer.kill()
        trainer.wait()


if __name__ == "__main__":
    main()
