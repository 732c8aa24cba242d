"""Stands where a Triton kernel does: compiles each launch for a GPU that is not there, and executes the PTX on CPU tensors.

    with emulated(90) as launches:
        interdomain_scan(..., backend="chunkwise")

What is compiled is what the launch code asks for (`triton_budget.Recorder`). `launches` is a list of reports.
"""

import contextlib

import torch

from interdomain.features import support
from interdomain.features import triton_launch as features_launch
from interdomain.features import triton_step as features_step
from interdomain.scan import ops, triton_launch, triton_plan, triton_step
from interdomain.scan.alternatives import sequential

from ..scan import triton_budget
from .emulator import execute
from .parse import parse
from .traffic import Traffic

KERNELS = {
    triton_launch: "contract_kernel mix_kernel expand_kernel adjoint_kernel tables_kernel sum_kernel chain_kernel",
    sequential: "contract_scan_kernel expand_scan_kernel reverse_scan_kernel",
    triton_step: "contract_step_kernel expand_step_kernel",
    features_launch: "forward_kernel backward_kernel",
    features_step: "step_kernel",
}


class Emulated(triton_budget.Recorder):
    """kernel[grid](*args, **constants) as Triton has it."""

    compiled: dict = {}  # noqa: RUF012 (of all kernels)

    def __init__(self, kernel, capability, reports, traffic):
        super().__init__(kernel, [])
        self.capability, self.reports, self.traffic = capability, reports, traffic

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launch(grid[0], args, constants)

    def launch(self, grid, args, constants):
        self.record(*args, **constants)
        launch = self.launches.pop()
        key = repr((launch, self.capability))
        if key not in self.compiled:
            self.compiled[key] = self.compile(launch)
        code, shared = self.compiled[key]
        values = dict(zip(self.kernel.arg_names, args, strict=False))
        passed = [values[n] for n in launch[1]]  # what is no constant, in order
        traffic = Traffic() if self.traffic else None
        report = execute(code, passed, grid, shared, traffic)
        self.reports.append(report | {"constants": launch[3], "traffic": traffic})

    def compile(self, launch):
        compiled = triton_budget.compile_launch(launch, self.capability)
        return parse(compiled.asm["ptx"]), compiled.metadata.shared


@contextlib.contextmanager
def emulated(capability, traffic=False):
    """The Triton kernels run on CPU tensors, as compiled for this GPU (80, 89, 90); memory that torch.empty gives is NaN."""
    reports, undo = [], contextlib.ExitStack()

    def patch(owner, name, value):
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def poisoned(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.detach().fill_(float("nan")) if x.is_floating_point() else x

        return made

    with undo:
        for module, names in KERNELS.items():
            for name in names.split():
                patch(module, name, Emulated(getattr(module, name), capability, reports, traffic))
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch(owner, name, poisoned(getattr(owner, name)))
        patch(triton_plan, "capability", lambda device: divmod(capability, 10))
        patch(support, "unsupported", lambda *args: None)
        undo.callback(ops.IMPLEMENTATIONS.pop, "parallel", None)
        undo.callback(ops.IMPLEMENTATIONS.update, {"chunkwise": ops.IMPLEMENTATIONS["chunkwise"]})
        for backend in ("chunkwise", "parallel"):
            ops.IMPLEMENTATIONS[backend] = ops.TRITON[backend]
        yield reports
