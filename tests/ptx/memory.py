"""Global and shared memory for the emulator, with what it knows of their contents beside them.

Addresses are those that a program would see: every tensor lies 8 GB from the next, and an address cut to 32 bits hits nothing.

Shared memory keeps for every granule (the narrowest access of the kernel) who wrote it and when, who read it and when, and
what is under way. Two accesses, one of them a write, by different threads must have a barrier between them (PTX ISA: Memory
Consistency Model, Causality Order); accesses within one warp, which runs in step on the GPUs there are, are counted apart.
"""

import numpy as np

SPAN = 1 << 33
SHARED_BASE = 1024  # what sm_90 keeps for itself; the emulated kernels find a base aligned to 1,024 there as on sm_90


class Fault(Exception):
    """What the kernel must never do. The text says what, where."""


class Findings(dict):
    """{(kind, instruction): how many}. Kinds that begin with "note:" are no faults: within a warp, or of cp.async."""

    def add(self, kind, where, count):
        if count:
            self[kind, str(where)] = self.get((kind, str(where)), 0) + int(count)

    def faults(self):
        return {k: n for k, n in self.items() if not k[0].startswith("note:")}


class Global:
    def __init__(self, storages, constants):
        """storages: those of the tensors as uint8, written in place; constants: {name: bytes}."""
        self.pieces = [*storages, *(np.frombuffer(x, np.uint8) for x in constants.values())]
        self.symbols = {name: (len(storages) + i + 1) * SPAN for i, name in enumerate(constants)}
        # Which program read and wrote a pair of bytes in this launch: 0 none, -1 several.
        self.readers, self.writers = ([np.zeros(len(x) // 2 + 1, np.int32) for x in self.pieces] for _ in range(2))

    def place(self, address, size, where):
        """(the tensor, byte offsets) of `size` bytes at these addresses, which must lie in one tensor and be aligned."""
        piece = int(address[0] >> 33) - 1
        offset = address - (piece + 1) * SPAN
        inside = (
            (offset >= 0) & (offset + size <= len(self.pieces[piece])) if 0 <= piece < len(self.pieces) else offset < 0
        )
        if not inside.all():
            raise Fault(f"{np.count_nonzero(~inside)} accesses outside of the tensor: {where}")
        if (offset % size).any():
            raise Fault(f"an access that is not aligned to its {size} bytes: {where}")
        return piece, offset

    def view(self, piece, width):
        x = self.pieces[piece]
        return x[: len(x) // width * width].view(f"u{width}")

    def touch(self, piece, offset, size, programs, findings, where, *, write):
        """Programs have no order among them: what one writes no other may touch in the same launch."""
        pairs = (offset[:, None] // 2 + np.arange(max(1, size // 2))).ravel()
        programs = np.repeat(programs + 1, max(1, size // 2)).astype(np.int32)
        readers, writers = self.readers[piece], self.writers[piece]
        written, read = writers[pairs], readers[pairs]
        wrong = (written != 0) & (written != programs)
        if write:
            wrong |= (read != 0) & (read != programs)
            writers[pairs] = programs
        else:
            readers[pairs] = np.where((read == 0) | (read == programs), programs, -1)
        findings.add("global memory that another program touches", where, np.count_nonzero(wrong))


class Shared:
    """Shared memory of all programs of a batch, one after another."""

    def __init__(self, programs, size, threads, granule, findings):
        self.size, self.threads, self.granule, self.findings = size, threads, granule, findings
        self.stride = -(-size // 16) * 16
        self.bytes = np.full(programs * self.stride, 0xFF, np.uint8)  # NaN in every format, -1 as a number
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        n = programs * self.stride // granule
        self.writer, self.wrote = np.full(n, -1, np.int32), np.full(n, -1, np.int64)
        self.first, self.last, self.read = np.zeros(n, np.int32), np.zeros(n, np.int32), np.full(n, -1, np.int64)
        self.copying, self.multiplied = (
            np.zeros(n, np.int16),
            np.zeros(n, np.int16),
        )  # cp.async into it, wgmma out of it
        self.copied, self.now = np.zeros(n, bool), 0
        self.barrier, self.warp, self.fence = (np.zeros(programs * threads, np.int64) for _ in range(3))

    def place(self, address, size, thread, where):
        """Byte offsets of `size` bytes at these addresses, in the memory of each thread's program."""
        offset = address.astype(np.int64) - SHARED_BASE
        if ((offset < 0) | (offset + size > self.size)).any():
            raise Fault(f"an access outside of shared memory: {where}")
        if (offset % size).any():
            raise Fault(f"an access that is not aligned to its {size} bytes: {where}")
        return thread // self.threads * self.stride + offset

    def granules(self, place, size, thread):
        n = max(1, size // self.granule)
        return (place[:, None] // self.granule + np.arange(n)).ravel(), np.repeat(thread, n).astype(np.int32)

    def _unordered(self, kind, when, first, last, me, where):
        """Counts those at `when` by threads `first` to `last` which nothing orders before what `me` does now."""
        others = (when >= self.barrier[me]) & ((first != me) | (last != me))
        if others.any():
            near = others & (first >> 5 == me >> 5) & (last >> 5 == me >> 5)
            self.findings.add(kind, where, np.count_nonzero(others & ~near))
            self.findings.add(f"note: within a warp, {kind}", where, np.count_nonzero(near & (when >= self.warp[me])))

    def on_read(self, g, me, where, *, proxy=False):
        add = self.findings.add
        add("shared memory that nothing has written is read", where, np.count_nonzero(self.writer[g] < 0))
        add("read before cp.async is waited for", where, np.count_nonzero(self.copying[g]))
        kind, wrote, writer = "read of what another thread wrote since the last barrier", self.wrote[g], self.writer[g]
        if proxy:  # all threads of a warp group read, and read past the cache of what they wrote themselves
            add(kind, where, np.count_nonzero(wrote >= self.barrier[me]))
            late, kind = wrote >= self.fence[me], "wgmma reads what no fence.proxy.async came after"
            add(kind, where, np.count_nonzero(late & ~self.copied[g]))
            add(f"note: of cp.async, {kind}", where, np.count_nonzero(late & self.copied[g]))
        else:
            self._unordered(kind, wrote, writer, writer, me, where)
            self.note_read(g, me, me)

    def note_read(self, g, first, last):
        fresh = self.read[g] < self.barrier[first]
        low = np.where(fresh, first, np.minimum(self.first[g], first))
        high = np.where(fresh, last, np.maximum(self.last[g], last))
        self.first[g[::-1]] = low[::-1]  # of threads that read one granule at once, the first one stays
        self.last[g] = high  # and the last
        self.read[g] = self.now

    def on_write(self, g, me, where):
        add = self.findings.add
        add("write to what cp.async still fills", where, np.count_nonzero(self.copying[g]))
        add("write to what wgmma still reads", where, np.count_nonzero(self.multiplied[g]))
        writer = self.writer[g]
        self._unordered(
            "write to what another thread wrote since the last barrier", self.wrote[g], writer, writer, me, where
        )
        self._unordered(
            "write to what another thread read since the last barrier",
            self.read[g],
            self.first[g],
            self.last[g],
            me,
            where,
        )

    def note_write(self, g, me, *, copied=False):
        self.writer[g], self.wrote[g], self.copied[g] = me, self.now, copied

    def store(self, place, data, size, thread, where):
        """data [accesses, elements], elements of data's own width."""
        g, me = self.granules(place, size, thread)
        self.on_write(g, me, where)
        self.note_write(g, me)
        width = data.dtype.itemsize
        at = place[:, None] // width + np.arange(size // width)
        self.views[width][at] = data
        # Copies of one number in several threads may be stored by all of them; different numbers may not.
        lost = (self.views[width][at] != data).any(1)
        self.findings.add("threads store different numbers at once", where, np.count_nonzero(lost))

    def load(self, place, size, width, thread, where):
        g, me = self.granules(place, size, thread)
        self.on_read(g, me, where)
        return self.views[width][place[:, None] // width + np.arange(size // width)]
