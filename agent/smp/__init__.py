"""Saves and resumes with the calls of the SageMaker model parallel library.

`save_checkpoint` and `resume_from_checkpoint` take a model and an optimizer, `save` and
`load` any object. `close` ends the agents that they use. Partial checkpoints are those
of ckptd, and full ones are files of torch.save with whole tensors. The signatures are
those of
https://sagemaker.readthedocs.io/en/stable/api/training/smp_versions/latest/smd_model_parallel_pytorch.html.
"""

from ckptd.agent.smp.checkpoints import resume_from_checkpoint, save_checkpoint
from ckptd.agent.smp.objects import load, save
from ckptd.agent.smp.runs import close

__all__ = ["close", "load", "resume_from_checkpoint", "save", "save_checkpoint"]
