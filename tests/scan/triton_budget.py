"""Registers, spills and shared memory of the Triton kernels, by compilation alone: needs no GPU.

`python -m tests.scan.triton_budget 90 bf16 64x64x64` prints one line per kernel of `chunkwise` (R x D x M). Before the sizes,
`step/` names the step, `features/` and `features_step/` the input features of heads of R. After them, joined by `+`, `:linear`,
`:documents`, `:training` (no state in or out), `:shards` (likewise, of longer sequences on several ranks), `:ragged` (a short
last chunk), `:G2`, of the features `:k` (which projection); `sweeps` takes the launches that make states alone, `most` of each
kernel the launch that does most. More may follow, `80 fp32 ...` for another GPU and dtype. Launches are
recorded, not described a second time: what is compiled is what runs. TRITON_INTERPRET must not be 1.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource

from interdomain.features import triton_launch as features_launch
from interdomain.features import triton_step as features_step
from interdomain.scan import triton_chunkwise, triton_launch, triton_plan, triton_step

from ..features.common import EPS, MIXES, Case, documents, make

# Bytes of shared memory of a program of `chunkwise`. sm_90 has 227 KB for two programs; sm_89 99 KB, which sm_80 has, too.
SHARED = {90: 113 * 1024, 89: 99 * 1024, 80: 99 * 1024}
REGISTERS = 255  # of a thread, at 128 threads and two programs per multiprocessor
# Bytes per thread: a few loads per chunk of 800 instructions. fp32 is there to check with; 3xTF32 holds operands twice.
SPILL = {"bf16": 256, "fp32": 512}
# Of the other kernels: spilled bytes, shared memory. `features` has 1 KB before the loop, and spills 136 bytes, in Triton 3.6.
OTHERS = {"step": (64, 48 * 1024), "features": (144, 2048), "features_step": (0, 2048)}

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def described(
    kernel, *args, num_warps, num_stages=3, maxnreg=None, enable_fp_fusion=True, **constants
):
    """The arguments that determine the code of a launch, as Triton's specialization sees them."""
    signature, divisible = {}, []
    for parameter, value in zip(kernel.params, args, strict=False):
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            if value.data_ptr() % 16:
                continue
        elif parameter.do_not_specialize:
            signature[parameter.name] = "i32"
            continue
        elif value is None or value == 1:
            constants[parameter.name] = value
            continue
        else:
            signature[parameter.name] = "i32"
            if value % 16:
                continue
        divisible.append(parameter.name)
    options = dict(
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=maxnreg,
        enable_fp_fusion=enable_fp_fusion,
    )
    return kernel, signature, divisible, constants, options


class Recorder:
    """Stands where a kernel does and keeps the launches, without those that would compile to the same."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, **constants):
        launch = described(self.kernel, *args, **constants)
        if launch not in self.launches:
            self.launches.append(launch)


def recorded(module, run):
    """The launches of this module's kernels by `run()`."""
    launched, kernels = (
        [],
        {name: value for name, value in vars(module).items() if name.endswith("_kernel")},
    )
    for name, kernel in kernels.items():
        setattr(module, name, Recorder(kernel, launched))
    run()
    for name, kernel in kernels.items():
        setattr(module, name, kernel)
    return launched


def scan_launches(dtype, R, D, M, kinds, G):
    """One forward and backward; two segments and a state in and out, unless for training."""
    B, H, module, shards = 2, 2, triton_chunkwise, "shards" in kinds
    T = (64 if shards or "training" in kinds else 1024) - 4 * ("ragged" in kinds)
    kw = {"documents": torch.zeros(B, T, dtype=torch.int32)} if "documents" in kinds else {}
    state = None if "training" in kinds else torch.zeros(B, H, M, R + D, 2)
    d_final, exchange = (None, lambda local: lambda: state) if shards else (state, None)
    theta, forward = torch.zeros(H, M, 2), {"need_final": d_final is not None, **kw}
    if "linear" in kinds:
        z = torch.zeros(B, T, H, R + D, dtype=dtype)
        if shards:
            module.final_state((z,), theta, kw.get("documents"))
        module.linear_forward(z, theta, torch.zeros(H, 2 * M), state, **forward)
        module.linear_backward(
            z, d_final, z, theta, torch.zeros(H, 2 * M), state, exchange=exchange, **kw
        )
    else:
        q, k, v = (torch.zeros(B, T, H * g, d, dtype=dtype) for g, d in ((G, R), (1, R), (1, D)))
        inputs = (q, k, v, theta, torch.zeros(H, 2 * M, 2 * M), state)
        if shards:
            module.final_state((k, v), theta, kw.get("documents"))
        module.scan_forward(*inputs, **forward)
        module.scan_backward(
            torch.zeros(B, T, H * G, D, dtype=dtype), d_final, *inputs, exchange=exchange, **kw
        )


def step_launches(dtype, R, D, M, kinds, G):
    """With W as it is and by its upper half, for more sequences; or the linear readout."""
    decay = torch.zeros(2, M, 2)
    for B, rows in ((2, 2 * M), (128, M)):
        state = torch.zeros(B, 2, M, R + D, 2)
        if "linear" in kinds:
            triton_step.linear_one_step(
                torch.zeros(B, 2, R + D, dtype=dtype), decay, torch.zeros(2, 2 * M), state
            )
        else:
            q, k, v = (torch.zeros(B, 2 * g, d, dtype=dtype) for g, d in ((G, R), (1, R), (1, D)))
            triton_step.scan_step(q, k, v, decay, torch.zeros(2, rows, 2 * M), state)


def features_launches(dtype, R, kinds):
    """One forward and backward of a projection of [B 2, T 64, H 16, R]."""
    mix, more = (
        next(x for x in kinds if x in MIXES),
        {x: True for x in ("past", "documents") if x in kinds},
    )
    case = Case(T=64, H=16, R=R, **MIXES[mix], **more)
    leaves, rope, dy = make(case, dtype)
    x, weight, bias, past, scale, shift = (
        leaves.get(n) for n in ("x", "weight", "bias", "past", "scale", "shift")
    )
    weight = weight if weight is None else weight.flatten(1)
    args = x, R, weight, bias, past, documents(case), *(rope or (None, None)), case.silu, scale
    features_launch.forward(*args, shift, EPS)
    features_launch.backward(dy, *args, EPS, past is not None)


def features_step_launches(dtype, R, B=8):
    """One token of a layer of the interdomain condition."""
    shapes = (B, 48 * R), (4, 32 * R), (32 * R,), (B, 3, 32 * R), (32, R)
    x, weight, bias, past, norm = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    rope = (torch.zeros(B, 1, 1, R // 2),) * 2
    features_step.step(x, R, weight, bias, past, *rope, 32, 32, norm, norm, EPS)


def launches(capability, dtype, shape):
    family, _, rest = shape.rpartition("/")
    sizes, _, kinds = rest.partition(":")
    (R, D, M), kinds = map(int, sizes.split("x")), kinds.split("+")
    G = next((int(k[1:]) for k in kinds if re.fullmatch(r"G\d+", k)), 1)
    triton_plan.capability = lambda device: divmod(capability, 10)
    module, run = {
        "": (triton_launch, lambda: scan_launches(dtype, R, D, M, kinds, G)),
        "step": (triton_step, lambda: step_launches(dtype, R, D, M, kinds, G)),
        "features": (features_launch, lambda: features_launches(dtype, R, kinds)),
        "features_step": (features_step, lambda: features_step_launches(dtype, R)),
    }[family]
    launched = recorded(module, run)
    if "sweeps" in kinds:
        launched = [
            x for x in launched if any(x[3].get(out, "") is None for out in ("p_o", "p_dv"))
        ]
    return most(launched) if "most" in kinds else launched


def most(launches):
    """The launch of each kernel that uses the most of its options; the first of several."""
    best = {}
    for launch in launches:
        does = sum(value is True for value in launch[3].values()) - sum(
            value is None for value in launch[3].values()
        )
        if does > best.get(launch[0].__name__, (-99,))[0]:
            best[launch[0].__name__] = does, launch
    return [launch for _, launch in best.values()]


def compile_launch(launch, capability):
    kernel, signature, divisible, constants, options = launch
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def report(launch, compiled, capability):
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel")
        with open(path + ".ptx", "w") as file:
            file.write(ptx)
        architecture = re.search(r"\.target\s+(\w+)", ptx).group(1)
        command = [
            get_ptxas(capability).path,
            "-v",
            "--regAllocOptLevel=2",
            "-arch",
            architecture,
            path + ".ptx",
        ]
        log = subprocess.run(
            [*command, "-o", path + ".cubin"], capture_output=True, text=True, check=True
        ).stderr
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    return {
        "kernel": launch[0].__name__,
        "capability": capability,
        "constants": {n: v for n, v in launch[3].items() if not n.startswith("stride")},
        "registers": int(re.search(r"Used (\d+) registers", log).group(1)),
        "spill": max(int(stores), int(loads)),
        "shared": compiled.metadata.shared,
        # Transpositions of registers. Those of loaded tiles are views of shared memory and not counted.
        "transposed": len(
            re.findall(r"tt\.trans [^\n]*order = array<i32: 1, 0>", compiled.asm["ttgir"])
        ),
        # ptxas waits for every wgmma before the next one (C7515) where it cannot tell that registers are not touched.
        "serialized": re.findall(r"[^\n]*serialized[^\n]*", log),
    }


def exceeds(report) -> bool:
    """True if a report with its dtype and shape is beyond the budget."""
    family = report["shape"].rpartition("/")[0]
    spill, shared = OTHERS.get(family, (SPILL[report["dtype"]], SHARED[report["capability"]]))
    # On Hopper, transpositions of registers are what compilers get wrong. Elsewhere loaded tiles take that path, too.
    hopper = (report["capability"], report["dtype"], family) == (90, "bf16", "")
    too_many = (
        report["registers"] > REGISTERS or report["spill"] > spill or report["shared"] > shared
    )
    return bool(too_many or (hopper and report["transposed"]) or report["serialized"])


def reports(*arguments):
    """A report for each launch that the arguments name, with its dtype and its argument (`shape`)."""
    capability, dtype = 0, ""
    for argument in arguments:
        if argument.isdigit():
            capability = int(argument)
        elif argument in DTYPES:
            dtype = argument
        else:
            for launch in launches(capability, DTYPES[dtype], argument):
                compiled = compile_launch(launch, capability)
                yield {"dtype": dtype, "shape": argument, **report(launch, compiled, capability)}


def main(argv=None) -> int:
    CUDABackend.make_cubin = lambda *args: b""  # `report` calls ptxas itself, for its log
    for one in reports(*(argv or sys.argv[1:])):
        print(json.dumps(one), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
