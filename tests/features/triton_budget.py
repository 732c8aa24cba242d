"""Registers, spills and shared memory of the input features' kernels, by compilation alone: needs no GPU.

`python -m tests.features.triton_budget 90/bf16/k/64 80/fp32/v/96` prints one line per kernel (capability / dtype / mix of
stages / R), `90/bf16/step:8/64` that of one token of a layer of the interdomain condition, batch 8 (`softmax:8`: of that one);
TRITON_INTERPRET must be unset. The launches are recorded, not described a second time: what is compiled is
what runs.
"""

import json
import sys

import torch

from interdomain.features import triton_launch, triton_step

from ..scan.triton_budget import DTYPES, _record, report
from .common import EPS, MIXES, Case, documents, make


def launches(dtype, mix, R):
    """One forward and backward of a layer of [B 2, T 64, H 16, R]; a mix with "+past", "+documents" or both has those, too."""
    found = []
    if ":" in mix:
        _record(triton_step, "step_kernel", found)
        kind, _, B = mix.partition(":")
        shapes = (int(B), 48 * R), (4, 32 * R), (32 * R,), (int(B), 3, 32 * R), (32, R)
        x, weight, bias, past, norm = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        rope = (torch.zeros(int(B), 1, 1, R // 2),) * 2
        if kind == "step":
            triton_step.step(x, R, weight, bias, past, *rope, 32, 32, norm, norm, EPS)
        else:
            triton_step.step(x, R, None, None, None, *rope, 32, 0, None, None, EPS)
        return found
    for name in ("forward_kernel", "backward_kernel"):
        _record(triton_launch, name, found)
    mix, *more = mix.split("+")
    case = Case(T=64, H=16, R=R, **MIXES[mix], **dict.fromkeys(more, True))
    leaves, rope, dy = make(case, dtype)
    x, weight, bias, past, scale, shift = (leaves.get(n) for n in ("x", "weight", "bias", "past", "scale", "shift"))
    weight = weight if weight is None else weight.flatten(1)
    args = x, R, weight, bias, past, documents(case), *(rope or (None, None)), case.silu, scale
    triton_launch.forward(*args, shift, EPS)
    triton_launch.backward(dy, *args, EPS, past is not None)
    return found


def main(argv=None) -> int:
    for shape in argv or sys.argv[1:]:
        capability, dtype, mix, R = shape.split("/")
        for launch in launches(DTYPES[dtype], mix, int(R)):
            print(json.dumps({"shape": shape, **report(launch, int(capability))}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
