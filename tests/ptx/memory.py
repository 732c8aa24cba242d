"""Global and shared memory of one emulated program, and which accesses to shared memory nothing orders.

Shared memory keeps for every granule (the narrowest access of the kernel) who wrote it and when, who read it and when, and
what is under way. Two accesses, one of them a write, by threads of different warps must have a barrier between them (PTX ISA:
Memory Consistency Model, Causality Order). Threads of one warp run in step on the GPUs there are, and are not looked at.
"""

import numpy as np

SPAN = 1 << 33  # from one tensor to the next, so that an address cut to 32 bits hits none
SHARED_BASE = 1024  # as on sm_90, which keeps 1,024 bytes for itself

# What may be found.
UNWRITTEN = "shared memory that nothing has written is read"
READ_RACE = "read of what another thread wrote since the last barrier"
WRITE_RACE = "write to what another thread wrote since the last barrier"
OVERWRITE = "write to what another thread read since the last barrier"
COPY_IS_READ = "read before cp.async is waited for"
COPY_OVERWRITE = "write to what cp.async still fills"
PRODUCT_OVERWRITE = "write to what wgmma still reads"
NO_FENCE = "wgmma reads what no fence.proxy.async came after"


class Fault(Exception):
    """A thing that the kernel must never do. The text says what and where."""


class Findings(dict):
    """{(kind, instruction): how many}"""

    def add(self, kind, where, wrong):
        """Adds the granules for which `wrong` is not zero."""
        count = np.count_nonzero(wrong)
        if count:
            key = kind, str(where)
            self[key] = self.get(key, 0) + count


def check_alignment(offset, size, where):
    if (offset % size).any():
        raise Fault(f"an access that is not aligned to its {size} bytes: {where}")


class Global:
    """The tensors of a launch and the constants of its kernel, which lie far from each other.

    Args:
        storages: Those of the tensors as uint8, written in place.
        constants: {name: bytes}.
    """

    def __init__(self, storages, constants):
        self.pieces = list(storages)
        self.symbols = {}
        for name, data in constants.items():
            self.pieces.append(np.frombuffer(data, np.uint8))
            self.symbols[name] = len(self.pieces) * SPAN

    def access(self, address, size, where):
        """Returns the tensor's bytes and indices [accesses, size]; the accesses must lie in one tensor and be aligned."""
        number = int(address[0]) // SPAN
        offset = address - number * SPAN
        if not 1 <= number <= len(self.pieces):
            raise Fault(f"an access outside of the tensor: {where}")
        piece = self.pieces[number - 1]
        if offset.min() < 0 or offset.max() + size > len(piece):
            raise Fault(f"an access outside of the tensor: {where}")
        check_alignment(offset, size, where)
        return piece, offset[:, None] + np.arange(size)


class Shared:
    """Shared memory of a program.

    Args:
        size: Bytes.
        threads: Threads of the program.
        granule: Bytes that are looked at as one.
        findings: What gets the faults.
    """

    def __init__(self, size, threads, granule, findings):
        self.size = size
        self.granule = granule
        self.findings = findings
        self.bytes = np.full(-(-size // 16) * 16, 0xFF, np.uint8)
        # Time counts instructions. Each thread has the times of its last barrier and fence.
        self.now = 0
        self.barrier = np.zeros(threads, int)
        self.fence = np.zeros(threads, int)
        # Of each granule, the thread that wrote it and when, and whether cp.async did.
        n = len(self.bytes) // granule
        self.writer = np.full(n, -1)
        self.wrote = np.full(n, -1)
        self.copied = np.zeros(n, bool)
        # The lowest and the highest thread that read it since the last barrier, and when.
        self.first = np.zeros(n, int)
        self.last = np.zeros(n, int)
        self.read = np.full(n, -1)
        # What is under way: cp.async into it, wgmma out of it.
        self.copying = np.zeros(n, int)
        self.multiplied = np.zeros(n, int)

    def place(self, address, size, where):
        """Returns the byte offsets of accesses of `size` bytes."""
        offset = address - SHARED_BASE
        if offset.min() < 0 or offset.max() + size > self.size:
            raise Fault(f"an access outside of shared memory: {where}")
        check_alignment(offset, size, where)
        return offset

    def granules(self, place, size, threads):
        """Returns the granules that the accesses touch, and their threads."""
        n = max(1, size // self.granule)
        granules = place[:, None] // self.granule + np.arange(n)
        return granules.ravel(), np.repeat(threads, n)

    def access(self, address, size, threads, where, *, store):
        """Notes accesses of threads. Returns the bytes of the memory and indices [accesses, size]."""
        place = self.place(address, size, where)
        granules, owners = self.granules(place, size, threads)
        if store:
            self.check_write(granules, owners, where)
            self.note_write(granules, owners)
        else:
            self.check_read(granules, owners, where)
            self.note_read(granules, owners, owners)
        return self.bytes, place[:, None] + np.arange(size)

    def unordered(self, time, first, last, me):
        """Tells of accesses at `time` by threads `first` to `last` whether nothing orders them before what `me` does now."""
        elsewhere = (first >> 5 != me >> 5) | (last >> 5 != me >> 5)
        return (time >= self.barrier[me]) & elsewhere

    def check_read(self, g, me, where):
        writer = self.writer[g]
        self.findings.add(UNWRITTEN, where, writer < 0)
        self.findings.add(COPY_IS_READ, where, self.copying[g])
        self.findings.add(READ_RACE, where, self.unordered(self.wrote[g], writer, writer, me))

    def check_product(self, g, first, where):
        """Checks a read by wgmma: for all threads of a warp group, past the cache of what they wrote themselves."""
        wrote = self.wrote[g]
        self.findings.add(UNWRITTEN, where, self.writer[g] < 0)
        self.findings.add(COPY_IS_READ, where, self.copying[g])
        self.findings.add(READ_RACE, where, wrote >= self.barrier[first])
        self.findings.add(NO_FENCE, where, (wrote >= self.fence[first]) & ~self.copied[g])

    def check_write(self, g, me, where):
        writer = self.writer[g]
        self.findings.add(COPY_OVERWRITE, where, self.copying[g])
        self.findings.add(PRODUCT_OVERWRITE, where, self.multiplied[g])
        self.findings.add(WRITE_RACE, where, self.unordered(self.wrote[g], writer, writer, me))
        late = self.unordered(self.read[g], self.first[g], self.last[g], me)
        self.findings.add(OVERWRITE, where, late)

    def note_read(self, g, first, last):
        """Keeps the lowest and the highest thread that read a granule since the last barrier."""
        fresh = self.read[g] < self.barrier[first]
        low = np.where(fresh, first, np.minimum(self.first[g], first))
        high = np.where(fresh, last, np.maximum(self.last[g], last))
        # Of threads that read one granule at once, the first one stays as the lowest, and the last one as the highest.
        self.first[g[::-1]] = low[::-1]
        self.last[g] = high
        self.read[g] = self.now

    def note_write(self, g, me, *, copied=False):
        self.writer[g] = me
        self.wrote[g] = self.now
        self.copied[g] = copied
