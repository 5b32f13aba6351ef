"""Fine-tunes a GPT-2 with LoRA: loads the base from a Hugging Face model, and saves
checkpoints that store only what has changed.

`python examples/fine_tune.py [DIRECTORY]`. It needs `pip install transformers
safetensors`, and downloads nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from ckptd import Agent, Checkpoint
from ckptd.agent.convert import load_model

CONFIG = GPT2Config(
    n_layer=4,
    n_head=4,
    n_embd=256,
    vocab_size=50257,
    n_positions=64,
    bos_token_id=0,
    eos_token_id=0,
)


class LoRA(nn.Module):
    """A frozen layer and the two small matrices that are trained beside it."""

    def __init__(self, base: Conv1D, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.nx, rank, bias=False, device="cpu")
        self.up = nn.Linear(rank, base.nf, bias=False, device="cpu")
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


def main(directory: Path) -> None:
    torch.manual_seed(0)
    # Stands for a model that you have downloaded.
    GPT2LMHeadModel(CONFIG).save_pretrained(directory / "base")

    with torch.device("meta"):  # without memory: it comes with the values
        model = AutoModelForCausalLM.from_config(CONFIG)
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
    loaded = load_model(
        model, directory / "base", rename=[(r"(attn\.c_attn)\.", r"\1.base.")], strict=False
    )
    print(
        f"new in the model: {', '.join(loaded.missing[:2])} and {len(loaded.missing) - 2} more; "
        f"unexpected: {len(loaded.unexpected)}"
    )
    assert all(".up." in name or ".down." in name for name in loaded.missing)

    # The parameters have memory from here on.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    agent = Agent("lora", root=directory / "root")
    state = {"model": model, "optim": optimizer}
    agent.recover(state)
    data = torch.randint(0, 50257, (4, 32))
    for step in range(1, 4):
        model(data, labels=data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        agent.snapshot(state, step=step).wait("durable")
    agent.close()

    with Checkpoint.open(directory / "root" / "lora") as checkpoint:
        entries = checkpoint.manifest.parts
        written = sum(part.bytes - part.linked_bytes for part in entries)
        print(
            f"step {checkpoint.step}: {sum(part.bytes for part in entries):,d} bytes, "
            f"{written:,d} of them written for this step"
        )
        assert written < sum(part.bytes for part in entries) / 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
