"""The emulator's own teeth, on PTX written here; and a small part of what Triton compiles for the kernels, in a process.

All of it: python -m tests.ptx.run 90 tests/ptx/tiles.py; in `tests/ptx/run.py` how the other tests of the kernels run so, too.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .emulator import execute
from .memory import Fault
from .parse import parse
from .traffic import Traffic

REPOSITORY = Path(__file__).parents[2]
ENTRY = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 out, .param .u32 n)
.reqntid {threads}
{{
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<99>;
    ld.param.b64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    {body}
    ret;
}}
"""


def run(body, threads=64, shared=4096, numbers=64, n=0, traffic=None):
    """The tensor `out` of int32, and what was found. %r1 thread, %r4 its word in shared memory, %rd2 in out."""
    out = torch.full((numbers,), -7, dtype=torch.int32)
    report = execute(parse(ENTRY.format(threads=threads, body=body)), [out, n], 1, shared, traffic)
    return out, {kind for kind, _ in report["findings"]}


NEIGHBOUR = """
    st.shared.b32 [%r4], %r1;
    {between}
    xor.b32 %r5, %r3, {distance};
    add.s32 %r6, %r2, %r5;
    ld.shared.b32 %r7, [%r6];
    {after}
    st.shared.b32 [%r4], %r7;
    st.global.b32 [%rd2], %r7;
"""
READ = "read of what another thread wrote since the last barrier"
OVERWRITE = "write to what another thread read since the last barrier"


@pytest.mark.parametrize(
    ("between", "after", "found"),
    [
        ("bar.sync 0;", "bar.sync 0;", set()),
        ("", "bar.sync 0;", {READ}),
        ("bar.sync 0;", "", {OVERWRITE}),
        ("bar.warp.sync -1;", "bar.sync 0;", {READ}),
    ],
)
def test_races_between_warps(between, after, found):
    out, kinds = run(NEIGHBOUR.format(between=between, after=after, distance=128))
    assert kinds == found
    assert torch.equal(out, torch.arange(64, dtype=torch.int32) ^ 32)


@pytest.mark.parametrize(("between", "found"), [("bar.warp.sync -1;", set()), ("", {f"note: within a warp, {READ}"})])
def test_races_within_a_warp_are_counted_apart(between, found):
    assert run(NEIGHBOUR.format(between=between, after="bar.warp.sync -1;", distance=4))[1] == found


COPY = """
    cvt.u64.u32 %rd3, %r3;
    add.s64 %rd4, %rd1, %rd3;
    shl.b32 %r9, %r1, 4; add.s32 %r10, %r2, %r9; mad.wide.u32 %rd5, %r1, 16, %rd1;
    cp.async.cg.shared.global [ %r10 + 0 ], [ %rd5 + 0 ], 0x10, 16;
    cp.async.commit_group;
    {wait}
    ld.shared.b32 %r7, [%r10];
    bar.sync 0;
    st.global.b32 [%rd2], %r7;
"""


def test_asynchronous_copies():
    whole = dict(threads=32, numbers=128)
    out, kinds = run(COPY.format(wait="cp.async.wait_group 0;"), **whole)
    assert (kinds, out[0].item()) == (set(), -7)
    out, kinds = run(COPY.format(wait="cp.async.wait_group 1;"), **whole)
    assert "read before cp.async is waited for" in kinds
    assert out[0] == -1  # poison: nothing has landed


# A is all ones in registers, B[k, n] = n in shared memory, 16 x 8, no swizzle: ((8, n), (8, 2)) : ((8, SBO), (1, LBO)).
PRODUCT = """
    and.b32 %r5, %r1, 63; shl.b32 %r6, %r5, 2; add.s32 %r7, %r2, %r6;
    shr.u32 %r8, %r5, 2; and.b32 %r8, %r8, 7; cvt.rn.f32.u32 %r9, %r8; cvt.rn.bf16x2.f32 %r10, %r9, %r9;
    setp.lt.u32 %p1, %r1, 64;
    @%p1 st.shared.b32 [%r7], %r10;
    {barrier}
    {fence}
    mov.b32 %r20, 0x3F803F80; mov.b32 %r30, 0f00000000; mov.b32 %r31, %r30; mov.b32 %r32, %r30; mov.b32 %r33, %r30;
    shr.u32 %r11, %r2, 4; cvt.u64.u32 %rd6, %r11; or.b64 %rd7, %rd6, 0x80000;
    {ordered}
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r30,%r31,%r32,%r33}}, {{%r20,%r20,%r20,%r20}}, %rd7, 1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    {wait}
    {after}
    cvt.rzi.s32.f32 %r12, %r31;
    st.global.b32 [%rd2], %r12;
"""
GOOD = {
    "barrier": "bar.sync 0;",
    "fence": "fence.proxy.async.shared::cta;",
    "ordered": "wgmma.fence.sync.aligned;",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "after": "",
}
AGAIN = "@%p1 st.shared.b32 [%r7], %r10;"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, set()),
        (dict(barrier=""), {READ}),
        (
            dict(ordered=GOOD["ordered"] + "mov.b32 %r20, %r20;"),
            {"wgmma with registers that no wgmma.fence came after"},
        ),
        (dict(fence=""), {"wgmma reads what no fence.proxy.async came after"}),
        (dict(wait=""), set()),
        (dict(wait="", after=AGAIN), {"write to what wgmma still reads"}),
        (dict(after=AGAIN), {OVERWRITE}),
        (dict(after="bar.sync 0;" + AGAIN), set()),
    ],
)
def test_asynchronous_products(change, found):
    out, kinds = run(PRODUCT.format(**GOOD | change), threads=128, numbers=128)
    assert kinds == found
    if "wait" in change:
        assert (out == 0).all()  # of NaN
    else:
        assert torch.equal(out, 16 * (2 * (torch.arange(128, dtype=torch.int32) % 4) + 1))


def test_shared_memory_that_nothing_has_written():
    out, kinds = run("ld.shared.b32 %r7, [%r4]; st.global.b32 [%rd2], %r7;")
    assert kinds == {"shared memory that nothing has written is read"}
    assert (out == -1).all()


@pytest.mark.parametrize(
    ("access", "stride", "memory", "expected"),
    [
        ("st.shared.b32 [%r6], %r1;", 4, "shared", (2, 2, 2)),  # accesses of two warps, cycles, fewest
        ("st.shared.b32 [%r6], %r1;", 8, "shared", (2, 4, 2)),
        ("st.shared.b32 [%r6], %r1;", 128, "shared", (2, 64, 2)),
        ("st.shared.b32 [%r6], 7;", 0, "shared", (2, 2, 2)),
        ("st.shared.v4.b32 [%r6], {%r1,%r1,%r1,%r1};", 16, "shared", (2, 8, 8)),
        ("st.shared.v4.b32 [%r6], {%r1,%r1,%r1,%r1};", 64, "shared", (2, 32, 8)),
        ("st.global.b32 [%rd3], %r1;", 4, "global", (2, 8, 8)),  # sectors
        ("st.global.b32 [%rd3], %r1;", 64, "global", (2, 64, 8)),
    ],
)
def test_traffic(access, stride, memory, expected):
    """Threads access places `stride` bytes apart."""
    traffic = Traffic()
    place = f"mul.lo.u32 %r5, %r1, {stride}; add.s32 %r6, %r2, %r5; cvt.u64.u32 %rd4, %r5; add.s64 %rd3, %rd1, %rd4;"
    run(place + access, shared=8192, numbers=1024, traffic=traffic)
    (request,) = (r for (m, _), r in traffic.items() if m == memory)
    assert request == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frob.b32 %r7, %r1;", "the emulator has no frob.b32"),
        ("st.global.b32 [%rd2+4], %r1;", "outside of the tensor"),
        ("st.global.b32 [%rd1+2], %r1;", "not aligned"),
        ("cvt.u32.u64 %r7, %rd1; cvt.u64.u32 %rd3, %r7; ld.global.b32 %r8, [%rd3];", "outside of the tensor"),
        ("st.shared.b32 [%r4+4092], %r1;", "outside of shared memory"),
        ("setp.lt.u32 %p1, %r1, 7; @%p1 bra $L; bar.sync 0; $L:", "not all threads"),
    ],
)
def test_what_no_kernel_may_do(body, message):
    with pytest.raises(Fault, match=message):
        run(body.replace("$L:", "\n$L:\n"))


def test_an_unknown_instruction_that_is_not_reached():
    out, _ = run(
        "mov.u32 %r7, 9;\nsetp.lt.u32 %p1, %r1, 64; @%p1 bra $L; frob.b32 %r7, %r1;\n$L:\nst.global.b32 [%rd2], %r7;"
    )
    assert (out == 9).all()


def test_loops_of_different_length():
    """Thread t adds 1 to t in turns: t (t + 1) / 2."""
    out, _ = run(
        "mov.b32 %r7, 0; mov.b32 %r8, 0;\n$L:\nadd.s32 %r7, %r7, %r8; add.s32 %r8, %r8, 1;"
        "setp.le.s32 %p1, %r8, %r1; @%p1 bra $L; st.global.b32 [%rd2], %r7;"
    )
    t = torch.arange(64)
    assert torch.equal(out, (t * (t + 1) // 2).int())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("capabilities", "tests", "launches"),
    [
        # A forward of three chunks (sm_80), where W has a pass of its own, and of two, with wgmma (sm_90).
        ("80,90", "test_small", [4, 3]),
        ("90", "test_one_program and T70 and recomputed", [10]),  # forward and backward of the Gluon kernels
    ],
)
def test_compiled_kernels(capabilities, tests, launches, tmp_path):
    """This process must not see Triton changed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ptx.run", capabilities, "-q", "tests/ptx/tiles.py", "-k", tests]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("1 passed") == len(launches)
    assert all(f"emulated {n} launches" in done.stdout for n in launches)
