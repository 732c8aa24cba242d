"""What the Gluon kernels share: layouts of registers and of shared memory, copies, and complex arithmetic on rows.

Gluon is Triton with its layouts written out (Triton 3.6 and later). These kernels are for Hopper's `wgmma`: bf16, M = 64, heads
of 64 numbers and chunks of L = 64 tokens. A program is two warp groups. Tiles of 2M = 128 rows, one for each real and each
imaginary part of a mode, are divided between the groups by rows. Tiles of 64 rows are divided by columns.

Rows of complex numbers come in turns of eight: 8 real parts, then the imaginary parts of the same 8 modes. A thread has rows
r and r + 8 of a product, which are then both parts of one complex number.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

M = L = WIDTH = gl.constexpr(64)
WARPS = 8
ROWS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))  # [128, 64]
COLUMNS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))  # [64, 64]
ROWS_FIRST = gl.constexpr(gl.DotOperandLayout(0, ROWS, 2))  # first operand of a product, from registers
COLUMNS_FIRST = gl.constexpr(gl.DotOperandLayout(0, COLUMNS, 2))
BLOCKED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # of global memory, 16 bytes for each thread
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))

# `async_load` since Triton 3.7.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def turned(o_n):
    """Where number o_n, in turns of eight, lies in (Re | Im)."""
    return o_n // 16 * 8 + o_n % 8 + o_n // 8 % 2 * M


@gluon.jit
def split_pairs(b_x):
    """Real and imaginary parts of b_x [128, N], whose rows come in turns of eight."""
    N: gl.constexpr = b_x.shape[1]
    return gl.split(gl.permute(gl.reshape(b_x, [8, 2, 8, N]), (0, 2, 3, 1)))


@gluon.jit
def join_pairs(b_re, b_im):
    """The reverse of `split_pairs`, [128, 64] as a product has it."""
    b_x = gl.reshape(gl.permute(gl.join(b_re, b_im), (0, 3, 1, 2)), [2 * M, WIDTH])
    return gl.convert_layout(b_x, ROWS)


@gluon.jit
def scale_rows(b_x, b_re, b_im):
    """Rows of b_x [128, 64], in turns of eight, times complex numbers. b_re, b_im [128]: one number for both rows of a mode."""
    zero = gl.zeros([2 * M, WIDTH], gl.float32, ROWS)
    b_fr, _ = split_pairs(b_re[:, None] + zero)
    b_fi, _ = split_pairs(b_im[:, None] + zero)
    b_u, b_w = split_pairs(b_x)
    return join_pairs(b_u * b_fr - b_w * b_fi, b_u * b_fi + b_w * b_fr)


@gluon.jit
def copy_rows(s_x, p_x, m_l, EVEN: gl.constexpr):
    """Start a copy of rows into shared memory; rows outside of m_l become zeros."""
    if EVEN:
        copy_async(s_x, p_x)
    else:
        copy_async(s_x, p_x, mask=m_l[:, None])
