"""Trains a small GPT-2 of Hugging Face, saves it with ckptd, and gives it to other
tools, which read it without ckptd.

`python examples/export.py [DIRECTORY]`. It needs `pip install transformers
safetensors`, and downloads nothing.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ckptd import Agent
from ckptd.agent.convert import export


def main(directory: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=64,
            vocab_size=256,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randint(0, 256, (4, 32))
    for _ in range(3):
        model(data, labels=data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    agent = Agent("gpt2", root=directory / "root")
    agent.snapshot(
        {"model": model, "optim": optimizer},
        step=3,
        user_content={"config.json": model.config.to_json_string()},
    )
    agent.close()  # the checkpoint is durable now
    model.eval()
    expected = model(data).logits

    job = directory / "root" / "gpt2"
    written = export(job, "hf", directory / "hf")
    print(
        f"Hugging Face: {', '.join(written.files)}; "
        f"{', '.join(f'{name} is {first}' for name, first in written.tied.items())}"
    )
    again = AutoModelForCausalLM.from_pretrained(directory / "hf").eval()
    assert torch.equal(again(data).logits, expected)

    export(job, "safetensors", directory / "model.safetensors", only="model", dtype=torch.bfloat16)
    halves = load_file(directory / "model.safetensors")
    assert torch.equal(halves["transformer.wte.weight"], model.transformer.wte.weight.bfloat16())

    export(job, "torch", directory / "model.pt", only="model")
    model.load_state_dict(torch.load(directory / "model.pt", weights_only=True))
    assert torch.equal(model(data).logits, expected)

    export(job, "dcp", directory / "dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp_to_torch_save(directory / "dcp", directory / "all.pt")
    moments = torch.load(directory / "all.pt", weights_only=True)["optim"]["state"][
        "transformer.wte.weight"
    ]
    assert moments["step"] == 3
    print(
        "transformers, safetensors, torch.load and torch.distributed.checkpoint read the same "
        "model."
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
