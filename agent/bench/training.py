"""Trains a model whose state is saved: fp32 weights and both moments of AdamW, which
change at every step, as in a real training.
"""

from __future__ import annotations

import torch

WIDTH, BATCH = 1024, 256
_BYTES = 12 * (WIDTH * WIDTH + WIDTH)
"""The bytes of one layer: its weights and two moments."""


class TrainedModel:
    """A model of linear layers, trained by AdamW to give its input back.

    `tensors` are its weights and moments, live, by name.
    """

    def __init__(self, nbytes: int) -> None:
        """nbytes: about as much state, one layer at least.

        The model is on the accelerator, if there is one.
        """
        torch.manual_seed(0)
        device = (
            torch.accelerator.current_accelerator()
            if torch.accelerator.is_available()
            else torch.device("cpu")
        )
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(nbytes / _BYTES)))]
        self._model = torch.nn.Sequential(*layers).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._data = torch.randn(BATCH, WIDTH, dtype=torch.float32, device=device)
        self.step()  # makes the moments
        moments = self._optimizer.state
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters():
            self.tensors[f"weights.{name}"] = parameter.detach()
            self.tensors |= {
                f"{kind}.{name}": moments[parameter][kind] for kind in ("exp_avg", "exp_avg_sq")
            }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def step(self) -> None:
        self._optimizer.zero_grad()
        torch.nn.functional.mse_loss(self._model(self._data), self._data).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def synchronized_step(self) -> None:
        """Take a step, and wait until an accelerator has done it."""
        self.step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
