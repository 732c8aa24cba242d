"""Registers, spills and shared memory of the Triton kernels, by compilation alone: needs no GPU.

`python -m tests.scan.triton_budget 90 bf16 64x64x64` prints one line per kernel of `chunkwise` (R x D x M). Before the sizes,
`step/` names the step, `features/` and `features_step/` the input features of heads of R. After them come, joined by `+`,
`:training` (no state in or out), `:shards` (short sequences on several ranks), `:ragged` (a short last chunk), `:G2`; of
the features `:k` (which projection), `:past` and `:documents`. `sweeps` takes the launches that make states
alone, `most` of each kernel the launch that does most. More may follow, `80 fp32 ...` for another GPU and dtype. The linear
scan and packed documents are compiled by tests/ptx only. Launches are recorded, not described a second time: what is compiled
is what runs. TRITON_INTERPRET must not be 1.
"""

import contextlib
import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource

from interdomain.features import support
from interdomain.features import triton_launch as features_launch
from interdomain.features import triton_step as features_step
from interdomain.scan import triton_chunkwise, triton_launch, triton_plan, triton_step

from ..features import common as features
from ..features.test_step import Layer
from ..features.test_step import make as make_step
from .common import Case, op_inputs, part_of_time
from .devices import nothing_unsupported

# Bytes of shared memory of a program of `chunkwise`. sm_90 has 227 KB for two programs; sm_89 99 KB, which sm_80 has, too.
SHARED = {90: 113 * 1024, 89: 99 * 1024, 80: 99 * 1024}
REGISTERS = 255  # of a thread, at 128 threads and two programs per multiprocessor
# Bytes per thread: a few loads per chunk of 800 instructions. fp32 is there to check with; 3xTF32 holds operands twice.
SPILL = {"bf16": 256, "fp32": 512}
# Of the other kernels: spilled bytes, shared memory. `features` has 1 KB before the loop, and spills 136 bytes, in Triton 3.6.
OTHERS = {"step": (64, 48 * 1024), "features": (144, 2048), "features_step": (0, 2048)}

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


class Launch(NamedTuple):
    """What determines the code of a launch, as Triton's specialization sees it."""

    kernel: Any
    signature: dict  # types by name of the arguments that are no constants
    divisible: list  # those that are multiples of 16
    constants: dict
    options: dict


def described(kernel, args, keywords) -> Launch:
    """Returns the launch kernel[grid](*args, **keywords)."""
    signature = {}
    divisible = []
    options = {"num_stages": 3, "maxnreg": None, "enable_fp_fusion": True}
    constants = {}
    for name, value in keywords.items():
        (options if name in OPTIONS else constants)[name] = value
    for parameter, value in zip(kernel.params, args, strict=False):
        name = parameter.name
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            value = value.data_ptr()
        elif parameter.do_not_specialize:
            signature[name] = "i32"
            continue
        elif value is None or value == 1:
            constants[name] = value
            continue
        else:
            signature[name] = "i32"
        if value % 16 == 0:
            divisible.append(name)
    return Launch(kernel, signature, divisible, constants, options)


class StandIn:
    """Stands where a kernel does: a launch calls receive(kernel, programs, args, keywords)."""

    def __init__(self, kernel, receive):
        self.kernel = kernel
        self.receive = receive

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid[0])

    def launch(self, programs, *args, **keywords):
        self.receive(self.kernel, programs, args, keywords)


@contextlib.contextmanager
def stand_ins(module, receive):
    """Replaces the kernels of a module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in vars(module).copy().items():
            if name.endswith("_kernel"):
                patch.setattr(module, name, StandIn(kernel, receive))
        yield


def recorded(module, run):
    """Returns the launches of this module's kernels by `run()`, without those that would compile to the same."""
    launches = []

    def receive(kernel, programs, args, keywords):
        launch = described(kernel, args, keywords)
        if launch not in launches:
            launches.append(launch)

    with stand_ins(module, receive), torch.no_grad():
        run()
    return launches


def scan_launches(dtype, R, D, M, kinds):
    """Runs one forward and backward: of two segments with a state in and out, or of one in training or on several ranks."""
    G = 2 if "G2" in kinds else 1
    T = 64 if kinds & {"shards", "training"} else 1024
    if "ragged" in kinds:
        T -= 4
    case = Case(T=T, B=2, G=G, R=R, D=D, M=M, state="training" not in kinds)
    inputs, (d_o, d_state) = op_inputs(case, torch.float32, dtype)
    state = inputs.pop("initial_state", None)
    inputs = *inputs.values(), state
    if "shards" not in kinds:
        triton_chunkwise.scan_forward(*inputs, need_final=state is not None)
        triton_chunkwise.scan_backward(d_o, state, *inputs)
        return
    _, k, v, theta, _, _ = inputs
    wait = mock.Mock(return_value=d_state)
    triton_chunkwise.final_state((k, v), theta, None)
    triton_chunkwise.scan_forward(*inputs, need_final=False)
    triton_chunkwise.scan_backward(d_o, None, *inputs, exchange=mock.Mock(return_value=wait))


def step_launches(dtype, R, D, M, kinds):
    """Runs the step with W as it is and by its upper half, for more sequences."""
    G = 2 if "G2" in kinds else 1
    for B, rows in ((2, 2 * M), (128, M)):
        case = Case(T=1, B=B, G=G, R=R, D=D, M=M)
        inputs, _ = op_inputs(case, torch.float32, dtype)
        *tokens, decay, table, state = part_of_time(inputs, 0).values()
        triton_step.scan_step(*tokens, decay, table[:, :rows].contiguous(), state)


def features_launches(dtype, R, D, M, kinds):
    """Runs one forward and backward of a projection of [B 2, T 64, H 16, R]."""
    (mix,) = features.MIXES.keys() & kinds
    settings = features.MIXES[mix] | {"past": "past" in kinds, "documents": "documents" in kinds}
    case = features.Case(T=64, H=16, R=R, **settings)
    with pytest.MonkeyPatch.context() as patch, torch.enable_grad():
        patch.setattr(support, "unsupported", nothing_unsupported)
        features.run(case, *features.make(case, dtype), backend="triton")


def features_step_launches(dtype, R, D, M, kinds):
    """Runs one token of a layer of the interdomain condition, for 8 sequences."""
    layer = Layer(heads=48, conv=32, rotated=32, silu=32, norm=32, R=R, B=8)
    x, options = make_step(layer, dtype)
    convolution = *options["conv"], options["past"]
    normalisation = *options["norm"], features.EPS
    features_step.step(x[:, 0], R, *convolution, *options["rope"], 32, 32, *normalisation)


FAMILIES = {
    "": (triton_launch, scan_launches),
    "step": (triton_step, step_launches),
    "features": (features_launch, features_launches),
    "features_step": (features_step, features_step_launches),
}


def launches_of(capability, dtype, argument):
    """Returns the launches that an argument of the command names."""
    family, _, rest = argument.rpartition("/")
    sizes, _, kinds = rest.partition(":")
    R, D, M = map(int, sizes.split("x"))
    kinds = set(kinds.split("+"))
    module, run = FAMILIES[family]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_plan, "capability", mock.Mock(return_value=divmod(capability, 10)))
        launches = recorded(module, functools.partial(run, dtype, R, D, M, kinds))
    if "sweeps" in kinds:
        launches = [launch for launch in launches if only_makes_states(launch)]
    if "most" in kinds:
        # The launch of each kernel that uses the most of its options; the first of several.
        most = {}
        for launch in sorted(launches, key=options_in_use, reverse=True):
            most.setdefault(launch.kernel, launch)
        launches = most.values()
    return launches


def only_makes_states(launch):
    outputs = [launch.constants.get(name, "") for name in ("p_o", "p_dv")]
    return None in outputs


def options_in_use(launch):
    values = list(launch.constants.values())
    return values.count(True) - values.count(None)


def compile_launch(launch, capability):
    names = launch.kernel.arg_names
    source = ASTSource(
        fn=launch.kernel,
        signature={name: launch.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=launch.options)


def assembler_log(ptx, capability):
    """Returns what ptxas says."""
    architecture = re.findall(r"\.target\s+(\w+)", ptx)[0]
    options = ["-v", "--regAllocOptLevel=2", "-arch", architecture]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(capability).path, *options, source, "-o", source.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def report(launch, compiled, capability):
    log = assembler_log(compiled.asm["ptx"], capability)
    # The kernel comes first; functions that it calls may follow.
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)[0]
    registers = re.findall(r"Used (\d+) registers", log)[0]
    # Transpositions of registers. Those of loaded tiles are views of shared memory and not counted.
    transposed = re.findall(r"tt\.trans [^\n]*order = array<i32: 1, 0>", compiled.asm["ttgir"])
    constants = {n: v for n, v in launch.constants.items() if not n.startswith("stride")}
    return {
        "kernel": launch.kernel.__name__,
        "capability": capability,
        "constants": constants,
        "registers": int(registers),
        "spill": max(map(int, spills)),
        "shared": compiled.metadata.shared,
        "transposed": len(transposed),
        # ptxas waits for every wgmma before the next one (C7515) where it cannot tell that registers are not touched.
        "serialized": re.findall(r"[^\n]*serialized[^\n]*", log),
    }


def exceeds(report) -> bool:
    """Returns True if a report with its dtype and shape is beyond the budget."""
    family = report["shape"].rpartition("/")[0]
    spill, shared = OTHERS.get(family, (SPILL[report["dtype"]], SHARED[report["capability"]]))
    too_many = (
        report["registers"] > REGISTERS or report["spill"] > spill or report["shared"] > shared
    )
    # On Hopper, transpositions of registers are what compilers get wrong. Elsewhere loaded tiles take that path, too.
    hopper = (report["capability"], report["dtype"], family) == (90, "bf16", "")
    transposed = hopper and report["transposed"] > 0
    return too_many or transposed or len(report["serialized"]) > 0


def reports(*arguments):
    """Yields a report for each launch that the arguments name, with its dtype and its argument (`shape`)."""
    capability = 0
    dtype = ""
    for argument in arguments:
        if argument.isdigit():
            capability = int(argument)
        elif argument in DTYPES:
            dtype = argument
        else:
            for launch in launches_of(capability, DTYPES[dtype], argument):
                compiled = compile_launch(launch, capability)
                yield {"dtype": dtype, "shape": argument, **report(launch, compiled, capability)}


def main() -> int:
    # `report` calls ptxas itself, for its log.
    CUDABackend.make_cubin = mock.Mock(return_value=b"")
    for one in reports(*sys.argv[1:]):
        print(json.dumps(one), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
