"""interdomain compile-kernels --cache kernels --capability 9.0

Compile the Triton kernels for a GPU on a machine that has none.

The kernels go into a folder that Triton reads where TRITON_CACHE_DIR names it. The cases of the kernel check and of the
benchmarks run as they do on the GPU, with two differences: Triton is told that a GPU of the given capability is there, and a
launch compiles its kernel and does nothing else. So the list of kernels follows from the cases. The check's cases are small
and have real tensors; the benchmarks' are fake: they have shapes and no numbers.

    interdomain compile-kernels --cache kernels --groups step

Documentation: docs/benchmarks.md
"""

import argparse
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
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
from interdomain.tools._bench import cases, results
from interdomain.tools._bench.timing import run_once
from interdomain.tools._cli import argument_parser, path_argument, user_errors

CPU = torch.device("cpu")
OUR_MIXERS = (*bench_kernels.CHUNKWISE, "features", "linear", "layer")
TRAINED = {
    "125M": (8, 4096),
    "350M": (8, 4096),
}  # (batch, tokens) of the training steps in benchmarks/gpu.sh
Problem = tuple[str, Callable[[], Any]]  # its name, and a function that launches its kernels


class CompileOnlyDriver:
    """Answers what Triton asks of a GPU before it compiles."""

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
    """Runs this package's ops on fake tensors. PyTorch would only ask them for the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, Callable] = {}
        for value in (*vars(scan_ops).values(), *vars(features_ops).values()):
            if isinstance(value, CustomOpDef):
                self.functions[value._qualname] = value._init_fn

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # A number that is read from a tensor, such as a seed: fake tensors hold none, and no kernel depends on it.
        if op is torch.ops.aten._local_scalar_dense.default:
            return 0
        function: Any = self.functions.get(op._schema.name, op)
        return function(*args, **kwargs or {})


def pretend_gpu(capability: tuple[int, int]) -> None:
    """Make this process compile for a GPU of this capability whatever it would launch, for tensors on the CPU."""
    from triton.runtime import driver, jit

    driver.set_active(CompileOnlyDriver(capability))  # pyright: ignore[reportArgumentType]
    launch = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, warmup=True, **options)

    jit.JITFunction.run = compile_only
    # Kernels differ by whether an address is a multiple of 16 bytes, which every tensor's is on a GPU.
    FakeTensor.data_ptr = lambda self: 0
    nn.Module._apply = replace_tensors  # pyright: ignore[reportAttributeAccessIssue]
    scan_ops.KERNEL_DEVICES = ("cuda", "cpu")
    features_support.unsupported = lambda *args: None
    triton_plan.capability = lambda device: capability


def replace_tensors(
    self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Convert a module by new parameters. PyTorch's own `_apply` exchanges the tensors inside, which fake ones do not allow."""
    for child in self.children():
        child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            self._parameters[name] = nn.Parameter(fn(parameter.detach()), parameter.requires_grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def check_problems(groups: list[str] | None) -> Iterator[Problem]:
    available = cases.groups(cuda=True)
    for name in groups or available:
        for case in available[name]:
            if case.mode == "graph":  # captures the kernels of the step in place
                case = replace(case, mode="in place")
            yield f"check, {case}", functools.partial(run_check_case, case)


def run_check_case(case: cases.Case) -> None:
    inputs, cotangents, function = check_kernels.PROBLEMS[case.kind](case, CPU, 0)
    check_kernels.with_gradients(function, False, inputs, cotangents)


def benchmark_problems() -> Iterator[Problem]:
    for mixer in OUR_MIXERS:
        for text in bench_kernels.SHAPES:
            shape = bench_kernels.parse_shape(text)
            yield (
                f"kernels, {mixer}, {shape}",
                functools.partial(run_kernel_benchmark, mixer, shape),
            )
    for size, (batch, length) in TRAINED.items():
        yield (
            f"training, {size}, {batch} x {length}",
            functools.partial(run_training_step, size, batch, length),
        )
    for size in bench_inference.QUICK.sizes:
        yield f"decode, {size}", functools.partial(run_decode_steps, size)


def run_kernel_benchmark(mixer: str, shape: cases.Shape) -> None:
    run_once(bench_kernels.candidate(mixer, shape, CPU))


def run_training_step(size: str, batch: int, length: int) -> None:
    """Run a forward and backward pass in bf16, as FSDP2's mixed precision computes them."""
    model = bench_inference.random_model(build_config(size, "interdomain"), CPU, "bfloat16")
    model.requires_grad_(True).train()
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    model(tokens).float().sum().backward()


@torch.no_grad()
def run_decode_steps(size: str) -> None:
    model = bench_inference.random_model(build_config(size, "interdomain"), CPU, "bfloat16")
    for batch in bench_inference.QUICK.batches:
        decoder = Decoder(model, model.init_state(batch), graph=False)
        decoder.step(torch.zeros(batch, dtype=torch.int64))


def parse(argv: list[str] | None) -> argparse.Namespace:
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
        metavar="NAME",
        help=f"only the check's groups with these names: {names} (default: all of the check and the benchmarks)",
    )
    return p.parse_args(argv)


@user_errors
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not re.fullmatch(r"\d+\.\d", args.capability):
        raise ValueError(f"--capability must be X.Y, such as 9.0: got {args.capability}.")
    if args.groups:
        results.choose("--groups", args.groups, cases.groups(True))
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "Triton is not installed: install the version that the machine with the GPU has."
        )
    os.environ["TRITON_CACHE_DIR"] = str(args.cache.resolve())
    major, minor = args.capability.split(".")
    pretend_gpu((int(major), int(minor)))
    counts = results.count_compilations()
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def report(name: str) -> None:
        print(
            f"{name}: {counts.compiled} compiled, {counts.read} read so far",
            file=sys.stderr,
            flush=True,
        )

    for name, run in check_problems(args.groups):
        run()
        report(name)
    for name, run in () if args.groups else benchmark_problems():
        with fake, RunOpsOnFakeTensors():
            run()
        report(name)
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
