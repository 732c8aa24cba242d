"""Executes compiled PTX with NumPy: one operation on arrays over all threads of all programs per instruction.

Sections named here and beside are those of the PTX ISA. What is not here raises `Fault` by name when it is reached; nothing is
skipped. Threads that take different branches wait for each other: the block that stands first in the text runs first, for the
threads that are there. Registers and shared memory begin as NaN. Two things differ from a GPU: approximations (ex2.approx,
...) are exact, and sums inside a matrix product are rounded as NumPy rounds them. What runs out of order there, cp.async and
wgmma, takes effect here when it is waited for, and is watched until then.
"""

import functools
import re

import numpy as np

from .memory import SHARED_BASE, Fault, Findings, Global, Shared
from .parse import Instruction, Kernel

FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
TYPES = {f"{k}{n}": np.dtype(f"{'i' if k == 's' else 'u'}{n // 8}") for k in "ubs" for n in (8, 16, 32, 64)} | FLOATS
GROUP = 128  # threads of a warp group
OPERATIONS = {}


def operation(*names):
    def register(make):
        OPERATIONS.update(dict.fromkeys(names, make))
        return make

    return register


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    """Round to nearest even; NaN as the instruction makes it."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Machine:
    """A batch of programs of one launch."""

    def __init__(
        self, kernel: Kernel, memory: Global, parameters, programs, shared, granule, findings: Findings, traffic
    ):
        """parameters: bits of each as uint64; programs: range of program numbers; traffic: a `Traffic`, or None."""
        self.kernel, self.memory, self.parameters, self.findings = kernel, memory, parameters, findings
        self.traffic = traffic
        self.threads, self.count = kernel.threads, len(programs)
        self.n = n = self.count * self.threads
        self.shared = Shared(self.count, shared, self.threads, granule, findings)
        self.all = np.arange(n)
        self.program = np.repeat(np.arange(programs.start, programs.stop, dtype=np.int64), self.threads)
        self.special = {"%tid.x": self.all % self.threads, "%ctaid.x": self.program, "%laneid": self.all % 32}
        self.registers, self.compiled = {}, {}
        self.symbols = {name: 8 * k for k, name in enumerate(kernel.parameters)} | dict.fromkeys(kernel.local, 0)
        self.symbols |= memory.symbols | {"global_smem": SHARED_BASE}
        (local,) = kernel.local.values() or (0,)  # the compiler lays all of it out under one name
        self.local = np.full((n, -(-local // 8) * 8), 0xFF, np.uint8)
        self.copies, self.copy_groups = [], np.zeros(n, np.int64)
        self.products, self.product_groups = [], np.zeros(n // GROUP, np.int64)
        self.accumulators = {}  # of wgmma under way: {registers: (values [groups, 64, N], mask [groups])}
        self.executed = 0

    # ---------------------------------------------------------------- control flow

    def run(self):
        at = np.zeros(self.n, np.int32)
        with np.errstate(all="ignore"):
            while True:
                block = at.min()
                if block >= len(self.kernel.blocks):
                    return
                where = at == block
                where = True if where.all() else where
                at[where] = block + 1
                if block not in self.compiled:
                    self.compiled[block] = [(i, self.compile(i)) for i in self.kernel.blocks[block]]
                for instruction, run in self.compiled[block]:
                    self.shared.now += 1
                    self.executed += 1
                    try:
                        target = run(where)
                    except Fault:
                        raise
                    except Exception as e:
                        raise Fault(f"{instruction}: {e!r}") from e
                    if type(target) is tuple:
                        mask, to = target
                        at[mask] = to

    def compile(self, i: Instruction):
        """A function of the mask of active threads (True: all of them) that executes the instruction."""
        name, *rest = i.opcode.split(".")
        run = OPERATIONS[name](self, i, rest) if name in OPERATIONS else None
        if run is None:
            return functools.partial(self.refuse, i)
        if not i.guard:
            return run
        predicate = self.register(i.guard.lstrip("!"))
        if i.guard[0] == "!":
            return lambda w: run(~predicate & w)
        return lambda w: run(predicate & w)

    def refuse(self, i, w):
        if w is True or w.any():
            raise Fault(f"the emulator has no {i}")

    def lanes(self, w):
        return self.all if w is True else np.flatnonzero(w)

    def whole(self, w, size, i):
        """Numbers of the groups of `size` threads that are active, each as a whole."""
        if w is True:
            return slice(None)
        w = w.reshape(-1, size)
        active = w.any(1)
        if (w.all(1) != active).any():
            raise Fault(f"not all threads of {size} are there: {i}")
        return np.flatnonzero(active)

    # ---------------------------------------------------------------- operands

    def register(self, name):
        if name not in self.registers:
            prefix = name if name in self.kernel.registers else name.rstrip("0123456789")
            if prefix not in self.kernel.registers:
                raise Fault(f"no register {name}")
            width = self.kernel.registers[prefix]
            self.registers[name] = np.full(self.n, 0 if width == 0 else -1, np.dtype(f"i{width}") if width else bool)
            if width:
                self.registers[name] = self.registers[name].view(f"u{width}")
        return self.registers[name]

    def read(self, name, kind):
        """A register, special register, symbol or number as an array of this type, or a scalar."""
        if kind == "pred":
            return self.register(name) if name[0] == "%" else np.bool_(int(name) != 0)
        dtype = np.dtype(TYPES[kind])
        if name in self.special:
            return self.special[name].astype(dtype)
        if name in self.symbols:
            return dtype.type(self.symbols[name])
        if name[:2] in ("0f", "0d"):
            return np.array([int(name[2:], 16)], "u4" if name[1] == "f" else "u8").view(dtype)[0]
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", name):
            bits = int(name.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
            return np.array([bits], f"u{dtype.itemsize}").view(dtype)[0]
        x = self.register(name)
        return x.view(dtype)[:: x.itemsize // dtype.itemsize]

    def write(self, name, kind):
        """A register as an array of this type to write to, at its own width."""
        if name == "_":  # nowhere
            return np.empty(self.n, TYPES[kind])
        x = self.register(name)
        if kind == "pred" or x.itemsize == np.dtype(TYPES[kind]).itemsize:
            return x if kind == "pred" else x.view(TYPES[kind])
        return x.view(f"{'i' if kind[0] == 's' else 'u'}{x.itemsize}")  # wider: extended as the type says

    def vector(self, text):
        return [x.strip() for x in text.strip("{}").split(",")]

    def address(self, text):
        """(register or scalar, offset) of [register + offset] or [symbol + offset]."""
        base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text).groups()
        wide = base in self.symbols or self.register(base).itemsize == 8
        return self.read(base, "u64" if wide else "u32"), int(offset or "0", 0)

    def at(self, address, lanes):
        base, offset = address
        return np.broadcast_to(base, self.n)[lanes].astype(np.int64) + offset

    def own(self, address, lanes, size, width, i):
        """Where numbers lie in the local memory of each thread."""
        if ((address < 0) | (address + size > self.local.shape[1]) | (address % size != 0)).any():
            raise Fault(f"an access outside of local memory, or not aligned: {i}")
        return lanes[:, None], address[:, None] // width + np.arange(size // width)

    def fragments(self, names, kind, select):
        """Registers of some warps, [registers, warps, 32]."""
        return np.stack([np.broadcast_to(self.read(x, kind), self.n).reshape(-1, 32)[select] for x in names])

    def put(self, names, kind, select, values):
        for name, value in zip(names, values, strict=True):
            self.write(name, kind).reshape(-1, 32)[select] = value.reshape(-1, 32)
