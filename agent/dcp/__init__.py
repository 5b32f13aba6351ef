"""Connects ckptd to torch.distributed.checkpoint (DCP): `StorageWriter`,
`StorageReader`, and the caller's planners.
"""
