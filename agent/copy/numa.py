"""On which NUMA node this rank's slots should be: its accelerator's, else the one that its CPUs are on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ckptd.shared.numa import SYSTEM, UNKNOWN, node_of, nodes

DEVICES = Path("/sys/bus/pci/devices")


def home_node(system: Path = SYSTEM, devices: Path = DEVICES) -> int:
    """UNKNOWN where there is one node, or no telling."""
    if len(nodes(system)) < 2:
        return UNKNOWN
    found = _accelerator_node(devices)
    return found if found != UNKNOWN else node_of(os.sched_getaffinity(0), system)


def _accelerator_node(devices: Path) -> int:
    """By the PCI address of the current device."""
    if not torch.cuda.is_available():
        return UNKNOWN
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return int((devices / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):  # a torch before 2.8 does not tell
        return UNKNOWN
