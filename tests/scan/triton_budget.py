"""Registers, spills and shared memory of the chunkwise Triton kernels, by compilation alone: needs no GPU.

`python -m tests.scan.triton_budget 90 bf16 64x64x64` prints one line per kernel (R x D x M); TRITON_INTERPRET must be
unset. The launches are recorded, not described a second time: what is compiled is what runs.
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
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from interdomain.scan import triton_chunkwise, triton_launch

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16"}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Recorder:
    """Stands where a kernel does and keeps the launches, without those that would compile to the same."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, num_warps, num_stages, **constants):
        signature, divisible = {}, []
        for parameter, value in zip(self.kernel.params, args, strict=False):
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            elif parameter.do_not_specialize:
                signature[parameter.name] = "i32"
                continue
            elif value == 1:
                constants[parameter.name] = 1
            else:
                signature[parameter.name] = "i32"
                if value % 16:
                    continue
            divisible.append(parameter.name)
        launch = (self.kernel, signature, divisible, constants, num_warps, num_stages)
        if launch not in self.launches:
            self.launches.append(launch)


def launches(capability, dtype, R, D, M, G=1, linear=False):
    """Everything that one forward and backward launch, with an initial state and a cotangent on the final one."""
    found = []
    for name in ("contract_kernel", "mix_kernel", "expand_kernel", "adjoint_kernel", "decay_kernel"):
        kernel = getattr(triton_launch, name)
        setattr(triton_launch, name, Recorder(kernel.kernel if isinstance(kernel, Recorder) else kernel, found))
    triton_launch.capability = lambda device: divmod(capability, 10)
    B, T, H = 2, 1024, 2  # two segments
    theta, state = torch.zeros(H, M, 2), torch.zeros(B, H, M, R + D, 2)
    if linear:
        z = torch.zeros(B, T, H, R + D, dtype=dtype)
        triton_chunkwise.linear_forward(z, theta, torch.zeros(H, 2 * M), state, None)
        triton_chunkwise.linear_backward(z, state, z, theta, torch.zeros(H, 2 * M), state, None, True)
    else:
        q, k, v = (torch.zeros(B, T, H * g, d, dtype=dtype) for g, d in ((G, R), (1, R), (1, D)))
        inputs = (q, k, v, theta, torch.zeros(H, 2 * M, 2 * M), state, None)
        triton_chunkwise.scan_forward(*inputs)
        triton_chunkwise.scan_backward(torch.zeros(B, T, H * G, D, dtype=dtype), state, *inputs, True)
    return found


def report(launch, capability):
    kernel, signature, divisible, constants, num_warps, num_stages = launch
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )
    options = dict(num_warps=num_warps, num_stages=num_stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel")
        with open(path + ".ptx", "w") as file:
            file.write(ptx)
        architecture = re.search(r"\.target\s+(\w+)", ptx).group(1)
        command = [get_ptxas(capability).path, "-v", "--regAllocOptLevel=2", "-arch", architecture, path + ".ptx"]
        log = subprocess.run([*command, "-o", path + ".cubin"], capture_output=True, text=True, check=True).stderr
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    return {
        "kernel": kernel.__name__,
        "constants": {n: v for n, v in constants.items() if not n.startswith("stride")},
        "registers": int(re.search(r"Used (\d+) registers", log).group(1)),
        "spill": max(int(stores), int(loads)),
        "shared": compiled.metadata.shared,
        # Transpositions of registers. Those of loaded tiles are views of shared memory and not counted.
        "transposed": len(re.findall(r"tt\.trans [^\n]*order = array<i32: 1, 0>", compiled.asm["ttgir"])),
    }


def main(argv=None) -> int:
    capability, dtype, *shapes = argv or sys.argv[1:]
    for shape in shapes:
        shape, _, kind = shape.partition(":")
        R, D, M = map(int, shape.split("x"))
        G = int(kind[1:]) if kind.startswith("G") else 1
        for launch in launches(int(capability), DTYPES[dtype], R, D, M, G, kind == "linear"):
            print(json.dumps({"shape": shape, **report(launch, int(capability))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
