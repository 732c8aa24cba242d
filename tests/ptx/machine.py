"""Executes compiled PTX with NumPy: one operation on arrays over all threads of all programs per instruction.

Sections named below are those of the PTX ISA. What is not here raises `Fault` by name when it is reached; nothing is skipped.
Threads that take different branches wait for each other: the block that stands first in the text runs first, for the
threads that are there. Registers and shared memory begin as NaN. Two things differ from a GPU: approximations (ex2.approx,
...) are exact, and sums inside a matrix product are rounded as NumPy rounds them. What runs out of order there, cp.async and
wgmma, takes effect here when it is waited for, and is watched until then.
"""

import functools
import itertools
import operator
import re
import time

import numpy as np
import torch

from .memory import SHARED_BASE, SPAN, Fault, Findings, Global, Shared
from .parse import Instruction, Kernel

FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
TYPES = FLOATS | {
    f"{k}{n}": np.dtype(f"{t}{n // 8}") for k, t in (("u", "u"), ("b", "u"), ("s", "i")) for n in (8, 16, 32, 64)
}
GROUP = 128  # threads of a warp group
THREADS = 1 << 14  # of the programs that run at once
LARGEST = 227 * 1024  # shared memory of a program on sm_90
CACHING = re.compile(r"nc|ca|cg|cs|lu|wb|wt|volatile|relaxed|weak|gpu|cta|sys|L[12]::[\w:]+")
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


def flush(x):
    """.ftz: subnormal numbers are zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fma(a, b, c):
    """a b + c rounded once: fp32 through fp64; fp64 by the errors of product and sum (Dekker, Knuth)."""
    if np.result_type(a) == np.float32:
        return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)
    p = a * b
    (a1, b1) = (np.where(np.abs(x) < 2.0**900, x * 134217729.0 - (x * 134217729.0 - x), x) for x in (a, b))
    a2, b2 = a - a1, b - b1
    e = ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2
    s = p + c
    t = s - p
    f = (p - (s - t)) + (c - t)
    total = s + (e + f)
    return np.where(np.isfinite(total), total, s)


class Machine:
    """A batch of programs of one launch."""

    def __init__(self, kernel: Kernel, memory: Global, parameters, programs, grid, shared, granule, findings: Findings):
        """parameters: bits of each as uint64; programs: range of program numbers out of `grid` of them."""
        self.kernel, self.memory, self.parameters, self.findings = kernel, memory, parameters, findings
        self.threads, self.count = kernel.threads, len(programs)
        self.n = n = self.count * self.threads
        self.shared = Shared(self.count, shared, self.threads, granule, findings)
        self.all = np.arange(n)
        self.program = np.repeat(np.arange(programs.start, programs.stop, dtype=np.int64), self.threads)
        tid = (self.all % self.threads).astype(np.uint32)
        none = np.zeros(n, np.uint32)
        self.special = {"%tid.x": tid, "%ctaid.x": self.program.astype(np.uint32), "%laneid": tid % 32, "%tid.y": none}
        self.special |= {"%tid.z": none, "%ctaid.y": none, "%ctaid.z": none, "%ntid.x": none + self.threads}
        self.special |= {"%nctaid.x": none + grid, "%warpid": tid // 32}
        self.registers, self.compiled = {}, {}
        (local,) = kernel.local.values() or (0,)  # the compiler lays all of it out under one name
        self.local = np.full((n, -(-local // 8) * 8), 0xFF, np.uint8)
        self.copies, self.copy_groups = [], np.zeros(n, np.int64)
        groups = max(1, n // GROUP)
        self.products, self.product_groups = [], np.zeros(groups, np.int64)
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
        if name not in OPERATIONS:
            return functools.partial(self.refuse, i)
        run = OPERATIONS[name](self, i, rest)
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
        if name in self.kernel.parameters:
            return dtype.type(8 * list(self.kernel.parameters).index(name))
        if name in self.kernel.local:
            return dtype.type(0)
        if name in self.memory.symbols:
            return dtype.type(self.memory.symbols[name])
        if name == "global_smem":
            return dtype.type(SHARED_BASE)
        if name[:2] in ("0f", "0d"):
            return np.array([int(name[2:], 16)], "u4" if name[1] == "f" else "u8").view(dtype)[0]
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", name):
            bits = int(name, 0) & ((1 << 8 * dtype.itemsize) - 1)
            return np.array([bits], f"u{dtype.itemsize}").view(dtype)[0]
        x = self.register(name)
        return x.view(dtype)[:: x.itemsize // dtype.itemsize]

    def write(self, name, kind):
        """A register as an array of this type to write to, at its own width."""
        x = self.register(name)
        if kind == "pred" or x.itemsize == np.dtype(TYPES[kind]).itemsize:
            return x if kind == "pred" else x.view(TYPES[kind])
        return x.view(f"{'i' if kind[0] == 's' else 'u'}{x.itemsize}")  # wider: extended as the type says

    def vector(self, text):
        return [x.strip() for x in text.strip("{}").split(",")]

    def address(self, text):
        """(register or scalar, offset) of [register + offset] or [symbol + offset]."""
        base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text).groups()
        if base in self.kernel.parameters:
            return self.read(base, "u64"), int(offset or "0", 0)
        wide = base in self.memory.symbols or (base[0] == "%" and self.register(base).itemsize == 8)
        return self.read(base, "u64" if wide else "u32"), int(offset or "0", 0)

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


def at(address, lanes):
    base, offset = address
    return (base[lanes] if np.ndim(base) else np.full(len(lanes), base)).astype(np.int64) + offset


# -------------------------------------------------------------------- arithmetic


def elementwise(function):
    """op.type d, a, b, ...: a function of typed arrays; a ufunc writes in place."""

    def make(m, i, rest):
        ftz = "ftz" in rest
        kind = rest[-1]
        allowed = {"rn", "ftz", "lo", "approx", "full", kind}
        if not set(rest) <= allowed or kind not in TYPES:
            return None
        d, args = m.write(i.operands[0], kind), [m.read(x, kind) for x in i.operands[1:]]
        if ftz:
            return lambda w: np.copyto(d, flush(function(*map(flush, args))), where=w)
        if isinstance(function, np.ufunc):
            return lambda w: function(*args, out=d, where=w)
        return lambda w: np.copyto(d, function(*args), where=w)

    return make


def bf16_too(wide, function):
    """The same where the type may be bf16 (Half Precision Floating-Point Instructions): in fp32, then rounded."""

    def make(m, i, rest):
        if rest[-1] not in ("bf16", "bf16x2"):
            return wide(m, i, rest)
        bits = "b16" if rest[-1] == "bf16" else "b32"
        d = m.write(i.operands[0], bits).view(np.uint16)
        args = [np.broadcast_to(m.read(x, bits), m.n).view(np.uint16) for x in i.operands[1:]]
        if not set(rest) <= {"rn", rest[-1]} or any(x[0] != "%" for x in i.operands):
            return None
        per = d.size // m.n
        return lambda w: np.copyto(
            d, to_bf16(function(*map(from_bf16, args))), where=True if w is True else np.repeat(w, per)
        )

    return make


def pick(function, real=None):
    """By whether the type is an integer's."""
    by_int, by_real = elementwise(function), elementwise(real or function)
    return lambda m, i, rest: (by_real if rest[-1] in FLOATS else by_int)(m, i, rest)


def quotient(a, b):
    """Towards zero, as in C; -1 for a division by zero, which PTX leaves open."""
    if np.issubdtype(np.result_type(a), np.unsignedinteger):
        return np.where(b == 0, ~a, a // np.where(b == 0, 1, b))
    q = np.floor_divide(np.abs(a), np.abs(np.where(b == 0, 1, b)))
    return np.where(b == 0, -1, np.where((a < 0) != (b < 0), -q, q))


def remainder(a, b):
    return a - quotient(a, b) * b


def minimum_like(ufunc, propagating):
    """min and max of floats return the number where one is NaN, but for .NaN."""
    plain, nan = elementwise(ufunc), elementwise(propagating)
    return lambda m, i, rest: (nan if "NaN" in rest else plain)(m, i, [x for x in rest if x != "NaN"])


one = np.float32(1)
for names, make in {
    "add": bf16_too(elementwise(np.add), np.add),
    "sub": bf16_too(elementwise(np.subtract), np.subtract),
    "neg": bf16_too(elementwise(np.negative), np.negative),
    "fma": bf16_too(elementwise(fma), fma),
    "div": pick(quotient, np.divide),
    "rem": elementwise(remainder),
    "abs": elementwise(np.abs),
    "min": minimum_like(np.fmin, np.minimum),
    "max": minimum_like(np.fmax, np.maximum),
    "ex2": elementwise(np.exp2),
    "lg2": elementwise(np.log2),
    "rcp": elementwise(lambda x: one / x),
    "sqrt": elementwise(np.sqrt),
    "rsqrt": elementwise(lambda x: one / np.sqrt(x)),
    "sin": elementwise(np.sin),
    "cos": elementwise(np.cos),
    "tanh": elementwise(np.tanh),
}.items():
    operation(names)(make)


@operation("and", "or", "xor", "not")
def op_logic(m, i, rest):
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[
        i.opcode.split(".")[0]
    ]
    d, args = m.write(i.operands[0], rest[0]), [m.read(x, rest[0]) for x in i.operands[1:]]
    return lambda w: function(*args, out=d, where=w)


@operation("mul", "mad")
def op_multiply(m, i, rest):
    """mul and mad: .lo, .hi, .wide (Integer Arithmetic Instructions), and floats."""
    kind, mad = rest[-1], i.opcode.startswith("mad")
    if kind in FLOATS or kind.startswith("bf16"):
        return None if mad else bf16_too(elementwise(np.multiply), np.multiply)(m, i, rest)
    wide = kind[0] + str(2 * int(kind[1:]))
    a, b = (m.read(x, kind) for x in i.operands[1:3])
    result = wide if rest[0] == "wide" else kind
    c = m.read(i.operands[3], result) if mad else None
    d = m.write(i.operands[0], result)

    def product():
        if rest[0] == "wide":
            return np.multiply(a, b, dtype=TYPES[wide])
        if rest[0] == "hi" and kind[1:] == "32":
            return (np.multiply(a, b, dtype=TYPES[wide]) >> 32).astype(TYPES[kind])
        return np.multiply(a, b) if rest[0] == "lo" else None

    if len(rest) != 2 or rest[0] not in ("wide", "lo", "hi") or (rest[0] == "hi" and kind[1:] != "32"):
        return None
    return lambda w: np.copyto(d, product() if c is None else product() + c, where=w)


@operation("shl", "shr")
def op_shift(m, i, rest):
    """Shifts by more than the width give what shifting bit by bit would."""
    d, a, by = m.write(i.operands[0], rest[0]), m.read(i.operands[1], rest[0]), m.read(i.operands[2], "u32")
    bits, left = int(rest[0][1:]), i.opcode.startswith("shl")
    dtype = np.dtype(TYPES[rest[0]])

    def run(w):
        n = np.minimum(by, bits - 1).astype(dtype)
        x = a << n if left else a >> n
        over = np.zeros_like(x) if left or rest[0][0] != "s" else x
        np.copyto(d, np.where(by >= bits, over, x), where=w)

    return run


@operation("shf")
def op_funnel(m, i, rest):
    d, (low, high, by) = m.write(i.operands[0], "u32"), (m.read(x, "u32") for x in i.operands[1:])
    if rest not in (["l", "wrap", "b32"], ["r", "wrap", "b32"]):
        return None

    def run(w):
        x = (np.asarray(high, np.uint64) << np.uint64(32)) | low
        n = np.asarray(by & 31, np.uint64)
        np.copyto(d, ((x << n) >> np.uint64(32) if rest[0] == "l" else x >> n).astype(np.uint32), where=w)

    return run


@operation("bfe")
def op_extract(m, i, rest):
    d, a = m.write(i.operands[0], rest[0]), m.read(i.operands[1], rest[0])
    if any(x[0] == "%" for x in i.operands[2:]) or rest[0] not in ("u32", "s32"):
        return None
    position, length = (int(x, 0) for x in i.operands[2:])
    if not 0 < length <= 32 - position:
        return None
    kind = np.dtype(TYPES[rest[0]]).type
    return lambda w: np.copyto(d, (a << kind(32 - position - length)) >> kind(32 - length), where=w)


@operation("clz")
def op_leading_zeros(m, i, rest):
    d, a, bits = m.write(i.operands[0], "u32"), m.read(i.operands[1], rest[0]), int(rest[0][1:])
    return lambda w: np.copyto(d, sum(((a >> a.dtype.type(k)) == 0).astype(np.uint32) for k in range(bits)), where=w)


@operation("prmt")
def op_permute(m, i, rest):
    """Default mode: each nibble of the selector names one of eight bytes, its high bit asks for the sign."""
    d, (a, b, selector) = m.write(i.operands[0], "u32"), (m.read(x, "u32") for x in i.operands[1:])
    if rest != ["b32"]:
        return None

    def run(w):
        both = (np.asarray(b, np.uint64) << np.uint64(32)) | a
        total = np.uint32(0)
        for k in range(4):
            nibble = (np.asarray(selector, np.uint64) >> np.uint64(4 * k)) & np.uint64(15)
            byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            byte = np.where(nibble & np.uint64(8), np.where(byte & np.uint64(128), 255, 0), byte)
            total = total | (byte.astype(np.uint32) << np.uint32(8 * k))
        np.copyto(d, total, where=w)

    return run


COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
COMPARE |= {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


@operation("setp")
def op_compare(m, i, rest):
    """Comparisons with a u hold for NaN, too; ne does not."""
    how, kind = rest[0], rest[-1]
    if len(rest) != 2 or "|" in i.operands[0]:
        return None
    d, a, b = m.register(i.operands[0]), *(m.read(x, kind) for x in i.operands[1:])
    if how in ("num", "nan"):
        return lambda w: np.copyto(d, (np.isnan(a) | np.isnan(b)) == (how == "nan"), where=w)
    if kind in FLOATS and (how[-1] == "u" or how == "ne"):
        compare = COMPARE[how[:2]]
        unordered = how[-1] == "u"
        return lambda w: np.copyto(d, np.where(np.isnan(a) | np.isnan(b), unordered, compare(a, b)), where=w)
    return lambda w: np.copyto(d, COMPARE[how](a, b), where=w)


@operation("selp")
def op_select(m, i, rest):
    d, a, b = m.write(i.operands[0], rest[0]), *(m.read(x, rest[0]) for x in i.operands[1:3])
    p = m.read(i.operands[3], "pred")
    return lambda w: np.copyto(d, np.where(p, a, b), where=w)


@operation("mov")
def op_move(m, i, rest):
    """Also between a register and the parts of it (mov: packing and unpacking of vectors)."""
    d, a, kind = *i.operands, rest[-1]
    if d[0] == "{":
        part = f"b{int(kind[1:]) // len(m.vector(d))}"
        parts = m.read(a, kind).view(TYPES[part]).reshape(m.n, -1)
        outs = [m.write(x, part) for x in m.vector(d)]
        return lambda w: [np.copyto(x, parts[:, k], where=w) for k, x in enumerate(outs)]
    if a[0] == "{":
        part = f"b{int(kind[1:]) // len(m.vector(a))}"
        out = m.write(d, kind).view(TYPES[part]).reshape(m.n, -1)
        parts = [m.read(x, part) for x in m.vector(a)]
        return lambda w: [np.copyto(out[:, k], x, where=w) for k, x in enumerate(parts)]
    out, value = m.write(d, kind), m.read(a, kind)
    return lambda w: np.copyto(out, value, where=w)


@operation("cvta")
def op_generic_address(m, i, rest):
    """Of local memory, which the compiler takes and does not use: an access without its space is refused."""
    return op_move(m, i, rest) if rest == ["local", "u64"] else None


@operation("cvt")
def op_convert(m, i, rest):
    """Data Movement and Conversion Instructions: cvt. Integers saturate when they come from floats."""
    mode, kind, source = rest[:-2], rest[-2], rest[-1]
    if kind == "bf16x2" and source == "f32" and mode == ["rn"]:
        d, (high, low) = m.write(i.operands[0], "b32"), (m.read(x, "f32") for x in i.operands[1:])
        return lambda w: np.copyto(d, to_bf16(high).astype(np.uint32) << 16 | to_bf16(low), where=w)
    d = m.write(i.operands[0], "b16" if kind == "bf16" else "b32" if kind == "tf32" else kind)
    a = m.read(i.operands[1], "b16" if source == "bf16" else source)
    wide = (lambda: from_bf16(np.asarray(a))) if source == "bf16" else (lambda: a)
    if kind == "bf16" and mode == ["rn"]:
        return lambda w: np.copyto(d, to_bf16(wide().astype(np.float32)), where=w)
    if kind == "tf32" and mode == ["rna"]:
        return lambda w: np.copyto(d, (a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000), where=w)
    if kind not in TYPES or not set(mode) <= {"rn", "rz", "rzi", "rni", "rmi", "rpi", "ftz"} or (mode == ["rz"]):
        return None
    to = np.dtype(TYPES[kind])
    if kind in FLOATS:
        if any(x.endswith("i") for x in mode):
            rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode[0]]
            return lambda w: np.copyto(d, rounded(wide()).astype(to), where=w)
        return lambda w: np.copyto(d, (flush(wide()) if "ftz" in mode else wide()).astype(to), where=w)
    if source in FLOATS:
        rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode[0]]
        low, high = np.iinfo(to).min, np.iinfo(to).max
        return lambda w: np.copyto(
            d, np.nan_to_num(np.clip(rounded(a.astype(np.float64)), low, high)).astype(to), where=w
        )
    return lambda w: np.copyto(d, np.asarray(a).astype(to), where=w)


# -------------------------------------------------------------------- control


@operation("bra")
def op_branch(m, i, rest):
    to = m.kernel.labels[i.operands[0]]
    return lambda w: (m.lanes(w), to)


@operation("ret", "exit")
def op_return(m, i, rest):
    return lambda w: (m.lanes(w), len(m.kernel.blocks))


@operation("bar", "barrier")
def op_barrier(m, i, rest):
    if rest == ["warp", "sync"] and i.operands == ("-1",):

        def warp(w):
            m.whole(w, 32, i)
            m.shared.warp[m.lanes(w)] = m.shared.now

        return warp
    if rest not in (["sync"], ["cta", "sync"]) or (len(i.operands) == 2 and int(i.operands[1]) != m.threads):
        return None

    def run(w):
        m.whole(w, m.threads, i)
        m.shared.barrier[m.lanes(w)] = m.shared.now

    return run


@operation("fence")
def op_fence(m, i, rest):
    if rest != ["proxy", "async", "shared::cta"]:
        return None

    def run(w):
        m.shared.fence[m.lanes(w)] = m.shared.now

    return run


@operation("shfl")
def op_shuffle(m, i, rest):
    """shfl.sync: lane, bounds and what happens outside of them as in the pseudo-code of the ISA."""
    d, a, by, bounds, members = i.operands
    if rest[0] != "sync" or rest[2] != "b32" or members != "-1" or "|" in d:
        return None
    out, value = m.register(d).reshape(-1, 32), m.read(a, "u32").reshape(-1, 32)
    by, bounds = (np.broadcast_to(m.read(x, "s32"), m.n).reshape(-1, 32) for x in (by, bounds))
    lane = np.arange(32)

    def run(w):
        warps = m.whole(w, 32, i)
        b, c = by[warps] & 31, bounds[warps]
        segment = (c >> 8) & 31
        last = (lane & segment) | (c & 31 & ~segment)
        first = lane & segment
        if rest[1] == "up":
            j = lane - b
            inside = j >= last
        else:
            j = {"down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[rest[1]]
            inside = j <= last
        out[warps] = np.take_along_axis(value[warps], np.where(inside, j, lane) & 31, axis=1)

    return run


# -------------------------------------------------------------------- memory


@operation("ld")
def op_load(m, i, rest):
    space, kind = rest[-1 if len(rest) < 2 else 0].split("::")[0], rest[-1]
    if kind not in TYPES or any(not CACHING.fullmatch(x) for x in rest[1:-1] if x not in ("v2", "v4")):
        return None
    width = np.dtype(TYPES[kind]).itemsize
    outs = [m.write(x, kind) for x in m.vector(i.operands[0])]
    where, size = m.address(i.operands[1]), width * len(outs)
    if space not in ("param", "local", "global", "shared"):
        return None

    def run(w):
        lanes = m.lanes(w)
        if not len(lanes):
            return
        if space == "param":
            data = m.parameters[at(where, lanes) // 8][:, None].view(f"u{width}")
        elif space == "local":
            data = m.local.view(f"u{width}")[m.own(at(where, lanes), lanes, size, width, i)]
        elif space == "global":
            piece, offset = m.memory.place(at(where, lanes), size, i)
            m.memory.touch(piece, offset, size, m.program[lanes], m.findings, i, write=False)
            data = m.memory.view(piece, width)[offset[:, None] // width + np.arange(len(outs))]
        else:
            data = m.shared.load(m.shared.place(at(where, lanes), size, lanes, i), size, width, lanes, i)
        for k, out in enumerate(outs):
            out[lanes] = data[:, k].view(TYPES[kind])

    return run


@operation("st")
def op_store(m, i, rest):
    space, kind = rest[0].split("::")[0], rest[-1]
    if space not in ("local", "global", "shared") or any(
        not CACHING.fullmatch(x) for x in rest[1:-1] if x not in ("v2", "v4")
    ):
        return None
    bits = f"b{kind[1:]}"
    width = np.dtype(TYPES[bits]).itemsize
    values = [np.broadcast_to(m.read(x, bits), m.n) for x in m.vector(i.operands[1])]
    where, size = m.address(i.operands[0]), width * len(values)

    def run(w):
        lanes = m.lanes(w)
        if not len(lanes):
            return
        data = np.stack([x[lanes] for x in values], axis=1)
        if space == "local":
            m.local.view(f"u{width}")[m.own(at(where, lanes), lanes, size, width, i)] = data
        elif space == "global":
            piece, offset = m.memory.place(at(where, lanes), size, i)
            m.memory.touch(piece, offset, size, m.program[lanes], m.findings, i, write=True)
            m.memory.view(piece, width)[offset[:, None] // width + np.arange(len(values))] = data
        else:
            m.shared.store(m.shared.place(at(where, lanes), size, lanes, i), data, size, lanes, i)

    return run


@operation("cp")
def op_copy(m, i, rest):
    """cp.async: lands when its group is waited for; until then nothing may touch the place. Given no bytes: zeros."""
    if rest == ["async", "commit_group"]:

        def commit(w):
            m.copy_groups[m.lanes(w)] += 1

        return commit
    if rest in (["async", "wait_group"], ["async", "wait_all"]):
        left = int(i.operands[0]) if i.operands else 0

        def wait(w):
            active, remaining = np.zeros(m.n, bool), []
            active[m.lanes(w)] = True
            for lanes, group, place, data, size, g, me in m.copies:
                ready = active[lanes] & (group < m.copy_groups[lanes] - left)
                if ready.all():
                    keep = None
                else:
                    keep = ~ready
                    per = np.repeat(keep, len(g) // len(lanes))
                    remaining.append((lanes[keep], group[keep], place[keep], data[keep], size, g[per], me[per]))
                    place, data, g, me = place[ready], data[ready], g[~per], me[~per]
                m.shared.copying[g] = 0
                m.shared.note_write(g, me, copied=True)
                m.shared.views[1][place[:, None] + np.arange(size)] = data
            m.copies = remaining

        return wait
    if rest not in (["async", "cg", "shared", "global"], ["async", "ca", "shared", "global"]):
        return None
    to, source, size = m.address(i.operands[0]), m.address(i.operands[1]), int(i.operands[2], 0)
    given = m.read(i.operands[3], "u32") if len(i.operands) > 3 else np.uint32(size)

    def run(w):
        lanes = m.lanes(w)
        if not len(lanes):
            return
        place = m.shared.place(at(to, lanes), size, lanes, i)
        count = np.broadcast_to(given, m.n)[lanes]
        data = np.zeros((len(lanes), size), np.uint8)
        if not np.isin(count, (0, size)).all():
            raise Fault(f"cp.async of a part of its bytes: {i}")
        full = np.flatnonzero(count == size)
        if len(full):
            piece, offset = m.memory.place(at(source, lanes[full]), size, i)
            m.memory.touch(piece, offset, size, m.program[lanes[full]], m.findings, i, write=False)
            data[full] = m.memory.pieces[piece][offset[:, None] + np.arange(size)]
        g, me = m.shared.granules(place, size, lanes)
        m.shared.on_write(g, me, i)
        m.shared.copying[g] = 1
        m.shared.writer[g] = me
        m.copies.append((lanes, m.copy_groups[lanes], place, data, size, g, me))

    return run


@operation("ldmatrix", "stmatrix")
def op_matrix(m, i, rest):
    """8 x 8 matrices of 16 bits: row r of the j-th lies where lane 8 j + r says; lane l holds two numbers of row l / 4."""
    load, trans, count = i.opcode.startswith("ld"), "trans" in rest, {"x1": 1, "x2": 2, "x4": 4}[rest[3]]
    if rest != ["sync", "aligned", "m8n8", f"x{count}", *(["trans"] if trans else []), "shared", "b16"]:
        return None
    registers, address = i.operands if load else i.operands[::-1]
    names, where = m.vector(registers), m.address(address)

    def run(w):
        warps = m.whole(w, 32, i)
        lanes = m.all.reshape(-1, 32)[warps][:, : 8 * count].ravel()
        place = m.shared.place(at(where, lanes), 16, lanes, i)
        if load:
            rows = m.shared.load(place, 16, 2, lanes, i).reshape(-1, count, 8, 8)
            rows = np.ascontiguousarray(rows.swapaxes(2, 3) if trans else rows).view(np.uint32)
            m.put(names, "b32", warps, rows.swapaxes(0, 1))
        else:
            rows = m.fragments(names, "b32", warps).swapaxes(0, 1)
            rows = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, count, 8, 8)
            rows = rows.swapaxes(2, 3) if trans else rows
            m.shared.store(place, np.ascontiguousarray(rows).reshape(-1, 8), 16, lanes, i)

    return run


# -------------------------------------------------------------------- matrix products
# Lane l of a warp is (g, t) = (l / 4, l % 4). Of an accumulator of 16 rows it holds rows g and g + 8, columns 2 t and 2 t + 1
# of every 8; of a first operand rows g and g + 8 and pairs t of 8 columns; of a second columns g and pairs t of 8 rows.


def accumulator(x):
    """[4 n / 8, warps, 32] -> [warps, 16, n]"""
    x = x.reshape(-1, 2, 2, x.shape[1], 8, 4)  # n / 8, row half, column, warps, g, t
    return x.transpose(3, 1, 4, 0, 5, 2).reshape(x.shape[3], 16, -1)


def to_accumulator(x):
    warps, _, n = x.shape
    return x.reshape(warps, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, warps, 32)


def first_operand(x, per):
    """[4, warps, 32] of `per` numbers each -> [warps, 16, 8 per]"""
    x = x.reshape(2, 2, x.shape[1], 8, 4, per)  # column half, row half, warps, g, t, number
    return x.transpose(2, 1, 3, 0, 4, 5).reshape(x.shape[2], 16, 8 * per)


def second_operand(x, per):
    """[2, warps, 32] of `per` numbers each -> [warps, 8 per, 8]"""
    x = x.reshape(2, x.shape[1], 8, 4, per)  # row half, warps, g, t, number
    return x.transpose(1, 0, 3, 4, 2).reshape(x.shape[1], 8 * per, 8)


def numbers(x, kind):
    """Registers of operands -> float32, with the count of numbers in each. TF32 drops 13 bits."""
    if kind == "bf16":
        return from_bf16(np.ascontiguousarray(x).view(np.uint16)), 2
    return (x & np.uint32(0xFFFFE000)).view(np.float32), 1


@operation("mma")
def op_mma(m, i, rest):
    if rest not in (
        ["sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"],
        ["sync", "aligned", "m16n8k8", "row", "col", "f32", "tf32", "tf32", "f32"],
    ):
        return None
    d, a, b, c = map(m.vector, i.operands)

    def run(w):
        warps = m.whole(w, 32, i)
        x, per = numbers(m.fragments(a, "b32", warps), rest[6])
        y, _ = numbers(m.fragments(b, "b32", warps), rest[6])
        total = first_operand(x, per) @ second_operand(y, per) + accumulator(m.fragments(c, "f32", warps))
        m.put(d, "f32", warps, to_accumulator(total))

    return run


@functools.cache
def tile(rows, swizzle, transposed):
    """Where a tile [rows, 16] of bf16 lies: (bytes, multiples of the leading offset, of the stride offset) [rows, 16] each.

    Strides of the canonical layouts (Asynchronous Warpgroup Level Matrix Shared Memory Layout), T = 8 numbers of 16 bytes; rows
    are those of A and the columns of B. As they are: ((8, rows), (T, 2)) : ((W T, SBO), (1, LBO or T)), W = 1, 2, 4, 8 for
    swizzles of 0, 32, 64, 128 bytes. Transposed: ((T, W, rows), (8, 2)) : ((1, T, LBO), (W T, SBO)).
    """
    wide = max(16, swizzle)
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    none = 0 * (r + k)
    if not transposed:
        far = k // 8
        inside = r % 8 * wide + k % 8 * 2 + (16 * far if swizzle else 0)
        return inside + none, (none if swizzle else far + none), r // 8 + none
    across = r // (wide // 2)
    if swizzle == 0:
        return r % 8 * 2 + k % 8 * 16 + none, k // 8 + none, r // 8 + none
    return r % (wide // 2) * 2 + k % 8 * wide + none, across + none, k // 8 + none


@operation("wgmma")
def op_wgmma(m, i, rest):
    """Asynchronous Warpgroup Level Matrix Multiply-Accumulate: sums appear, and operands are free, when waited for."""
    shared = m.shared
    if rest == ["fence", "sync", "aligned"]:
        return lambda w: [m.whole(w, GROUP, i)]
    if rest == ["commit_group", "sync", "aligned"]:

        def commit(w):
            m.product_groups[m.whole(w, GROUP, i)] += 1

        return commit
    if rest == ["wait_group", "sync", "aligned"]:

        def wait(w):
            active = np.zeros(m.n // GROUP, bool)
            active[m.whole(w, GROUP, i)] = True
            remaining = []
            for group, number, d, read, kept, where in m.products:
                if not (active[group] and number < m.product_groups[group] - int(i.operands[0])):
                    remaining.append((group, number, d, read, kept, where))
                    continue
                values, pending = m.accumulators[d]
                rows = slice(4 * group, 4 * group + 4)
                if pending[group]:
                    m.put(d, "f32", rows, to_accumulator(values[group].reshape(4, 16, -1)))
                    pending[group] = False
                for name, before in kept.items():
                    changed = m.register(name).reshape(-1, GROUP)[group] != before
                    m.findings.add(
                        "an operand of wgmma changes before it is waited for", where, np.count_nonzero(changed)
                    )
                np.subtract.at(shared.multiplied, read, 1)
                first = np.full(len(read), group * GROUP, np.int32)
                shared.note_read(read, first, first + GROUP - 1)
            m.products = remaining

        return wait
    if rest[:3] != ["mma_async", "sync", "aligned"] or rest[4:] != ["f32", "bf16", "bf16"]:
        return None
    n, (d, a, b, add, *immediate) = int(re.fullmatch(r"m64n(\d+)k16", rest[3]).group(1)), i.operands
    d, from_registers, immediate = tuple(m.vector(d)), a[0] == "{", [int(x) for x in immediate]
    if immediate[:2] != [1, 1] or len(immediate) != (3 if from_registers else 4):
        return None
    a = m.vector(a) if from_registers else a
    transposed = immediate[2:]

    def operand(descriptor, rows, transposed, groups, threads):
        """[groups, rows, 16] through a matrix descriptor, one per warp group."""
        bits = m.register(descriptor).reshape(-1, GROUP)[groups]
        if (bits != bits[:, :1]).any():
            raise Fault(f"threads of a warp group have different descriptors: {i}")
        bits = bits[:, 0]
        start, leading, stride = (
            ((bits >> np.uint64(s)) & np.uint64(0x3FFF)).astype(np.int64) * 16 for s in (0, 16, 32)
        )
        if ((bits >> np.uint64(49)) & np.uint64(7)).any():
            raise Fault(f"a matrix descriptor with a base offset: {i}")
        (mode,) = np.unique(bits >> np.uint64(62))
        swizzle = (0, 128, 64, 32)[int(mode)]
        inside, l, s = tile(rows, swizzle, transposed)
        address = start[:, None, None] + inside + leading[:, None, None] * l + stride[:, None, None] * s
        if swizzle:  # bits 4.. meet bits 7..
            address ^= (address >> 3) & (swizzle - 16)
        place = shared.place(address.ravel(), 2, np.repeat(threads, rows * 16), i).reshape(-1, rows, 16)
        read = [np.unique(x // shared.granule) for x in place]
        for g, thread in zip(read, threads, strict=True):
            shared.on_read(g, np.full(len(g), thread), i, proxy=True)
        return from_bf16(shared.views[2][place // 2]), read

    def run(w):
        groups = np.arange(m.n // GROUP)[m.whole(w, GROUP, i)]
        threads = groups * GROUP
        warps = (4 * groups[:, None] + np.arange(4)).ravel()
        y, read = operand(b, n, transposed[-1], groups, threads)
        if from_registers:
            x = first_operand(*numbers(m.fragments(a, "b32", warps), "bf16")).reshape(len(groups), 64, 16)
        else:
            x, also = operand(a, 64, transposed[0], groups, threads)
            read = [np.concatenate(both) for both in zip(read, also, strict=True)]
        total = x @ y.swapaxes(1, 2)
        if d not in m.accumulators:
            m.accumulators[d] = np.zeros((m.n // GROUP, 64, n), np.float32), np.zeros(m.n // GROUP, bool)
        values, pending = m.accumulators[d]
        before = accumulator(m.fragments(d, "f32", warps)).reshape(len(groups), 64, n)
        before = np.where(pending[groups][:, None, None], values[groups], before)
        scale = np.broadcast_to(m.read(add, "pred"), m.n).reshape(-1, GROUP)[groups, 0]
        values[groups] = total + np.where(scale[:, None, None], before, np.float32(0))
        if not pending[groups].all():
            pending[groups] = True
            m.put(d, "b32", warps, np.full((len(d), len(warps), 32), 0xFFFFFFFF, np.uint32))
        for group, g in zip(groups, read, strict=True):
            np.add.at(shared.multiplied, g, 1)
            kept = {x: m.register(x).reshape(-1, GROUP)[group].copy() for x in (a if from_registers else ())}
            m.products.append((group, m.product_groups[group], d, g, kept, i))

    return run


def unfenced(block):
    """Products whose registers another instruction writes after the last wgmma.fence, which must stand between."""
    dirty, found = None, []
    for i in block:
        registers = set(re.findall(r"%\w+", " ".join(i.operands[:1])))
        if i.opcode.startswith("wgmma.fence"):
            dirty = set()
        elif i.opcode.startswith("wgmma.mma_async"):
            registers |= set(re.findall(r"%\w+", i.operands[1])) if i.operands[1][0] == "{" else set()
            found += [i] if dirty is None or registers & dirty else []
        elif dirty is not None and not i.opcode.startswith("st"):
            dirty |= registers
    return found


# -------------------------------------------------------------------- a launch


def execute(code: Kernel, passed, grid, shared):
    """Runs the entry on CPU tensors and numbers, in place; -> report."""
    if shared > LARGEST:
        raise Fault(f"{code.name} asks for {shared} bytes of shared memory")
    storages, pointers = [], {}
    for x in passed:
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in pointers:
            storage = x.untyped_storage()
            if storage.nbytes():
                assert storage.data_ptr() % 16 == 0
                storages.append(torch.tensor((), dtype=torch.uint8).set_(storage).numpy())
            pointers[storage.data_ptr()] = max(1, len(storages))
    memory, findings = Global(storages, code.constants), Findings()
    for i in itertools.chain(*map(unfenced, code.blocks)):
        findings.add("wgmma with registers that no wgmma.fence came after", i, 1)
    parameters = np.zeros(
        len(code.parameters), np.uint64
    )  # after ours follow scratch pointers that these kernels do not use
    for k, x in enumerate(passed):
        if isinstance(x, torch.Tensor):
            x = pointers[x.untyped_storage().data_ptr()] * SPAN + x.storage_offset() * x.element_size()
        parameters[k] = x & 0xFFFFFFFFFFFFFFFF
    widths = re.findall(
        r"\b(?:ld|st)\.shared\S*?\.[busf](\d+)\b", " ".join(i.opcode for block in code.blocks for i in block)
    )
    granule = min([4, *(int(x) // 8 for x in widths)])  # the narrowest access to shared memory, 4 at most
    start, instructions, batch = time.perf_counter(), 0, max(1, THREADS // code.threads)
    for first in range(0, grid, batch):
        programs = range(first, min(grid, first + batch))
        machine = Machine(code, memory, parameters, programs, grid, shared, granule, findings)
        machine.run()
        instructions += machine.executed
    seconds = time.perf_counter() - start
    return {"kernel": code.name, "grid": grid, "findings": findings, "instructions": instructions, "seconds": seconds}
