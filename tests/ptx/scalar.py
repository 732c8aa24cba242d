"""Instructions of each thread by itself: arithmetic, comparison, conversion (PTX ISA: the sections of these names).

`operation` registers a function (machine, instruction, modifiers of the opcode) that returns one of the mask of active threads,
or None for what it does not know.
"""

import operator

import numpy as np

from .machine import FLOATS, TYPES, from_bf16, operation, to_bf16


def flush(x):
    """.ftz: subnormal numbers are zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fma(a, b, c):
    """a b + c rounded once: fp32 through fp64; fp64 by the errors of product and sum (Dekker, Knuth)."""
    if np.result_type(a) == np.float32:
        return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)
    p = a * b
    a1, b1 = (np.where(np.abs(x) < 2.0**900, x * 134217729.0 - (x * 134217729.0 - x), x) for x in (a, b))
    a2, b2 = a - a1, b - b1
    e = ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2
    s = p + c
    t = s - p
    total = s + (e + ((p - (s - t)) + (c - t)))
    return np.where(np.isfinite(total), total, s)


def quotient(a, b):
    """Towards zero, as in C; -1 for a division by zero, which PTX leaves open."""
    if np.issubdtype(np.result_type(a), np.floating):
        return a / b
    one = np.where(b == 0, 1, b)
    q = np.abs(a) // np.abs(one)
    return np.where(b == 0, -1, np.where((a < 0) != (b < 0), -q, q))


def elementwise(function, nan=None):
    """op.type d, a, b, ...: a function of typed arrays, a ufunc in place; `nan` for .NaN. bf16 through fp32."""

    def make(m, i, rest):
        *modes, kind = rest
        if not set(modes) <= {"rn", "ftz", "lo", "approx", "full", *(["NaN"] if nan else [])}:
            return None
        if kind in ("bf16", "bf16x2"):
            per = 1 if kind == "bf16" else 2
            if any(x[0] != "%" for x in i.operands):
                return None
            d, *args = (m.register(x).view(np.uint16) for x in i.operands)
            everywhere = lambda w: w if w is True else np.repeat(w, per)  # noqa: E731
            return lambda w: np.copyto(d, to_bf16(function(*map(from_bf16, args))), where=everywhere(w))
        if kind not in TYPES and kind != "pred":
            return None
        f = nan if "NaN" in modes else function
        d, args = m.write(i.operands[0], kind), [m.read(x, kind) for x in i.operands[1:]]
        if "ftz" in modes:
            return lambda w: np.copyto(d, flush(f(*map(flush, args))), where=w)
        if isinstance(f, np.ufunc):
            return lambda w: f(*args, out=d, where=w)
        return lambda w: np.copyto(d, f(*args), where=w)

    return make


one = np.float32(1)
for name, make in {
    "add": elementwise(np.add),
    "sub": elementwise(np.subtract),
    "neg": elementwise(np.negative),
    "fma": elementwise(fma),
    "div": elementwise(quotient),
    "rem": elementwise(lambda a, b: a - quotient(a, b) * b),
    "abs": elementwise(np.abs),
    "min": elementwise(np.fmin, nan=np.minimum),  # without .NaN the number, where one of the two is none
    "max": elementwise(np.fmax, nan=np.maximum),
    "ex2": elementwise(np.exp2),
    "lg2": elementwise(np.log2),
    "rcp": elementwise(lambda x: one / x),
    "sqrt": elementwise(np.sqrt),
    "rsqrt": elementwise(lambda x: one / np.sqrt(x)),
    "and": elementwise(np.bitwise_and),
    "or": elementwise(np.bitwise_or),
    "xor": elementwise(np.bitwise_xor),
    "not": elementwise(np.invert),
}.items():
    operation(name)(make)


@operation("mul", "mad")
def op_multiply(m, i, rest):
    """mul and mad: .lo, .hi, .wide (Integer Arithmetic Instructions), and floats."""
    (how, kind), mad = (rest[0], rest[-1]), i.opcode.startswith("mad")
    if not mad and (kind in FLOATS or kind.startswith("bf16")):
        return elementwise(np.multiply)(m, i, rest)
    if len(rest) != 2 or how not in ("lo", "hi", "wide") or (how != "lo" and kind[1:] != "32"):
        return None
    wide = f"{kind[0]}64" if how != "lo" else kind
    result = wide if how == "wide" else kind
    a, b, *c = m.read(i.operands[1], kind), m.read(i.operands[2], kind), *(m.read(x, result) for x in i.operands[3:])
    d = m.write(i.operands[0], result)

    def run(w):
        x = np.multiply(a, b, dtype=TYPES[wide])
        x = (x >> 32).astype(TYPES[kind]) if how == "hi" else x
        np.copyto(d, x + c[0] if mad else x, where=w)

    return run


@operation("shl", "shr")
def op_shift(m, i, rest):
    """Shifts by more than the width give what shifting bit by bit would."""
    d, a, by = m.write(i.operands[0], rest[0]), m.read(i.operands[1], rest[0]), m.read(i.operands[2], "u32")
    bits, left = int(rest[0][1:]), i.opcode.startswith("shl")

    def run(w):
        n = np.minimum(by, bits - 1).astype(a.dtype)
        x = a << n if left else a >> n
        np.copyto(d, x if not left and rest[0][0] == "s" else np.where(by >= bits, 0, x), where=w)

    return run


@operation("shf")
def op_funnel(m, i, rest):
    d, args = m.write(i.operands[0], "u32"), [m.read(x, "u32") for x in i.operands[1:]]
    if rest not in (["l", "wrap", "b32"], ["r", "wrap", "b32"]):
        return None

    def run(w):
        low, high, by = (np.asarray(x, np.uint64) for x in args)
        both, n = high << np.uint64(32) | low, by & np.uint64(31)
        np.copyto(d, ((both << n) >> np.uint64(32) if rest[0] == "l" else both >> n).astype(np.uint32), where=w)

    return run


@operation("bfe")
def op_extract(m, i, rest):
    d, a = m.write(i.operands[0], rest[0]), m.read(i.operands[1], rest[0])
    position, length = (-1 if x[0] == "%" else int(x, 0) for x in i.operands[2:])
    if position < 0 or not 0 < length <= 32 - position or rest[0] not in ("u32", "s32"):
        return None
    return lambda w: np.copyto(d, (a << d.dtype.type(32 - position - length)) >> d.dtype.type(32 - length), where=w)


@operation("prmt")
def op_permute(m, i, rest):
    """Default mode: each nibble of the selector names one of eight bytes, its high bit asks for the sign."""
    d, args = m.write(i.operands[0], "u32"), [m.read(x, "u32") for x in i.operands[1:]]
    if rest != ["b32"]:
        return None

    def run(w):
        a, b, selector = (np.asarray(x, np.int64) for x in args)
        total = 0
        for k in range(4):
            nibble = selector >> 4 * k
            byte = np.where(nibble & 4, b, a) >> 8 * (nibble & 3) & 255
            total = total | np.where(nibble & 8, np.where(byte & 128, 255, 0), byte) << 8 * k
        np.copyto(d, total.astype(np.uint32), where=w)

    return run


COMPARE = {x: getattr(operator, x) for x in ("eq", "ne", "lt", "le", "gt", "ge")}
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
    compare, unordered = COMPARE[how[:2]], how.endswith("u")
    if kind in FLOATS and (unordered or how == "ne"):
        return lambda w: np.copyto(d, np.where(np.isnan(a) | np.isnan(b), unordered, compare(a, b)), where=w)
    return lambda w: np.copyto(d, compare(a, b), where=w)


@operation("selp")
def op_select(m, i, rest):
    d, a, b = m.write(i.operands[0], rest[0]), *(m.read(x, rest[0]) for x in i.operands[1:3])
    p = m.read(i.operands[3], "pred")
    return lambda w: np.copyto(d, np.where(p, a, b), where=w)


@operation("mov", "cvta")
def op_move(m, i, rest):
    """Also between a register and the parts of it. The generic address of local memory is taken and not used: an access without
    its space is refused."""
    d, a, kind = *i.operands, rest[-1]
    if i.opcode.startswith("cvta") and rest != ["local", "u64"]:
        return None
    if d[0] == "{" or a[0] == "{":
        names, whole = (m.vector(d), m.read(a, kind)) if d[0] == "{" else (m.vector(a), m.write(d, kind))
        part = f"b{int(kind[1:]) // len(names)}"
        columns = whole.view(TYPES[part]).reshape(m.n, -1).T
        if d[0] == "{":
            pairs = list(zip([m.write(x, part) for x in names], columns, strict=True))
        else:
            pairs = list(zip(columns, [m.read(x, part) for x in names], strict=True))
        return lambda w: [np.copyto(x, y, where=w) for x, y in pairs]
    out, value = m.write(d, kind), m.read(a, kind)
    return lambda w: np.copyto(out, value, where=w)


ROUND = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@operation("cvt")
def op_convert(m, i, rest):
    """Integers saturate when they come from floats."""
    *mode, kind, source = rest
    bits = {"bf16": "b16", "bf16x2": "b32", "f16x2": "b32", "tf32": "b32"}
    if kind not in TYPES | bits or not set(mode) <= {"rn", "rna", "ftz", *ROUND} or (kind == "tf32") != ("rna" in mode):
        return None
    d, args = (
        m.write(i.operands[0], bits.get(kind, kind)),
        [m.read(x, bits.get(source, source)) for x in i.operands[1:]],
    )
    to, rounded = d.dtype, next((ROUND[x] for x in mode if x in ROUND), None)

    def convert(x):
        x = from_bf16(np.asarray(x)) if source == "bf16" else np.asarray(x)
        x = flush(x) if "ftz" in mode else x
        if kind == "tf32":
            return (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        if kind == "f16x2":
            return x.astype(np.float16).view(np.uint16)
        if kind in bits:
            return to_bf16(x.astype(np.float32))
        x = rounded(x) if rounded else x
        if kind[0] != "f" and source[0] in "fb" and rounded:
            x = np.nan_to_num(np.clip(x.astype(np.float64), np.iinfo(TYPES[kind]).min, np.iinfo(TYPES[kind]).max))
        return x.astype(TYPES[kind]).astype(to)

    if kind.endswith("x2"):  # the first goes up
        return lambda w: np.copyto(d, convert(args[0]).astype(np.uint32) << 16 | convert(args[1]), where=w)
    return lambda w: np.copyto(d, convert(args[0]), where=w)
