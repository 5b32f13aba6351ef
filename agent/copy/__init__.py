"""Slots in this process: mapped, populated, and filled by batched copies from CPU and accelerators."""
