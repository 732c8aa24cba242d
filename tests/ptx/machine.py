"""Follows one program of a compiled kernel: addresses, branches, barriers and accesses to memory, in NumPy over its threads.

Numbers are not computed: instructions of floating point and matrix products write nothing, and their registers stay -1, which
as an address is a `Fault`. An instruction that is not known is a `Fault`, too, when it is reached. Threads that take different
branches wait for each other: the block that stands first in the text runs first, for the threads that are there. What a GPU
runs out of order, cp.async and wgmma, is under way here until it is waited for. Sections named are those of the PTX ISA.
"""

import operator
import re

import numpy as np

from .memory import SHARED_BASE, Fault, Findings, Global, Shared
from .parse import Instruction, Kernel

FLOATS = {"f16", "f32", "f64", "bf16", "bf16x2", "f16x2", "tf32"}
# Of the slow path of sine and cosine, and of numbers in pairs; local memory holds nothing else.
IGNORED = {
    "call",
    "clz",
    "addc",
    "subc",
    "madc",
    "shf",
    "fma",
    "mma",
    "ex2",
    "lg2",
    "sqrt",
    "rsqrt",
    "rcp",
}
OPERATIONS = {}


def operation(*names):
    def register(make):
        OPERATIONS.update(dict.fromkeys(names, make))
        return make

    return register


def wrap(x, kind):
    """int64 cut to the width of a type, with a sign if it has one."""
    bits = int(kind[1:])
    if bits == 64:
        return x
    x = x & ((1 << bits) - 1)
    return (x ^ (1 << bits - 1)) - (1 << bits - 1) if kind[0] == "s" else x


class Machine:
    def __init__(
        self,
        kernel: Kernel,
        memory: Global,
        parameters,
        program,
        shared,
        granule,
        findings: Findings,
    ):
        """parameters: their values; program: its number; shared: bytes."""
        self.kernel, self.memory, self.n = kernel, memory, kernel.threads
        self.shared = Shared(shared, self.n, granule, findings)
        self.threads = np.arange(self.n)
        self.parameters = dict(zip(kernel.parameters, parameters, strict=False))
        self.parameters |= dict.fromkeys(
            kernel.parameters[len(parameters) :], 0
        )  # pointers to scratch that is not there
        self.registers = {
            "%tid.x": self.threads,
            "%ctaid.x": np.full(self.n, program),
            "%laneid": self.threads % 32,
        }
        self.symbols = {"global_smem": SHARED_BASE, **memory.symbols}
        self.copies, self.copy_groups = [], np.zeros(self.n, int)
        self.products, self.product_groups = [], np.zeros(self.n // 32, int)

    def run(self):
        at, compiled = np.zeros(self.n, int), {}
        while (block := at.min()) < len(self.kernel.blocks):
            where = at == block
            at[where] = block + 1
            if block not in compiled:
                compiled[block] = [
                    (i, run)
                    for i in self.kernel.blocks[block]
                    if (run := self.compile(i)) is not None
                ]
            for i, run in compiled[block]:
                self.shared.now += 1
                active = where
                if i.guard:
                    active = where & (self.register(i.guard.lstrip("!")) ^ (i.guard[0] == "!"))
                if active.any() and isinstance(target := run(active), int):  # of a branch
                    at[active] = target

    def compile(self, i: Instruction):
        """A function of the mask of active threads; None for what computes numbers only."""
        name, *rest = i.opcode.split(".")
        if (
            name in IGNORED
            or "local" in rest
            or "cc" in rest
            or (FLOATS & {*rest} and name != "wgmma")
        ):
            return None

        def refuse(w):
            raise Fault(f"the emulator has no {i}")

        return (OPERATIONS[name](self, i, rest) if name in OPERATIONS else None) or refuse

    def groups(self, w, size, i):
        """The numbers of the groups of `size` threads that are active, each with all of its threads."""
        w = w.reshape(-1, size)
        if (w.all(1) != w.any(1)).any():
            raise Fault(f"not all threads of {size} are there: {i}")
        return np.flatnonzero(w.any(1))

    def register(self, name):
        if name not in self.registers:
            predicate = {name, name.rstrip("0123456789")} & self.kernel.predicates
            self.registers[name] = np.zeros(self.n, bool) if predicate else np.full(self.n, -1)
        return self.registers[name]

    def read(self, text):
        """A register (its array), or a number of any kind; floats are not computed."""
        if text in self.symbols:
            return np.int64(self.symbols[text])
        if text[0] not in "-0123456789":
            return self.register(text)
        number = -1 if text[:2] in ("0f", "0d") else int(text.rstrip("U"), 0)
        return np.uint64(number % 2**64).astype(np.int64)

    def vector(self, text):
        return [
            None if x.strip() == "_" else self.read(x.strip()) for x in text.strip("{}").split(",")
        ]

    def address(self, text):
        """A function of threads -> the addresses of [register + offset] or [symbol + offset]."""
        base, offset = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text).groups()
        base, offset = np.broadcast_to(self.read(base), self.n), int(offset or "0", 0)
        return lambda threads: base[threads] + offset


# ------------------------------------------------------------------ integers


def integers(function):
    """op.type d, a, b, ...: a function of int64."""

    def make(m, i, rest):
        kind = rest[-1]
        d, args = m.register(i.operands[0]), [m.read(x) for x in i.operands[1:]]
        if kind == "pred":
            return lambda w: np.copyto(d, function(*(np.not_equal(x, 0) for x in args)), where=w)
        return lambda w: np.copyto(
            d, wrap(function(*(wrap(x, kind) for x in args)), f"u{kind[1:]}"), where=w
        )

    return make


def unsigned(x):
    return np.asarray(x).view(np.uint64)


def quotient(a, b):
    """Towards zero, as in C; for a division by zero anything."""
    q = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) != (b < 0), -q, q)


INTEGERS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "neg", "xor")},
    **{
        "and": operator.and_,
        "or": operator.or_,
        "not": np.invert,
        "min": np.minimum,
        "max": np.maximum,
    },
    **{"div": quotient, "rem": lambda a, b: a - quotient(a, b) * b, "abs": np.abs},
    "shl": lambda a, n: np.where(n > 63, 0, a << np.minimum(n, 63)),
}
for name, function in INTEGERS.items():
    operation(name)(integers(function))


@operation("selp")
def op_select(m, i, rest):
    d, (a, b, p) = m.register(i.operands[0]), map(m.read, i.operands[1:])
    return lambda w: np.copyto(d, wrap(np.where(p, a, b), f"u{rest[0][1:]}"), where=w)


@operation("bfe")
def op_extract(m, i, rest):
    d, a, (at, bits) = (
        m.register(i.operands[0]),
        m.read(i.operands[1]),
        (int(x, 0) for x in i.operands[2:]),
    )
    return lambda w: np.copyto(
        d, wrap(wrap(a >> at, f"{rest[0][0]}{bits}"), f"u{rest[0][1:]}"), where=w
    )


@operation("prmt")
def op_permute(m, i, rest):
    """Each nibble of the selector names one of eight bytes; its high bit, which asks for a sign, is not used in addresses."""
    d, (a, b, selector) = m.register(i.operands[0]), map(m.read, i.operands[1:])

    def run(w):
        both, total = wrap(a, "u32") | wrap(b, "u32") << 32, 0
        for k in range(4):
            total = total | (both >> 8 * (selector >> 4 * k & 7) & 255) << 8 * k
        np.copyto(d, total, where=w)

    return run


@operation("shr")
def op_shift_right(m, i, rest):
    d, (a, n), bits = m.register(i.operands[0]), map(m.read, i.operands[1:]), int(rest[0][1:])

    def run(w):
        x, by = wrap(a, rest[0]), np.minimum(n, 63)
        x = (
            x >> by
            if rest[0][0] == "s" or bits < 64
            else (unsigned(x) >> unsigned(by)).view(np.int64)
        )
        np.copyto(d, wrap(x, f"u{bits}"), where=w)

    return run


@operation("mul", "mad")
def op_multiply(m, i, rest):
    how, kind = rest
    d, (a, b, *c) = m.register(i.operands[0]), map(m.read, i.operands[1:])
    to = "u" + (kind[1:] if how != "wide" else str(2 * int(kind[1:])))

    def run(w):
        x = wrap(a, kind) * wrap(b, kind)
        if how == "hi":  # of 32 bits: 64 hold the product
            x = x >> 32 if kind[0] == "s" else (unsigned(x) >> np.uint64(32)).view(np.int64)
        np.copyto(d, wrap(x + c[0] if c else x, to), where=w)

    return run


@operation("cvt", "cvta")
def op_convert(m, i, rest):
    d, a = m.register(i.operands[0]), m.read(i.operands[1])
    return lambda w: np.copyto(
        d, wrap(wrap(a, rest[-1]), "u" + rest[-2][1:]) if len(rest) == 2 else a, where=w
    )


COMPARE = {x: getattr(operator, x) for x in ("eq", "ne", "lt", "le", "gt", "ge")}
COMPARE |= {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


@operation("setp")
def op_compare(m, i, rest):
    how, kind = rest
    d, (a, b) = m.register(i.operands[0]), map(m.read, i.operands[1:])
    as_compared = unsigned if kind == "u64" else lambda x: wrap(x, kind)
    return lambda w: np.copyto(d, COMPARE[how](as_compared(a), as_compared(b)), where=w)


@operation("mov")
def op_move(m, i, rest):
    if "{" in i.operands[0] + i.operands[1]:  # parts of a register: numbers
        return lambda w: None
    out, value = m.register(i.operands[0]), m.read(i.operands[1])
    return lambda w: np.copyto(out, np.not_equal(value, 0) if rest == ["pred"] else value, where=w)


# ------------------------------------------------------------------ control and threads together


@operation("bra")
def op_branch(m, i, rest):
    return lambda w: m.kernel.labels[i.operands[0]]


@operation("ret", "exit")
def op_return(m, i, rest):
    return lambda w: len(m.kernel.blocks)


@operation("bar", "barrier", "fence")
def op_barrier(m, i, rest):
    if rest == ["warp", "sync"] and i.operands == ("-1",):
        return lambda w: m.groups(w, 32, i)
    if rest == ["proxy", "async", "shared::cta"]:
        times, together = m.shared.fence, 1
    elif rest in (["sync"], ["cta", "sync"]) and i.operands[1:] in ((), (str(m.n),)):
        times, together = m.shared.barrier, m.n
    else:
        return None

    def run(w):
        m.groups(w, together, i)
        times[w] = m.shared.now

    return run


@operation("shfl")
def op_shuffle(m, i, rest):
    d, a, by, _, members = i.operands
    if rest[0] != "sync" or members != "-1" or "|" in d:
        return None
    out, value, lane = m.register(d).reshape(-1, 32), m.read(a).reshape(-1, 32), np.arange(32)
    by = np.broadcast_to(m.read(by), m.n).reshape(-1, 32)

    def run(w):
        warps = m.groups(w, 32, i)
        n = by[warps] & 31
        j = {"up": lane - n, "down": lane + n, "bfly": lane ^ n, "idx": n}[rest[1]]
        out[warps] = np.take_along_axis(
            value[warps], np.where((j >= 0) & (j < 32), j, lane), axis=1
        )

    return run


# ------------------------------------------------------------------ memory


@operation("ld", "st")
def op_access(m, i, rest):
    """ld and st, of vectors, too. -1 is what a register of a float stores."""
    load, space, width = (
        i.opcode.startswith("ld"),
        rest[0].split("::")[0],
        int(re.sub(r"\D", "", rest[-1])) // 8,
    )
    registers, address = i.operands if load else i.operands[::-1]
    if space == "param":
        name = address.strip("[] ")
        if not load or name not in m.parameters:  # of a call
            return lambda w: None
        d = m.register(registers)
        return lambda w: np.copyto(d, m.parameters[name], where=w)
    if space not in ("global", "shared"):
        return None
    values, where = m.vector(registers), m.address(address)
    size = width * len(values)

    def run(w):
        threads = m.threads[w]
        if space == "global":
            memory, index = m.memory.bytes(where(threads), size, i)
        else:
            place = m.shared.place(where(threads), size, i)
            g, me = m.shared.granules(place, size, threads)
            (m.shared.on_read if load else m.shared.on_write)(g, me, i)
            if not load:
                m.shared.note_write(g, me)
            memory, index = m.shared.bytes, place[:, None] + np.arange(size)
        for k, x in enumerate(values):
            part = index[:, k * width : (k + 1) * width]
            if load and x is not None:
                x[threads] = (
                    np.ascontiguousarray(memory[part]).view(f"u{width}")[:, 0].astype(np.int64)
                )
            elif not load:
                bits = np.broadcast_to(x, m.n)[threads].astype(
                    f"i{width}" if width == 8 else np.int64
                )
                memory[part] = bits.astype(np.int64).view(np.uint8).reshape(-1, 8)[:, :width]

    return run


@operation("cp")
def op_copy(m, i, rest):
    """cp.async: lands when its group is waited for; until then nothing may touch the place. Given no bytes: zeros."""
    if rest == ["async", "commit_group"]:
        return lambda w: np.add(m.copy_groups, 1, out=m.copy_groups, where=w)
    if rest == ["async", "wait_group"]:

        def wait(w):
            remaining = []
            for threads, group, place, data, g, me in m.copies:
                ready = w[threads] & (group < m.copy_groups[threads] - int(i.operands[0]))
                m.shared.copying[g[ready]] = 0
                m.shared.note_write(g[ready], me[ready], copied=True)
                m.shared.bytes[place[ready, None] + np.arange(data.shape[1])] = data[ready]
                remaining.append(tuple(x[~ready] for x in (threads, group, place, data, g, me)))
            m.copies = [x for x in remaining if len(x[0])]

        return wait
    if rest[0] != "async" or rest[2:] != ["shared", "global"]:
        return None
    to, source, size = m.address(i.operands[0]), m.address(i.operands[1]), int(i.operands[2], 0)
    given = np.broadcast_to(m.read(i.operands[3]) if len(i.operands) > 3 else size, m.n)

    def run(w):
        threads = m.threads[w]
        place = m.shared.place(to(threads), size, i)
        data, full = np.zeros((len(threads), size), np.uint8), given[threads] == size
        if full.any():
            memory, index = m.memory.bytes(source(threads[full]), size, i)
            data[full] = memory[index]
        g, me = m.shared.granules(place, size, threads)
        m.shared.on_write(g, me, i)
        m.shared.copying[g], m.shared.writer[g] = 1, me
        g, me = g.reshape(len(threads), -1), me.reshape(len(threads), -1)
        m.copies.append((threads, m.copy_groups[threads], place, data, g, me))

    return run


@operation("ldmatrix", "stmatrix")
def op_matrix(m, i, rest):
    """8 x 8 matrices of 16 bits: row r of the j-th lies where lane 8 j + r says."""
    load, count = i.opcode.startswith("ld"), int(rest[3][1:])
    where = m.address(i.operands[1 if load else 0])

    def run(w):
        threads = m.threads.reshape(-1, 32)[m.groups(w, 32, i), : 8 * count].ravel()
        g, me = m.shared.granules(m.shared.place(where(threads), 16, i), 16, threads)
        (m.shared.on_read if load else m.shared.on_write)(g, me, i)
        if not load:
            m.shared.note_write(g, me)

    return run


# ------------------------------------------------------------------ wgmma

GROUP = 128  # threads of a warp group


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
        return (
            r % 8 * wide + k % 8 * 2 + (16 * far if swizzle else 0),
            (none if swizzle else far + none),
            r // 8 + none,
        )
    if swizzle == 0:
        return r % 8 * 2 + k % 8 * 16 + none, k // 8 + none, r // 8 + none
    return r % (wide // 2) * 2 + k % 8 * wide + none, r // (wide // 2) + none, k // 8 + none


@operation("wgmma")
def op_wgmma(m, i, rest):
    """Asynchronous Warpgroup Level Matrix Multiply-Accumulate: its operands in shared memory are free when it is waited for."""
    shared = m.shared
    if rest[0] == "fence":
        return lambda w: m.groups(w, GROUP, i)
    if rest[0] == "commit_group":

        def commit(w):
            m.product_groups[m.groups(w, GROUP, i)] += 1

        return commit
    if rest[0] == "wait_group":

        def wait(w):
            active, remaining = m.groups(w, GROUP, i), []
            for group, number, read in m.products:
                if group in active and number < m.product_groups[group] - int(i.operands[0]):
                    shared.multiplied[read] -= 1
                    first = np.full(len(read), group * GROUP)
                    shared.note_read(read, first, first + GROUP - 1)
                else:
                    remaining.append((group, number, read))
            m.products = remaining

        return wait
    columns = int(re.fullmatch(r"m64n(\d+)k16", rest[3]).group(1))
    _, a, b, _, *immediate = i.operands
    operands = [(b, columns, int(immediate[-1]))]
    if a[0] == "%":  # a descriptor, too, and no registers
        operands.append((a, 64, int(immediate[2])))

    def granules(descriptor, rows, transposed, group):
        """Granules that one warp group reads through a matrix descriptor."""
        bits = m.register(descriptor).reshape(-1, GROUP)[group]
        if (bits != bits[0]).any() or bits[0] >> 49 & 7:
            raise Fault(
                f"a matrix descriptor that differs among threads, or with a base offset: {i}"
            )
        start, leading, stride = ((int(bits[0]) >> shift & 0x3FFF) * 16 for shift in (0, 16, 32))
        swizzle = (0, 128, 64, 32)[int(bits[0]) >> 62 & 3]
        inside, l, s = tile(rows, swizzle, transposed)
        address = start + inside + leading * l + stride * s
        if swizzle:  # bits 4.. meet bits 7..
            address ^= (address >> 3) & (swizzle - 16)
        return np.unique(shared.place(address.ravel(), 2, i) // shared.granule)

    def run(w):
        for group in m.groups(w, GROUP, i):
            read = np.unique(np.concatenate([granules(*operand, group) for operand in operands]))
            shared.on_product(read, group * GROUP, i)
            shared.multiplied[read] += 1
            m.products.append((group, m.product_groups[group], read))

    return run
