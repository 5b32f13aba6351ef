"""Converts checkpoints to and from the formats of other tools, and loads models from
any of them.
"""

from ckptd.agent.convert.adoption import Adopted, adopt
from ckptd.agent.convert.export import Exported, export
from ckptd.agent.convert.formats import FORMATS
from ckptd.agent.convert.importing import Imported, import_checkpoint
from ckptd.agent.convert.load_model import LoadedModel, load_model

__all__ = [
    "FORMATS",
    "Adopted",
    "Exported",
    "Imported",
    "LoadedModel",
    "adopt",
    "export",
    "import_checkpoint",
    "load_model",
]
