"""GPUs and links that a plan's estimate is for: datasheets, and the machine here."""

from typing import NamedTuple

import torch


class Device(NamedTuple):
    """Datasheet of a GPU: bf16 FLOP/s without sparsity; memory in bytes, and bytes/s; NVLink's bytes/s in one direction; GPUs
    of a node."""

    flops: float
    memory: float
    bandwidth: float
    nvlink: float
    per_node: int


# The first whose name is a part of the GPU's own: "NVIDIA GH200 480GB" is no H200.
DEVICES = {
    "GH200": Device(989e12, 96e9, 4.0e12, 450e9, 4),
    "H200": Device(989e12, 141e9, 4.8e12, 450e9, 8),
    "H100": Device(989e12, 80e9, 3.35e12, 450e9, 8),
    "A100": Device(312e12, 80e9, 2.04e12, 300e9, 8),
}
NETWORK = 400.0  # Gb/s between nodes, of each GPU
ROOM = 0.8  # of a device's memory that the memory estimate may fill; the rest is the allocator's, NCCL's and CUDA's


class Machines(NamedTuple):
    """GPUs of one kind. name: in DEVICES; per_node: GPUs of a node; network: Gb/s of each GPU between nodes."""

    name: str
    per_node: int
    network: float = NETWORK

    @property
    def device(self) -> Device:
        return DEVICES[self.name]

    def fits(self, memory: dict[str, int]) -> bool:
        return sum(memory.values()) <= ROOM * self.device.memory


def device_here() -> str:
    """This machine's GPU as DEVICES calls it, else by its own name."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return next((known for known in DEVICES if known in name), name)


def machines(device: str | None = None, per_node: int | None = None, network: float = NETWORK) -> Machines:
    """By default GPUs like this machine's; H100 where it has none of the table."""
    name = device or (here if (here := device_here()) in DEVICES else "H100")
    return Machines(name, per_node or DEVICES[name].per_node, network)
