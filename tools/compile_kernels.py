"""interdomain compile-kernels --cache kernels --capability 9.0

Compile the Triton kernels for a GPU on a machine that has none.

The kernels go into a folder that Triton reads where TRITON_CACHE_DIR names it. The cases of the
kernel check and of the benchmarks run as they do on the GPU, with two differences: Triton is told
that a GPU of the given capability is there, and a launch compiles its kernel and does nothing else.
So the list of kernels follows from the cases. The check's cases are small and have real tensors;
the benchmarks' are fake: they have shapes and no numbers.

    interdomain compile-kernels --cache kernels --groups step

Documentation: docs/measurements.md
"""

import argparse
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from interdomain.features import ops as features_ops
from interdomain.features import support as features_support
from interdomain.model import build_config
from interdomain.model.generation import Decoder
from interdomain.scan import ops as scan_ops
from interdomain.scan import triton_plan
from interdomain.tools import bench_inference, bench_kernels, check_kernels
from interdomain.tools._bench import cases
from interdomain.tools._bench.processes import count_compilations
from interdomain.tools._bench.timing import run_once
from interdomain.tools._cli import argument_parser, path_argument, user_errors

CPU = torch.device("cpu")
MIXERS = (*bench_kernels.OURS, "layer")
# Batch and tokens of the training steps in benchmarks/gpu.sh, by model size.
TRAINED = {"125M": (8, 4096), "350M": (8, 4096)}


class CompileOnlyDriver:
    """Answers what Triton asks of a GPU before it compiles.

    Args:
        capability: The compute capability, such as (9, 0).
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = capability
        self.target = GPUTarget("cuda", 10 * major + minor, warp_size=32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class RunOpsOnFakeTensors(TorchDispatchMode):
    """Runs this package's ops on fake tensors.

    PyTorch would only ask them for the shapes of their results.
    """

    def __init__(self) -> None:
        super().__init__()
        # The implementation of each op of the package, by the op's name.
        self.functions: dict[str, Callable] = {}
        for value in (*vars(scan_ops).values(), *vars(features_ops).values()):
            if isinstance(value, CustomOpDef):
                self.functions[value._qualname] = value._init_fn

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Runs an op. PyTorch calls this for every op on a tensor.

        Args:
            op: The op.
            types: The tensor classes among the arguments; unused.
            args: The op's arguments.
            kwargs: The op's keyword arguments.
        """
        # Fake tensors hold no number that could be read, such as a seed, and no kernel depends on
        # it.
        if op is torch.ops.aten._local_scalar_dense.default:
            return 0
        function: Any = self.functions.get(op._schema.name, op)
        return function(*args, **kwargs or {})


def pretend_gpu(capability: tuple[int, int]) -> None:
    """Makes this process compile for a GPU whatever it would launch, for tensors on the CPU.

    Args:
        capability: The compute capability of the GPU.
    """
    from triton.runtime import driver, jit

    driver.set_active(CompileOnlyDriver(capability))  # pyright: ignore[reportArgumentType]

    # Triton's own warm-up compiles a kernel and does not launch it.
    launch = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, warmup=True, **options)

    jit.JITFunction.run = compile_only
    # Kernels differ by whether an address is a multiple of 16 bytes. On a GPU that of every tensor
    # is.
    FakeTensor.data_ptr = lambda self: 0
    nn.Module._apply = replace_tensors  # pyright: ignore[reportAttributeAccessIssue]
    # The package takes the CPU for this GPU.
    scan_ops.KERNEL_DEVICES = ("cuda", "cpu")
    features_support.unsupported = lambda *args: None
    triton_plan.capability = lambda device: capability


def replace_tensors(
    self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Applies a function to all tensors of a module and its children, as new parameters.

    It takes the place of `nn.Module._apply` here, which `.to()` and `.cuda()` call. PyTorch's own
    assigns to the data of the parameters, which fake tensors do not allow.

    Args:
        self: The module.
        fn: Converts a tensor.
        recurse: Ignored: children are always visited.
    """
    for child in self.children():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            self._parameters[name] = nn.Parameter(fn(parameter.detach()), parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def compile_case(case: cases.Case) -> None:
    """Launches the kernels of a case of the check, on real tensors.

    Args:
        case: The case.
    """
    if case.mode == "graph":
        # A graph captures the kernels of the step in place.
        case = replace(case, mode="in place")
    problem = check_kernels.PROBLEMS[case.kind](case, CPU, 0)
    check_kernels.with_gradients(problem.tested, problem.inputs, problem.cotangents)


def benchmark_problems() -> dict[str, Callable[[], None]]:
    """Returns functions that launch the kernels of the benchmarks, by name."""
    problems: dict[str, Callable[[], None]] = {}
    for mixer in MIXERS:
        for text in bench_kernels.SHAPES:
            shape = bench_kernels.parse_shape(text)
            problems[f"kernels, {mixer}, {shape}"] = functools.partial(mixer_step, mixer, shape)
    for size, (batch, length) in TRAINED.items():
        name = f"training, {size}, {batch} x {length}"
        problems[name] = functools.partial(training_step, size, batch, length)
    for size in bench_inference.QUICK.sizes:
        problems[f"decode, {size}"] = functools.partial(decode_steps, size)
    return problems


def mixer_step(mixer: str, shape: cases.Shape) -> None:
    """Runs a call of bench-kernels.

    Args:
        mixer: One of its mixers.
        shape: The shape of q, k and v.
    """
    run_once(bench_kernels.candidate(mixer, shape, CPU))


def training_step(size: str, batch: int, length: int) -> None:
    """Runs forward and backward of a model in bf16, as FSDP2's mixed precision computes them.

    Args:
        size: The name of the model size.
        batch: The number of sequences.
        length: The number of tokens of each.
    """
    model = bench_inference.random_model(build_config(size, "interdomain"), CPU, "bfloat16")
    model.requires_grad_(True).train()
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    model(tokens).float().sum().backward()


@torch.no_grad()
def decode_steps(size: str) -> None:
    """Decodes a token at each batch size of `bench-inference --quick`.

    Args:
        size: The name of the model size.
    """
    model = bench_inference.random_model(build_config(size, "interdomain"), CPU, "bfloat16")
    for batch in bench_inference.QUICK.batches:
        decoder = Decoder(model, model.init_state(batch), graph=False)
        decoder.step(torch.zeros(batch, dtype=torch.int64))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__)
    p.add_argument(
        "--cache",
        required=True,
        type=path_argument,
        metavar="DIR",
        help="made if it is not there; what it has stays",
    )
    p.add_argument(
        "--capability",
        default="9.0",
        metavar="X.Y",
        help="9.0 (default) is that of an H100 and an H200",
    )
    names = ", ".join(cases.groups(True))
    p.add_argument(
        "--groups",
        nargs="+",
        choices=cases.groups(True),
        metavar="NAME",
        help=f"only the check's groups with these names: {names} (default: all of the check, and "
        "the benchmarks)",
    )
    return p.parse_args(argv)


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    if not re.fullmatch(r"\d+\.\d", args.capability):
        raise ValueError(f"--capability must be X.Y, such as 9.0: got {args.capability}.")
    available = cases.groups(True)
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "Triton is not installed: install the version that the machine with the GPU has."
        )

    # From here on Triton compiles for the GPU, into the cache.
    os.environ["TRITON_CACHE_DIR"] = str(args.cache.resolve())
    major, minor = args.capability.split(".")
    pretend_gpu((int(major), int(minor)))
    counts = count_compilations()

    def report(name: str) -> None:
        line = f"{name}: {counts.compiled} compiled, {counts.read} read so far"
        print(line, file=sys.stderr, flush=True)

    # The cases of the check have real tensors.
    for group in args.groups or available:
        for case in available[group]:
            compile_case(case)
            report(f"check, {case}")
    # The benchmarks are too large for this machine: their tensors are fake.
    if not args.groups:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        for name, run in benchmark_problems().items():
            with fake, RunOpsOnFakeTensors():
                run()
            report(name)
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
