"""Changes inside PyTorch and TensorBoard, and the private names of PyTorch that we read.

Each entry gives its reason and says when it can go. TorchTitan's are in `titan/host/patches.py`,
Megatron's in `megatron/patches.py`. No other module assigns to a name of another project
(tests/test_repository.py).
"""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

# Private names that the kernels and the package read, each with the reason. A name can go when
# PyTorch has a public one.
PRIVATE_NAMES = {
    "torch._C._are_functorch_transforms_active": (
        "an op under torch.func.vmap or grad takes its slow path"
    ),
    "torch._C._functorch.is_gradtrackingtensor": (
        "torch.func's own tensors are told apart, to refuse a second derivative"
    ),
    "torch.utils._python_dispatch._get_current_dispatch_mode": (
        "an op under a dispatch mode must be seen by it"
    ),
    "torch._assert_async": "documents are checked on the device, without waiting for it",
    "torch.ops._c10d_functional": (
        "asynchronous collectives that torch.compile traces; the public ones wait at once"
    ),
    "torch.distributed.distributed_c10d._resolve_process_group": (
        "a process group by the name that an op takes"
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": (
        "the entries of an index, which are written as PyTorch has them"
    ),
    "torch.distributed.checkpoint.planner_helpers._create_chunk_list": (
        "the pieces of a DTensor that this rank has"
    ),
    "torch.compiler._is_exporting_flag": (
        "torch.compiler.is_exporting is also true under torch.compile in PyTorch 2.11"
    ),
    "torch._higher_order_ops.scan": (
        "a loop of any length in an exported graph; it has no public name up to 2.14"
    ),
    "torch._C._SetExcludeDispatchKeyGuard": (
        "autograd within an op of torch.library, which turns it off"
    ),
    "torch._C.DispatchKey": "as torch._C._SetExcludeDispatchKeyGuard",
    "torch._C._current_graph_task_id": (
        "a pass that activation checkpointing computes again is told apart"
    ),
    "torch.distributed.distributed_c10d._set_pg_timeout": (
        "time limits of groups; torch.distributed.set_timeout from 2.14"
    ),
    "torch.optim._muon._adjust_lr": (
        "the parts of torch.optim.Muon, whose step would exchange pieces in each product"
    ),
    "torch.optim._muon._zeropower_via_newtonschulz": "as torch.optim._muon._adjust_lr",
    "torch.distributed.pipelining._backward.stage_backward": (
        "a stage's backward pass with its gradients summed beside it"
    ),
    "torch._subclasses.fake_tensor.unset_fake_temporarily": (
        "TorchTitan's memory estimator calls where no mesh can be made"
    ),
}


def one_gloo_thread() -> None:
    """Gives each gloo process group that is made from now on a single worker thread.

    Groups that are made with options keep theirs.

    PyTorch gives it two, which both write the name of the last collective to the same string
    without a lock (`pgStatus_`). The longest name, that of an all-gather, is on the heap, so one
    thread may write to it after the other has freed it: about three in eighty short starts of four
    ranks on two busy cores ended in malloc.

    It can go with a PyTorch whose ProcessGroupGloo locks `pgStatus_`; 2.13.0 does not.
    """
    import torch.distributed as dist

    Gloo: Any = dist.ProcessGroupGloo
    original = Gloo.__init__

    def init(self: Any, *args: Any, timeout: Any = None, **others: Any) -> None:
        # A group that is made without options has a timeout.
        if timeout is not None:
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
            if interfaces:
                devices = [Gloo.create_device(interface=name) for name in interfaces.split(",")]
            else:
                devices = [Gloo.create_default_device()]
            options = Gloo._Options()
            options._threads = 1
            options._timeout = timeout
            options._devices = devices
            others["options"] = options
        original(self, *args, **others)

    Gloo.__init__ = init


@contextlib.contextmanager
def event_files_after(stamp: int) -> Iterator[None]:
    """Makes TensorBoard name event files by a time after `stamp` in this context.

    TensorBoard reads event files in the order of the times in their names. The clock of another
    node may be behind that of the last start, and two starts may fall into one second: such a file
    would come before those that it replaces.

    It can go with a TensorBoard whose EventFileWriter takes the file's name or time; 2.20 does not.

    Args:
        stamp: Unix time in seconds.
    """
    from tensorboard.summary.writer import event_file_writer

    writer: Any = event_file_writer
    clock = writer.time
    writer.time = SimpleNamespace(time=lambda: max(clock.time(), stamp + 1))
    try:
        yield
    finally:
        writer.time = clock
