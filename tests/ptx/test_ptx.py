"""Budget of registers, spills and shared memory of what Triton compiles, and races in its shared memory: it has none, and the
emulator finds those that are made here. No GPU needed."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.nvidia.compiler import CUDABackend

from interdomain.scan import triton_chunkwise, triton_plan

from ..scan import triton_budget
from ..scan.common import Case, op_inputs, run_op
from ..scan.test_documents import packed
from .launch import emulated, follow
from .memory import (
    COPY_IS_READ,
    NO_FENCE,
    OVERWRITE,
    PRODUCT_OVERWRITE,
    READ_RACE,
    UNWRITTEN,
    Fault,
)
from .parse import parse

ENTRY = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 out)
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


def run(body, threads=64):
    """Returns the tensor `out` of int32, and what was found. %r1 thread, %r4 its word in shared memory, %rd2 in out."""
    out = torch.full((128,), -7, dtype=torch.int32)
    findings = follow(parse(ENTRY.format(threads=threads, body=body)), [out], (0,), 4096)
    return out, {kind for kind, _ in findings}


NEIGHBOUR = """
    st.shared.b32 [%r4], %r1; {between}
    xor.b32 %r5, %r3, {distance}; add.s32 %r6, %r2, %r5; ld.shared.b32 %r7, [%r6]; {after}
    st.shared.b32 [%r4], %r7; st.global.b32 [%rd2], %r7;
"""


@pytest.mark.parametrize(
    ("between", "after", "distance", "found"),
    [
        ("bar.sync 0;", "bar.sync 0;", 128, set()),
        ("", "bar.sync 0;", 128, {READ_RACE}),
        ("bar.sync 0;", "", 128, {OVERWRITE}),
        ("bar.warp.sync -1;", "bar.sync 0;", 128, {READ_RACE}),
        ("", "", 4, set()),  # within a warp
    ],
)
def test_races_between_warps(between, after, distance, found):
    out, kinds = run(NEIGHBOUR.format(between=between, after=after, distance=distance))
    assert kinds == found
    assert torch.equal(out[:64], torch.arange(64, dtype=torch.int32) ^ distance // 4)


COPY = """
    shl.b32 %r9, %r1, 4; add.s32 %r10, %r2, %r9; mad.wide.u32 %rd5, %r1, 16, %rd1;
    cp.async.cg.shared.global [ %r10 + 0 ], [ %rd5 + 0 ], 0x10, 16; cp.async.commit_group; {wait}
    ld.shared.b32 %r7, [%r10]; bar.sync 0; st.global.b32 [%rd2], %r7;
"""


@pytest.mark.parametrize(
    ("wait", "value", "found"),
    [(0, -7, set()), (1, -1, {COPY_IS_READ})],
)
def test_asynchronous_copies(wait, value, found):
    out, kinds = run(COPY.format(wait=f"cp.async.wait_group {wait};"), threads=32)
    assert found <= kinds
    assert bool(kinds) == bool(found)
    assert out[0].item() == value


# A in registers, B in shared memory, 16 x 8, no swizzle: ((8, n), (8, 2)) : ((8, SBO), (1, LBO)).
PRODUCT = """
    and.b32 %r5, %r1, 63; shl.b32 %r6, %r5, 2; add.s32 %r7, %r2, %r6; setp.lt.u32 %p1, %r1, 64;
    @%p1 st.shared.b32 [%r7], %r1; {barrier} {fence}
    shr.u32 %r11, %r2, 4; cvt.u64.u32 %rd6, %r11; or.b64 %rd7, %rd6, 0x80000;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r30,%r31,%r32,%r33}}, {{%r20,%r20,%r20,%r20}}, %rd7, 1, 1, 1, 0;
    wgmma.commit_group.sync.aligned; {wait} {after}
"""
GOOD = {
    "barrier": "bar.sync 0;",
    "fence": "fence.proxy.async.shared::cta;",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "after": "",
}
AGAIN = "@%p1 st.shared.b32 [%r7], %r1;"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, set()),
        (dict(barrier=""), {READ_RACE}),
        (dict(fence=""), {NO_FENCE}),
        (dict(wait="", after="bar.sync 0;" + AGAIN), {PRODUCT_OVERWRITE}),
        (dict(after=AGAIN), {OVERWRITE}),
        (dict(after="bar.sync 0;" + AGAIN), set()),
    ],
)
def test_asynchronous_products(change, found):
    assert run(PRODUCT.format(**GOOD | change), threads=128)[1] == found


def test_shared_memory_that_nothing_has_written():
    assert run("ld.shared.b32 %r7, [%r4];")[1] == {UNWRITTEN}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frob.b32 %r7, %r1;", "the emulator has no frob.b32"),
        ("st.global.b32 [%rd2+512], %r1;", "outside of the tensor"),
        (
            "cvt.u32.u64 %r7, %rd1; cvt.u64.u32 %rd3, %r7; ld.global.b32 %r8, [%rd3];",
            "outside of the tensor",
        ),
        ("st.shared.b32 [%r4+4092], %r1;", "outside of shared memory"),
        ("setp.lt.u32 %p1, %r1, 7; @%p1 bra $L; bar.sync 0;\n$L:\n", "not all threads"),
    ],
)
def test_what_no_kernel_may_do(body, message):
    with pytest.raises(Fault, match=message):
        run(body)


def test_loops_of_different_length():
    """Thread t adds 1 to t in turns: t (t + 1) / 2."""
    out, _ = run(
        "mov.b32 %r7, 0; mov.b32 %r8, 0;\n$L:\nadd.s32 %r7, %r7, %r8; add.s32 %r8, %r8, 1;"
        "setp.le.s32 %p1, %r8, %r1; @%p1 bra $L; st.global.b32 [%rd2], %r7;"
    )
    t = torch.arange(64)
    assert torch.equal(out[:64], (t * (t + 1) // 2).int())


COMPILED = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """Triton's cache gets no kernels without a cubin: `report` calls ptxas itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "make_cubin", mock.Mock(return_value=b""))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def followed(capability, case, linear=False, documents=False, only=""):
    """Returns (report, Findings) of each launch of one forward and backward in bf16."""
    inputs, cotangents = op_inputs(case, torch.float32, torch.bfloat16, linear)
    numbers = packed(case.T)[: case.B] if documents else None
    with emulated(capability, only) as found:
        run_op(inputs, cotangents, backend="chunkwise", documents=numbers)
    return found


# Beside what is followed. R x D x M; of each kernel the launch that does most.
ROWS = [
    *("90", "bf16", "96x96x64:most", "64x64x64:shards+sweeps", "step/64x64x64"),
    *("features/64x64x64:k", "features_step/64x64x64"),
    *("90", "fp32", "64x64x64:ragged+most"),
    *("80", "bf16", "64x64x64:ragged+most", "features/96x96x64:k+past+documents"),
    *("89", "fp32", "step/128x129x128:G2"),
]
SCAN_KERNELS = {"contract_kernel", "expand_kernel", "mix_kernel", "adjoint_kernel"}
SCAN_KERNELS |= {"tables_kernel", "chain_kernel", "sum_kernel"}
STEP_KERNELS = {"contract_step_kernel", "expand_step_kernel"}
FEATURES_KERNELS = {"forward_kernel", "backward_kernel", "step_kernel"}


@COMPILED
def test_the_other_kernels_keep_the_budget(compiler):
    on_hopper = set()
    for report in triton_budget.reports(*ROWS):
        assert not triton_budget.exceeds(report), report
        if report["capability"] == 90:
            on_hopper.add(report["kernel"])
    assert on_hopper == SCAN_KERNELS | STEP_KERNELS | FEATURES_KERNELS


@COMPILED
@pytest.mark.parametrize(
    ("capability", "case", "kinds"),
    [
        # wgmma, whole chunks, as in training
        (90, Case(T=128, B=2, R=64, D=64, M=64, state=False), {}),
        # three chunks, the last one ragged
        (90, Case(T=150, B=2, R=64, D=64, M=64), {"documents": True}),
        (90, Case(T=70, B=2, R=64, D=64, M=64), {"linear": True}),
        # mma and cp.async, W in a pass of its own; small, which compiles fast
        (80, Case(T=70, B=2, R=16, D=16), {}),
    ],
    ids=str,
)
def test_compiled_kernels_have_no_race_and_keep_the_budget(capability, case, kinds, compiler):
    found = followed(capability, case, **kinds)
    assert len(found) > 5
    for report, findings in found:
        assert not findings, report["kernel"]
        report |= {"dtype": "bf16", "shape": ""}
        assert not triton_budget.exceeds(report), report


@COMPILED
def test_the_race_that_one_stage_avoids(compiler, monkeypatch):
    """Triton loads the next chunk of 32 over what wgmma still reads, if a plan for sm_90 has chunks of 32 and two stages."""
    cpu = torch.device("cpu")
    with mock.patch.object(triton_plan, "capability", return_value=(9, 0)):
        plan = triton_chunkwise.make_plan(cpu, torch.bfloat16, 64, 64)
    plan = plan._replace(chunk=32, mix=(8192, 4, 2), operands_in_registers=False)
    monkeypatch.setattr(triton_chunkwise, "make_plan", mock.Mock(return_value=plan))
    found = followed(90, Case(T=100, H=1, R=64, D=64, M=64), only="mix_kernel")
    kinds = set()
    for _, findings in found:
        kinds |= {kind for kind, _ in findings}
    assert PRODUCT_OVERWRITE in kinds
