"""Maps slots into the trainer, faults in their pages, and copies tensors into them from
the CPU and from accelerators.
"""
