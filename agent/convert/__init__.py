"""Converts checkpoints to the formats of other tools: the verb `ckptd export`, and the function behind it."""

from ckptd.agent.convert.export import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
