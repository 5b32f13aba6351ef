"""Converts checkpoints to and from the formats of other tools: the verbs `ckptd export` and `ckptd import`, and their functions."""

from ckptd.agent.convert.export import Exported, export
from ckptd.agent.convert.formats import FORMATS
from ckptd.agent.convert.importing import Imported, import_checkpoint

__all__ = ["FORMATS", "Exported", "Imported", "export", "import_checkpoint"]
