"""Has DCP, transformers, safetensors and torch write the same model, makes a checkpoint
of each, and starts a job from one of them.

`python examples/imports.py [DIRECTORY]`. It needs `pip install transformers
safetensors`, and downloads nothing.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from ckptd import Agent, Checkpoint
from ckptd.agent.convert import adopt, import_checkpoint


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
    state = model.state_dict()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp.save({"model": state, "epoch": 7}, checkpoint_id=directory / "dcp")
    model.save_pretrained(directory / "hf")
    save_file(
        {name: tensor.clone() for name, tensor in state.items()}, directory / "model.safetensors"
    )
    torch.save(
        {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}},
        directory / "model.pt",
    )

    import_checkpoint(directory / "dcp", directory / "from-dcp")
    import_checkpoint(directory / "hf", directory / "from-hf")
    import_checkpoint(
        directory / "model.safetensors", directory / "from-safetensors", under="model"
    )
    import_checkpoint(
        directory / "model.pt",
        directory / "from-torch",
        only="state_dict",
        under="model",
        rename=[(r"^module\.", "")],
    )

    for name in ("from-dcp", "from-hf", "from-safetensors", "from-torch"):
        with Checkpoint.open(directory / name) as checkpoint:
            found = checkpoint.load()["model"]
            assert all(torch.equal(tensor, state[key]) for key, tensor in found.items())
            # save_pretrained does not write the second name of a tied weight
            assert not state.keys() - found.keys() - {"lm_head.weight"}
            print(f"{name}: {len(found)} tensors, {checkpoint.verify():,d} bytes verified")

    adopt(directory / "hf", directory / "runs", "gpt")
    fresh = GPT2LMHeadModel(model.config)
    agent = Agent("gpt", root=directory / "runs")
    assert agent.recover({"model": fresh}, strict=False) is not None
    agent.close()
    assert all(torch.equal(tensor, state[key]) for key, tensor in fresh.state_dict().items())
    print(f"the job gpt begins with the model in {directory / 'hf'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
