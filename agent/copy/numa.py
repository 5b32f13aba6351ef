"""Finds the NUMA node on which this rank's slots should be: that of its accelerator,
else that of its CPUs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ckptd.shared.system.numa import SYSTEM, UNKNOWN, node_of, nodes

DEVICES = Path("/sys/bus/pci/devices")


def home_node(device: torch.device | None, system: Path = SYSTEM, devices: Path = DEVICES) -> int:
    """Return the NUMA node for this rank's slots, or UNKNOWN if the machine has only
    one node or the right one cannot be determined.

    device: the accelerator that the state is on, or None.
    """
    if len(nodes(system)) < 2:
        return UNKNOWN
    found = UNKNOWN if device is None else _accelerator_node(device, devices)
    return found if found != UNKNOWN else node_of(os.sched_getaffinity(0), system)


def _accelerator_node(device: torch.device, devices: Path) -> int:
    """Return the NUMA node of a CUDA device, found by its PCI address, or UNKNOWN."""
    if device.type != "cuda":
        return UNKNOWN
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = (
            properties.pci_domain_id,
            properties.pci_bus_id,
            properties.pci_device_id,
        )
        address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        return int((devices / address / "numa_node").read_text())
    except (
        AttributeError,
        OSError,
        ValueError,
    ):  # AttributeError: torch before 2.8 does not have the PCI address
        return UNKNOWN
