"""StorageWriter, StorageReader and planners of torch.distributed.checkpoint."""
