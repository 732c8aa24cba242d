"""Registers, spills, shared memory and instructions of the Triton kernels, by compilation alone: needs no GPU.

`python -m tests.scan.triton_budget 90 bf16 64x64x64` prints one line per kernel of `chunkwise` (R x D x M), and
`sequential/64x64x64:G2`, `step/64x64x64:linear` those of the others, `:linear+documents` those with packed documents,
`:training` those without a state in or out, `:ragged` those whose last chunk is short, `:L32` those of chunks of 32, `:most`
of each kernel the launch that does most. More may follow, `80 fp32 ...` for another GPU and dtype. What would compile to the
same is listed once. TRITON_INTERPRET must be unset.
The launches are recorded, not described a second time: what is compiled is what runs.

`python -m tests.scan.triton_budget all` compiles every shipped tile (`every`, twenty minutes on one core) and fails if ptxas
serialises a wgmma in one of them.
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

from interdomain.scan import triton_chunkwise, triton_launch, triton_plan, triton_step, triton_support
from interdomain.scan.alternatives import sequential as triton_sequential

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

CUDABackend.make_cubin = lambda *args: b""  # `report` calls ptxas itself, for its log


def described(kernel, *args, num_warps, num_stages=3, maxnreg=None, enable_fp_fusion=True, **constants):
    """What determines the code of a launch, as Triton's specialization sees it."""
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
        else:
            signature[parameter.name] = "i32"
            if value % 16:
                continue
        divisible.append(parameter.name)
    options = dict(num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg, enable_fp_fusion=enable_fp_fusion)
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


def launches(capability, dtype, R, D, M, G=1, linear=False, ragged=False, **kw):
    """Everything that one forward and backward launch, with an initial state and a cotangent on the final one."""
    found = []
    passes = ("contract_kernel", "mix_kernel", "expand_kernel", "adjoint_kernel")
    for name in (*passes, "tables_kernel", "sum_kernel", "chain_kernel"):
        _record(triton_launch, name, found)
    triton_plan.capability = lambda device: divmod(capability, 10)
    T = 64 if kw.get("training") else 1024  # two segments, which have states between them
    _forward_and_backward(triton_chunkwise, T - 4 * ragged, dtype, R, D, M, G, linear, **kw)
    return found


def _record(module, name, found):
    kernel = getattr(module, name)
    setattr(module, name, Recorder(kernel.kernel if isinstance(kernel, Recorder) else kernel, found))


def _forward_and_backward(module, T, dtype, R, D, M, G, linear, documents=False, training=False, chunk=None):
    B, H = 2, 2
    kw = {"documents": torch.zeros(B, T, dtype=torch.int32)} if documents else {}
    theta, state = torch.zeros(H, M, 2), None if training else torch.zeros(B, H, M, R + D, 2)
    final = {"need_final": not training}
    if linear:
        z = torch.zeros(B, T, H, R + D, dtype=dtype)
        module.linear_forward(z, theta, torch.zeros(H, 2 * M), state, chunk, **final, **kw)
        module.linear_backward(z, state, z, theta, torch.zeros(H, 2 * M), state, chunk, True, **kw)
    else:
        q, k, v = (torch.zeros(B, T, H * g, d, dtype=dtype) for g, d in ((G, R), (1, R), (1, D)))
        inputs = (q, k, v, theta, torch.zeros(H, 2 * M, 2 * M), state, chunk)
        module.scan_forward(*inputs, **final, **kw)
        module.scan_backward(torch.zeros(B, T, H * G, D, dtype=dtype), state, *inputs, True, **kw)


def launches_sequential(capability, dtype, R, D, M, G=1, linear=False, **kw):
    """The same for the recurrence, whose tiles do not depend on the capability."""
    found = []
    for name in ("contract_scan_kernel", "expand_scan_kernel", "reverse_scan_kernel"):
        _record(triton_sequential, name, found)
    _forward_and_backward(triton_sequential, 40, dtype, R, D, M, G, linear, **kw)
    return found


def launches_step(capability, dtype, R, D, M, G=1, linear=False, **kw):
    """With W whole, and with its upper half for more sequences; or the linear readout."""
    found = []
    for name in ("contract_step_kernel", "expand_step_kernel"):
        _record(triton_step, name, found)
    decay = torch.zeros(2, M, 2)
    for B, rows in ((2, 2 * M), (128, M)):
        state = torch.zeros(B, 2, M, R + D, 2)
        if linear:
            triton_step.linear_one_step(torch.zeros(B, 2, R + D, dtype=dtype), decay, torch.zeros(2, 2 * M), state)
        else:
            q, k, v = (torch.zeros(B, 2 * g, d, dtype=dtype) for g, d in ((G, R), (1, R), (1, D)))
            triton_step.scan_step(q, k, v, decay, torch.zeros(2, rows, 2 * M), state)
    return found


def most(launches):
    """Of each kernel, the launch with the most of what it can do; the first of several."""
    found = {}
    for launch in launches:
        switches = {name: value for name, value in launch[3].items() if value is True or name.startswith("STORE_")}
        name, does = launch[0].__name__, sum(map(bool, switches.values()))
        if does > found.get(name, (-1,))[0]:
            found[name] = does, launch
    return [launch for _, launch in found.values()]


FAMILIES = {"chunkwise": launches, "sequential": launches_sequential, "step": launches_step}


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


def report(launch, capability):
    compiled = compile_launch(launch, capability)
    ptx, constants = compiled.asm["ptx"], launch[3]
    assembler = get_ptxas(capability).path
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel")
        with open(path + ".ptx", "w") as file:
            file.write(ptx)
        architecture = re.search(r"\.target\s+(\w+)", ptx).group(1)
        command = [assembler, "-v", "--regAllocOptLevel=2", "-arch", architecture, path + ".ptx"]
        log = subprocess.run([*command, "-o", path + ".cubin"], capture_output=True, text=True, check=True).stderr
        command = [os.path.join(os.path.dirname(assembler), "nvdisasm"), "-c", path + ".cubin"]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    return {
        "kernel": launch[0].__name__,
        "constants": {n: v for n, v in constants.items() if not n.startswith("stride")},
        "registers": int(re.search(r"Used (\d+) registers", log).group(1)),
        "spill": max(int(stores), int(loads)),
        "shared": compiled.metadata.shared,
        # Transpositions of registers. Those of loaded tiles are views of shared memory and not counted.
        "transposed": len(re.findall(r"tt\.trans [^\n]*order = array<i32: 1, 0>", compiled.asm["ttgir"])),
        # ptxas waits for every wgmma before the next one (C7515) where it cannot tell that registers are not touched.
        "serialized": re.findall(r"[^\n]*serialized[^\n]*", log),
        "loops": loops(sass),
    }


def loops(sass):
    """Of every loop of 64 instructions and more that no other one encloses: instructions, and how many of some kinds.

    HGMMA and HMMA are products of tensor cores, WARPGROUP.DEPBAR waits for the former; LDL loads a spilled number.
    """
    code, labels = [], {}
    for line in sass.splitlines():
        label = re.match(r"(\.L_\w+):", line)
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if label:
            labels[label.group(1)] = len(code)
        elif instruction:
            code.append(instruction.group(1))
    spans = []
    for i, text in enumerate(code):
        target = re.search(r"\bBRA\b.*\((\.L_\w+)\)", text)
        if target and i - labels.get(target.group(1), i) >= 63:
            spans.append((labels[target.group(1)], i + 1))
    outer = {x for x in spans if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in spans)}
    kinds = ("HGMMA", "HMMA", "WARPGROUP.DEPBAR", "BAR.SYNC", "LDL")
    return [
        {"instructions": stop - start} | {k: n for k in kinds if (n := sum(k in x for x in code[start:stop]))}
        for start, stop in sorted(outer)
    ]


def every():
    """Arguments that name every shipped tile. Only sm_90 in bf16 has wgmma; elsewhere fewer launches are enough."""
    widths = ("64x64", "64x65", "96x96", "128x128", "256x256")
    kinds = ("training", "training+ragged", "most", "documents+most", "linear+most", "linear+training+ragged+most")
    yield from ("90", "bf16")
    for M in triton_support.BASIS_SIZES:
        yield from (f"{width}x{M}:{kind}" for width in widths for kind in kinds)
        yield from (f"64x64x{M}:{kind}" for kind in ("L16+training+most", "L32+training+most", "ragged+most"))
    for capability, dtype in (("80", "bf16"), ("89", "bf16"), ("80", "fp32"), ("90", "fp32")):
        yield from (capability, dtype)
        for M in triton_support.BASIS_SIZES:
            yield from (
                f"{width}x{M}:{kind}" for width in ("64x64", "96x97") for kind in ("training+most", "ragged+most")
            )


def main(argv=None) -> int:
    done, serialized = [], []
    arguments = argv or sys.argv[1:]
    for argument in every() if arguments == ["all"] else arguments:
        if argument.isdigit():
            capability = int(argument)
        elif argument in DTYPES:
            dtype = argument
        else:
            family, _, rest = argument.rpartition("/")
            sizes, _, kind = rest.partition(":")
            R, D, M = map(int, sizes.split("x"))
            find = FAMILIES[family or "chunkwise"]
            kinds = kind.split("+")
            G = next((int(k[1:]) for k in kinds if k.startswith("G")), 1)
            options = {name: True for name in ("documents", "training", "ragged") if name in kinds}
            options["chunk"] = next((int(k[1:]) for k in kinds if k.startswith("L")), None)
            found = find(capability, DTYPES[dtype], R, D, M, G, "linear" in kinds, **options)
            for launch in most(found) if "most" in kinds else found:
                if (capability, dtype, launch) not in done:
                    done.append((capability, dtype, launch))
                    what = {"capability": capability, "dtype": dtype, "shape": argument} | report(launch, capability)
                    serialized += what["serialized"]
                    print(json.dumps(what), flush=True)
    if serialized:
        print(
            "\n".join(serialized), f"{len(serialized)} of {len(done)} kernels are serialised", sep="\n", file=sys.stderr
        )
    return 1 if serialized and arguments == ["all"] else 0


if __name__ == "__main__":
    sys.exit(main())
