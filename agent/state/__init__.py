"""A training state as named tensors and plain values: how it is captured, named, encoded and merged over ranks."""
