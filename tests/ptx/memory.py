"""Global and shared memory of one emulated program, and which accesses to shared memory nothing orders.

Shared memory keeps for every granule (the narrowest access of the kernel) who wrote it and when, who read it and when, and
what is under way. Two accesses, one of them a write, by threads of different warps must have a barrier between them (PTX ISA:
Memory Consistency Model, Causality Order). Threads of one warp run in step on the GPUs there are, and are not looked at.
"""

import numpy as np

SPAN = 1 << 33  # from one tensor to the next, so that an address cut to 32 bits hits none
SHARED_BASE = 1024  # as on sm_90, which keeps 1,024 bytes for itself


class Fault(Exception):
    """A thing that the kernel must never do. The text says what and where."""


class Findings(dict):
    """{(kind, instruction): how many}"""

    def add(self, kind, where, count):
        if count:
            self[kind, str(where)] = self.get((kind, str(where)), 0) + int(count)


class Global:
    def __init__(self, storages, constants):
        """storages: those of the tensors as uint8, written in place; constants: {name: bytes}."""
        self.pieces = [*storages, *(np.frombuffer(x, np.uint8) for x in constants.values())]
        self.symbols = {name: (len(storages) + i + 1) * SPAN for i, name in enumerate(constants)}

    def bytes(self, address, size, where):
        """(the tensor's bytes, indices [accesses, size]); the accesses must lie in one tensor and be aligned."""
        piece = int(address[0] >> 33) - 1
        offset = address - (piece + 1) * SPAN
        inside = (
            0 <= piece < len(self.pieces)
            and ((offset >= 0) & (offset + size <= len(self.pieces[piece]))).all()
        )
        if not inside:
            raise Fault(f"an access outside of the tensor: {where}")
        if (offset % size).any():
            raise Fault(f"an access that is not aligned to its {size} bytes: {where}")
        return self.pieces[piece], offset[:, None] + np.arange(size)


class Shared:
    def __init__(self, size, threads, granule, findings):
        self.size, self.granule, self.findings = size, granule, findings
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        n = len(self.bytes) // granule
        self.writer, self.wrote = np.full(n, -1), np.full(n, -1)
        self.first, self.last, self.read = np.zeros(n, int), np.zeros(n, int), np.full(n, -1)
        self.copying, self.multiplied = (
            np.zeros(n, int),
            np.zeros(n, int),
        )  # cp.async into it, wgmma out of it
        self.copied, self.now = (
            np.zeros(n, bool),
            0,
        )  # whether cp.async wrote it; time in instructions
        self.barrier, self.fence = (
            np.zeros(threads, int),
            np.zeros(threads, int),
        )  # times of the last ones

    def place(self, address, size, where):
        """Byte offsets of `size` bytes at these addresses."""
        offset = address - SHARED_BASE
        if ((offset < 0) | (offset + size > self.size)).any():
            raise Fault(f"an access outside of shared memory: {where}")
        if (offset % size).any():
            raise Fault(f"an access that is not aligned to its {size} bytes: {where}")
        return offset

    def granules(self, place, size, thread):
        """(granules, threads): each access as the granules it touches."""
        n = max(1, size // self.granule)
        return (place[:, None] // self.granule + np.arange(n)).ravel(), np.repeat(thread, n)

    def _unordered(self, kind, when, first, last, me, where):
        """Counts accesses at `when` by threads `first` to `last` which nothing orders before what `me` does now."""
        elsewhere = (first >> 5 != me >> 5) | (last >> 5 != me >> 5)
        self.findings.add(kind, where, np.count_nonzero((when >= self.barrier[me]) & elsewhere))

    def on_read(self, g, me, where):
        self.findings.add(
            "shared memory that nothing has written is read",
            where,
            np.count_nonzero(self.writer[g] < 0),
        )
        self.findings.add(
            "read before cp.async is waited for", where, np.count_nonzero(self.copying[g])
        )
        kind = "read of what another thread wrote since the last barrier"
        self._unordered(kind, self.wrote[g], self.writer[g], self.writer[g], me, where)
        self.note_read(g, me, me)

    def on_product(self, g, first, where):
        """wgmma reads for all threads of a warp group, past the cache of what they wrote themselves."""
        add, me = self.findings.add, np.full(len(g), first)
        add(
            "shared memory that nothing has written is read",
            where,
            np.count_nonzero(self.writer[g] < 0),
        )
        add("read before cp.async is waited for", where, np.count_nonzero(self.copying[g]))
        late = np.count_nonzero(self.wrote[g] >= self.barrier[me])
        add("read of what another thread wrote since the last barrier", where, late)
        late = np.count_nonzero((self.wrote[g] >= self.fence[me]) & ~self.copied[g])
        add("wgmma reads what no fence.proxy.async came after", where, late)

    def note_read(self, g, first, last):
        """Keeps the lowest and the highest thread that read a granule since the last barrier."""
        fresh = self.read[g] < self.barrier[first]
        low = np.where(fresh, first, np.minimum(self.first[g], first))
        high = np.where(fresh, last, np.maximum(self.last[g], last))
        self.first[g[::-1]] = low[
            ::-1
        ]  # of threads that read one granule at once, the first one stays
        self.last[g] = high  # and the last
        self.read[g] = self.now

    def on_write(self, g, me, where):
        self.findings.add(
            "write to what cp.async still fills", where, np.count_nonzero(self.copying[g])
        )
        self.findings.add(
            "write to what wgmma still reads", where, np.count_nonzero(self.multiplied[g])
        )
        kind = "write to what another thread wrote since the last barrier"
        self._unordered(kind, self.wrote[g], self.writer[g], self.writer[g], me, where)
        kind = "write to what another thread read since the last barrier"
        self._unordered(kind, self.read[g], self.first[g], self.last[g], me, where)

    def note_write(self, g, me, *, copied=False):
        self.writer[g], self.wrote[g], self.copied[g] = me, self.now, copied
