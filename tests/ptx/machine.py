"""Follows one program of a compiled kernel: addresses, branches, barriers and accesses to memory, in NumPy over its threads.

Numbers are not computed: instructions of floating point and matrix products write nothing, and their registers stay -1, which
as an address is a `Fault`. An instruction that is not known is a `Fault`, too, when it is reached. Threads that take different
branches wait for each other: the block that stands first in the text runs first, for the threads that are there. What a GPU
runs out of order, cp.async and wgmma, is under way here until it is waited for. Sections named are those of the PTX ISA.

A function `op_...(m, i, active)` executes the instruction i of the machine m for the threads that are active.
"""

import operator
import re

import numpy as np

from .memory import SHARED_BASE, Fault, Global, Shared
from .parse import Instruction, Kernel

WARP = 32
WARP_GROUP = 128
FLOATS = {"f16", "f32", "f64", "bf16", "bf16x2", "f16x2", "tf32"}
# The slow path of sine and cosine, and numbers in pairs; local memory holds nothing else.
IGNORED = {"call", "clz", "addc", "subc", "madc", "shf", "fma", "mma"}
IGNORED |= {"ex2", "lg2", "sqrt", "rsqrt", "rcp"}


def computes_numbers(i: Instruction):
    """Tells whether the instruction has to do with numbers only, which are not followed."""
    if i.name in IGNORED or "local" in i.modifiers or "cc" in i.modifiers:
        return True
    return i.name != "wgmma" and not FLOATS.isdisjoint(i.modifiers)


def wrap(x, kind):
    """Returns int64 cut to the width of a type, with a sign if it has one."""
    bits = int(kind[1:])
    if bits == 64:
        return x
    x = x & ((1 << bits) - 1)
    if kind[0] == "s":
        sign = 1 << bits - 1
        return (x ^ sign) - sign
    return x


class Machine:
    """One program of a kernel.

    Args:
        kernel: Its instructions.
        memory: The tensors.
        shared: Its shared memory.
        parameters: The values of its parameters.
        program: Its number.
    """

    def __init__(self, kernel: Kernel, memory: Global, shared: Shared, parameters, program):
        n = kernel.threads
        self.kernel = kernel
        self.memory = memory
        self.shared = shared
        self.n = n
        self.threads = np.arange(n)
        # The last parameters are pointers to scratch that is not there.
        self.parameters = dict.fromkeys(kernel.parameters, 0)
        self.parameters.update(zip(kernel.parameters, parameters, strict=False))
        self.registers = {
            "%tid.x": self.threads,
            "%ctaid.x": np.full(n, program),
            "%laneid": self.threads % WARP,
        }
        self.symbols = {"global_smem": SHARED_BASE, **memory.symbols}
        # What is under way, and the number of groups that were committed.
        self.copies = []
        self.copy_groups = 0
        self.products = []
        self.product_groups = np.zeros(n // WARP, int)

    def run(self):
        at = np.zeros(self.n, int)
        while (block := at.min()) < len(self.kernel.blocks):
            here = at == block
            at[here] = block + 1
            for i in self.kernel.blocks[block]:
                if computes_numbers(i):
                    continue
                self.shared.now += 1
                active = here & self.guard(i)
                if active.any():
                    target = OPERATIONS.get(i.name, refuse)(self, i, active)
                    if target is not None:
                        at[active] = target

    def guard(self, i: Instruction):
        """Tells which threads execute the instruction."""
        if not i.guard:
            return True
        predicate = self.register(i.guard.removeprefix("!"))
        if i.guard[0] == "!":
            return ~predicate
        return predicate

    def groups(self, active, size, i):
        """Returns the numbers of the groups of `size` threads that are active, each with all of its threads."""
        active = active.reshape(-1, size)
        some = active.any(1)
        if (active.all(1) != some).any():
            raise Fault(f"not all threads of {size} are there: {i}")
        return np.flatnonzero(some)

    def register(self, name):
        if name not in self.registers:
            predicate = {name, name.rstrip("0123456789")} & self.kernel.predicates
            self.registers[name] = np.zeros(self.n, bool) if predicate else np.full(self.n, -1)
        return self.registers[name]

    def read(self, text):
        """Returns a register (its array), or a number of any kind; floats are not computed."""
        if text in self.symbols:
            return np.int64(self.symbols[text])
        if text[0] not in "-0123456789":
            return self.register(text)
        if text.startswith(("0f", "0d")):
            return np.int64(-1)
        return np.uint64(int(text.rstrip("U"), 0) % 2**64).astype(np.int64)

    def sources(self, i: Instruction):
        """Returns what is read: all operands but the first."""
        return [self.read(operand) for operand in i.operands[1:]]

    def write(self, i: Instruction, value, active):
        """Writes the register that the first operand names."""
        np.copyto(self.register(i.operands[0]), value, where=active)

    def vector(self, text):
        """Returns the registers of a vector; None for those that are left out."""
        names = [name.strip() for name in text.strip("{}").split(",")]
        return [None if name == "_" else self.read(name) for name in names]

    def address(self, text):
        """Returns the address [register + offset] or [symbol + offset] of each thread."""
        base, _, offset = text.strip("[] ").partition("+")
        return np.broadcast_to(self.read(base.strip()), self.n) + int(offset.strip() or "0", 0)


def refuse(m, i, active):
    raise Fault(f"the emulator has no {i}")


# ------------------------------------------------------------------ integers


def unsigned(x):
    return np.asarray(x).view(np.uint64)


def quotient(a, b):
    """Rounds towards zero, as in C; for a division by zero it is anything."""
    q = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) != (b < 0), -q, q)


def remainder(a, b):
    return a - quotient(a, b) * b


def shift_left(a, n):
    return np.where(n > 63, 0, a << np.minimum(n, 63))


# Functions of int64
INTEGERS = {
    "add": operator.add,
    "sub": operator.sub,
    "neg": operator.neg,
    "abs": operator.abs,
    "div": quotient,
    "rem": remainder,
    "min": np.minimum,
    "max": np.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": np.invert,
    "shl": shift_left,
}


def op_integers(m, i, active):
    kind = i.modifiers[-1]
    function = INTEGERS[i.name]
    if kind == "pred":
        value = function(*[np.not_equal(x, 0) for x in m.sources(i)])
    else:
        value = wrap(function(*[wrap(x, kind) for x in m.sources(i)]), f"u{kind[1:]}")
    m.write(i, value, active)


def op_select(m, i, active):
    a, b, predicate = m.sources(i)
    m.write(i, wrap(np.where(predicate, a, b), f"u{i.modifiers[0][1:]}"), active)


def op_extract(m, i, active):
    """Takes bits out of a number, which have a sign if the type has one."""
    kind = i.modifiers[0]
    a, first, bits = m.sources(i)
    field = wrap(a >> first, f"{kind[0]}{bits}")
    m.write(i, wrap(field, f"u{kind[1:]}"), active)


def op_permute(m, i, active):
    """Each nibble of the selector names one of eight bytes; its high bit, which asks for a sign, is not used in addresses."""
    a, b, selector = m.sources(i)
    both = wrap(a, "u32") | wrap(b, "u32") << 32
    total = 0
    for k in range(4):
        byte = selector >> 4 * k & 7
        total = total | (both >> 8 * byte & 255) << 8 * k
    m.write(i, total, active)


def op_shift_right(m, i, active):
    kind = i.modifiers[0]
    a, n = m.sources(i)
    n = np.minimum(n, 63)
    if kind in ("b64", "u64"):
        value = (unsigned(a) >> unsigned(n)).view(np.int64)
    else:
        value = wrap(wrap(a, kind) >> n, f"u{kind[1:]}")
    m.write(i, value, active)


def op_multiply(m, i, active):
    how, kind = i.modifiers
    a, b, *addend = m.sources(i)
    value = wrap(a, kind) * wrap(b, kind)
    bits = int(kind[1:])
    if how == "wide":
        bits *= 2
    if how == "hi":  # of 32 bits: 64 hold the product
        value = value >> 32
    m.write(i, wrap(sum(addend, value), f"u{bits}"), active)


def op_convert(m, i, active):
    to, kind = i.modifiers[-2:]
    (a,) = m.sources(i)
    m.write(i, wrap(wrap(a, kind), f"u{to[1:]}"), active)


def op_compare(m, i, active):
    how, kind = i.modifiers
    if kind == "u64":
        a, b = (unsigned(x) for x in m.sources(i))
    else:
        a, b = (wrap(x, kind) for x in m.sources(i))
    unsigned_names = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    compare = getattr(operator, unsigned_names.get(how, how))
    m.write(i, compare(a, b), active)


def op_move(m, i, active):
    if "{" in i.operands[0] + i.operands[1]:  # parts of a register: numbers
        return
    (value,) = m.sources(i)
    if i.modifiers == ["pred"]:
        value = np.not_equal(value, 0)
    m.write(i, value, active)


# ------------------------------------------------------------------ control and threads together


def op_branch(m, i, active):
    return m.kernel.labels[i.operands[0]]


def op_return(m, i, active):
    return len(m.kernel.blocks)


def op_barrier(m, i, active):
    if i.modifiers == ["warp", "sync"] and i.operands == ("-1",):
        m.groups(active, WARP, i)
    elif i.modifiers == ["proxy", "async", "shared::cta"]:
        m.shared.fence[active] = m.shared.now
    elif i.modifiers in (["sync"], ["cta", "sync"]) and i.operands[1:] in ((), (str(m.n),)):
        m.groups(active, m.n, i)
        m.shared.barrier[:] = m.shared.now
    else:
        refuse(m, i, active)


def op_shuffle(m, i, active):
    to, a, by, _, members = i.operands
    if i.modifiers[0] != "sync" or members != "-1" or "|" in to:
        refuse(m, i, active)
    warps = m.groups(active, WARP, i)
    lane = np.arange(WARP)
    n = np.broadcast_to(m.read(by), m.n).reshape(-1, WARP)[warps] & 31
    sources = {"up": lane - n, "down": lane + n, "bfly": lane ^ n, "idx": n}
    source = sources[i.modifiers[1]]
    source = np.where((source >= 0) & (source < WARP), source, lane)
    value = m.read(a).reshape(-1, WARP)[warps]
    m.register(to).reshape(-1, WARP)[warps] = np.take_along_axis(value, source, axis=1)


# ------------------------------------------------------------------ memory


def access(m, i, address, size, active, *, store):
    """Accesses global or shared memory. Returns its bytes and indices [accesses, size]."""
    space = i.modifiers[0].partition("::")[0]
    addresses = m.address(address)[active]
    if space == "global":
        return m.memory.access(addresses, size, i)
    if space == "shared":
        return m.shared.access(addresses, size, m.threads[active], i, store=store)
    return refuse(m, i, active)


def width_of(i):
    """Returns the bytes of a number of ld or st."""
    return int(re.sub(r"\D", "", i.modifiers[-1])) // 8


def op_load(m, i, active):
    to, address = i.operands
    if i.modifiers[0] == "param":
        name = address.strip("[] ")
        if name in m.parameters:  # the others are those of a call
            m.write(i, m.parameters[name], active)
        return
    registers = m.vector(to)
    width = width_of(i)
    memory, index = access(m, i, address, width * len(registers), active, store=False)
    numbers = memory[index].view(f"u{width}").astype(np.int64)
    for register, column in zip(registers, numbers.T, strict=True):
        if register is not None:
            register[active] = column


def op_store(m, i, active):
    """Stores numbers; -1 is what the register of a float stores."""
    if i.modifiers[0] == "param":  # of a call
        return
    address, values = i.operands
    columns = [np.broadcast_to(x, m.n)[active] for x in m.vector(values)]
    width = width_of(i)
    memory, index = access(m, i, address, width * len(columns), active, store=True)
    numbers = np.stack(columns, axis=1).astype(f"u{width}")
    memory[index] = numbers.view(np.uint8)


def op_copy(m, i, active):
    """cp.async: lands when its group is waited for; until then nothing may touch the place. Given no bytes: zeros."""
    if i.modifiers == ["async", "commit_group"]:
        m.groups(active, m.n, i)
        m.copy_groups += 1
    elif i.modifiers == ["async", "wait_group"]:
        m.groups(active, m.n, i)
        land_copies(m, m.copy_groups - int(i.operands[0]))
    elif i.modifiers[0] == "async" and i.modifiers[2:] == ["shared", "global"]:
        start_copy(m, i, active)
    else:
        refuse(m, i, active)


def start_copy(m, i, active):
    to, source, size, *given = i.operands
    size = int(size, 0)
    threads = m.threads[active]
    place = m.shared.place(m.address(to)[active], size, i)
    full = active
    if given:
        full = active & (m.read(given[0]) == size)
    data = np.zeros((m.n, size), np.uint8)
    if full.any():
        memory, index = m.memory.access(m.address(source)[full], size, i)
        data[full] = memory[index]
    granules, owners = m.shared.granules(place, size, threads)
    m.shared.check_write(granules, owners, i)
    m.shared.copying[granules] = 1
    m.shared.writer[granules] = owners
    index = place[:, None] + np.arange(size)
    m.copies.append((m.copy_groups, index, data[active], granules, owners))


def land_copies(m, groups):
    """Ends the copies of the first groups."""
    under_way = []
    for copy in m.copies:
        group, index, data, granules, owners = copy
        if group < groups:
            m.shared.copying[granules] = 0
            m.shared.note_write(granules, owners, copied=True)
            m.shared.bytes[index] = data
        else:
            under_way.append(copy)
    m.copies = under_way


def op_matrix(m, i, active):
    """ldmatrix, stmatrix: 8 x 8 matrices of 16 bits. Row r of the j-th lies where lane 8 j + r says."""
    store = i.name == "stmatrix"
    address = i.operands[0 if store else 1]
    rows = 8 * int(i.modifiers[3].removeprefix("x"))
    threads = m.threads.reshape(-1, WARP)[m.groups(active, WARP, i), :rows].ravel()
    m.shared.access(m.address(address)[threads], 16, threads, i, store=store)


# ------------------------------------------------------------------ wgmma


def op_wgmma(m, i, active):
    """Asynchronous Warpgroup Level Matrix Multiply-Accumulate: its operands in shared memory are free when it is waited for."""
    groups = m.groups(active, WARP_GROUP, i)
    step = i.modifiers[0]
    if step == "commit_group":
        m.product_groups[groups] += 1
    elif step == "wait_group":
        end_products(m, groups, int(i.operands[0]))
    elif step != "fence":
        for group in groups:
            start_product(m, i, group)


def start_product(m, i, group):
    _, a, b, _, *immediates = i.operands
    columns = int(re.sub(r"m64n(\d+)k16", r"\1", i.modifiers[3]))
    read = granules_of_matrix(m, i, group, b, columns, immediates[-1] == "1")
    if a[0] == "%":  # a descriptor, too, and no registers
        read_of_a = granules_of_matrix(m, i, group, a, 64, immediates[2] == "1")
        read = np.union1d(read, read_of_a)
    m.shared.check_product(read, group * WARP_GROUP, i)
    m.shared.multiplied[read] += 1
    m.products.append((group, m.product_groups[group], read))


def end_products(m, groups, left):
    """Ends the products of warp groups, but for those of the last groups that were committed."""
    under_way = []
    for product in m.products:
        group, number, read = product
        if group in groups and number < m.product_groups[group] - left:
            m.shared.multiplied[read] -= 1
            first = np.full(len(read), group * WARP_GROUP)
            m.shared.note_read(read, first, first + WARP_GROUP - 1)
        else:
            under_way.append(product)
    m.products = under_way


def granules_of_matrix(m, i, group, descriptor, rows, transposed):
    """Returns the granules that a warp group reads through a matrix descriptor."""
    values = m.register(descriptor).reshape(-1, WARP_GROUP)[group]
    bits = int(values[0])
    if (values != bits).any():
        raise Fault(f"a matrix descriptor that differs among threads: {i}")
    if bits >> 49 & 7:
        raise Fault(f"a matrix descriptor with a base offset: {i}")
    # Addresses and offsets are multiples of 16 bytes.
    start = (bits & 0x3FFF) * 16
    leading = (bits >> 16 & 0x3FFF) * 16
    stride = (bits >> 32 & 0x3FFF) * 16
    swizzle = (0, 128, 64, 32)[bits >> 62 & 3]
    address = start + tile_offsets(rows, swizzle, transposed, leading, stride)
    if swizzle:  # bits 4.. meet bits 7..
        address ^= (address >> 3) & (swizzle - 16)
    place = m.shared.place(address.ravel(), 2, i)
    return np.unique(place // m.shared.granule)


def tile_offsets(rows, swizzle, transposed, leading, stride):
    """Returns where a tile [rows, 16] of bf16 lies, in bytes.

    Strides of the canonical layouts (Asynchronous Warpgroup Level Matrix Shared Memory Layout), T = 8 numbers of 16 bytes; rows
    are those of A and the columns of B. As they are: ((8, rows), (T, 2)) : ((W T, SBO), (1, LBO or T)), W = 1, 2, 4, 8 for
    swizzles of 0, 32, 64, 128 bytes. Transposed: ((T, W, rows), (8, 2)) : ((1, T, LBO), (W T, SBO)).
    """
    r = np.arange(rows)[:, None]
    k = np.arange(16)[None, :]
    if transposed and swizzle:
        wide = swizzle // 2
        row = r % wide * 2 + r // wide * leading
        return row + k % 8 * swizzle + k // 8 * stride
    if transposed:
        return r % 8 * 2 + r // 8 * stride + k % 8 * 16 + k // 8 * leading
    row = r % 8 * max(16, swizzle) + r // 8 * stride
    return row + k % 8 * 2 + k // 8 * (16 if swizzle else leading)


OPERATIONS = {
    **dict.fromkeys(INTEGERS, op_integers),
    "selp": op_select,
    "bfe": op_extract,
    "prmt": op_permute,
    "shr": op_shift_right,
    "mul": op_multiply,
    "mad": op_multiply,
    "cvt": op_convert,
    "cvta": op_move,
    "mov": op_move,
    "setp": op_compare,
    "bra": op_branch,
    "ret": op_return,
    "exit": op_return,
    "bar": op_barrier,
    "barrier": op_barrier,
    "fence": op_barrier,
    "shfl": op_shuffle,
    "ld": op_load,
    "st": op_store,
    "cp": op_copy,
    "ldmatrix": op_matrix,
    "stmatrix": op_matrix,
    "wgmma": op_wgmma,
}
