"""Instructions of threads together: branches and barriers, shuffles, memory, matrix products."""

import functools
import re

import numpy as np

from .machine import GROUP, TYPES, from_bf16, operation
from .memory import Fault

CACHING = re.compile(r"nc|ca|cg|cs|lu|wb|wt|volatile|relaxed|weak|gpu|cta|sys|L[12]::[\w:]+")

# -------------------------------------------------------------------- control


@operation("bra")
def op_branch(m, i, rest):
    to = m.kernel.labels[i.operands[0]]
    return lambda w: (m.lanes(w), to)


@operation("ret", "exit")
def op_return(m, i, rest):
    return lambda w: (m.lanes(w), len(m.kernel.blocks))


@operation("bar", "barrier", "fence")
def op_barrier(m, i, rest):
    if rest == ["warp", "sync"] and i.operands == ("-1",):
        times, together = m.shared.warp, 32
    elif rest in (["sync"], ["cta", "sync"]) and i.operands[1:] in ((), (str(m.threads),)):
        times, together = m.shared.barrier, m.threads
    elif rest == ["proxy", "async", "shared::cta"]:
        times, together = m.shared.fence, 1
    else:
        return None

    def run(w):
        m.whole(w, together, i)
        times[m.lanes(w)] = m.shared.now

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


@operation("ld", "st")
def op_access(m, i, rest):
    """ld and st, of vectors, too. A register that is wider than the type is extended as the type says."""
    load, space, kind = i.opcode.startswith("ld"), rest[0].split("::")[0], rest[-1]
    if kind not in TYPES or any(not CACHING.fullmatch(x) for x in rest[1:-1] if x not in ("v2", "v4")):
        return None
    if space not in ("local", "global", "shared", *(["param"] if load else [])):
        return None
    registers, address = i.operands if load else i.operands[::-1]
    names, where, bits = m.vector(registers), m.address(address), f"b{kind[1:]}"
    width = np.dtype(TYPES[kind]).itemsize
    size, columns = width * len(names), np.arange(len(names))
    values = [m.write(x, kind) if load else np.broadcast_to(m.read(x, bits), m.n) for x in names]

    def run(w):
        lanes = m.lanes(w)
        if not len(lanes):
            return
        address, data = m.at(where, lanes), None if load else np.stack([x[lanes] for x in values], axis=1)
        if space == "shared":
            place = m.shared.place(address, size, lanes, i)
            if m.traffic is not None:
                m.traffic.shared(i, lanes, address, size)
            if load:
                data = m.shared.load(place, size, width, lanes, i)
            else:
                m.shared.store(place, data, size, lanes, i)
        else:
            if space == "global":
                piece, offset = m.memory.place(address, size, i)
                m.memory.touch(piece, offset, size, m.program[lanes], m.findings, i, write=not load)
                if m.traffic is not None:
                    m.traffic.device(i, lanes, address, size)
                memory, index = m.memory.view(piece, width), offset[:, None] // width + columns
            elif space == "local":
                memory, index = m.local.view(f"u{width}"), m.own(address, lanes, size, width, i)
            else:
                memory, index = m.parameters.view(f"u{width}"), address[:, None] // width + columns
            if load:
                data = memory[index]
            else:
                memory[index] = data
        for k in columns if load else ():
            values[k][lanes] = data[:, k].view(TYPES[kind])

    return run


@operation("cp")
def op_copy(m, i, rest):
    """cp.async: lands when its group is waited for; until then nothing may touch the place. Given no bytes: zeros."""
    if rest == ["async", "commit_group"]:

        def commit(w):
            m.copy_groups[m.lanes(w)] += 1

        return commit
    if rest == ["async", "wait_group"]:

        def wait(w):
            active, remaining = np.zeros(m.n, bool), []
            active[m.lanes(w)] = True
            for lanes, group, place, data, g, me in m.copies:
                ready = active[lanes] & (group < m.copy_groups[lanes] - int(i.operands[0]))
                m.shared.copying[g[ready]] = 0
                m.shared.note_write(g[ready], me[ready], copied=True)
                m.shared.views[1][place[ready, None] + np.arange(data.shape[1])] = data[ready]
                if not ready.all():
                    remaining.append(tuple(x[~ready] for x in (lanes, group, place, data, g, me)))
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
        address = m.at(to, lanes)
        place = m.shared.place(address, size, lanes, i)
        count = np.broadcast_to(given, m.n)[lanes]
        data = np.zeros((len(lanes), size), np.uint8)
        if not np.isin(count, (0, size)).all():
            raise Fault(f"cp.async of a part of its bytes: {i}")
        full = np.flatnonzero(count == size)
        if len(full):
            far = m.at(source, lanes[full])
            piece, offset = m.memory.place(far, size, i)
            m.memory.touch(piece, offset, size, m.program[lanes[full]], m.findings, i, write=False)
            if m.traffic is not None:
                m.traffic.device(i, lanes[full], far, size)
            data[full] = m.memory.pieces[piece][offset[:, None] + np.arange(size)]
        if m.traffic is not None:
            m.traffic.shared(i, lanes, address, size)
        g, me = m.shared.granules(place, size, lanes)
        m.shared.on_write(g, me, i)
        m.shared.copying[g] = 1
        m.shared.writer[g] = me
        g, me = g.reshape(len(lanes), -1), me.reshape(len(lanes), -1)
        m.copies.append((lanes, m.copy_groups[lanes], place, data, g, me))

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
        address = m.at(where, lanes)
        place = m.shared.place(address, 16, lanes, i)
        if m.traffic is not None:
            m.traffic.shared(i, lanes, address, 16)
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
                    changed = np.count_nonzero(m.register(name).reshape(-1, GROUP)[group] != before)
                    m.findings.add("an operand of wgmma changes before it is waited for", where, changed)
                shared.multiplied[read] -= 1
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
        bits = bits.astype(np.int64)
        start, leading, stride = ((bits >> shift & 0x3FFF) * 16 for shift in (0, 16, 32))
        if (bits >> 49 & 7).any():
            raise Fault(f"a matrix descriptor with a base offset: {i}")
        (mode,) = np.unique(bits >> 62 & 3)
        swizzle = (0, 128, 64, 32)[mode]
        inside, l, s = tile(rows, swizzle, transposed)
        address = start[:, None, None] + inside + leading[:, None, None] * l + stride[:, None, None] * s
        if swizzle:  # bits 4.. meet bits 7..
            address ^= (address >> 3) & (swizzle - 16)
        place = shared.place(address.ravel(), 2, np.repeat(threads, rows * 16), i).reshape(-1, rows, 16)
        read = [np.unique(x // shared.granule) for x in place]
        for g, thread in zip(read, threads, strict=True):
            shared.on_read(g, np.full(len(g), thread), i, proxy=True)
        if m.traffic is not None:
            m.traffic.operands(i, len(groups), rows * 16)
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
            read = [np.union1d(*both) for both in zip(read, also, strict=True)]
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
            shared.multiplied[g] += 1
            kept = {x: m.register(x).reshape(-1, GROUP)[group].copy() for x in (a if from_registers else ())}
            m.products.append((group, m.product_groups[group], d, g, kept, i))

    return run
