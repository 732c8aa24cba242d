"""Repairs of Triton's interpreter: it multiplies bf16 bit patterns as integers and truncates to bf16 instead of rounding.

`repair` gives it products in fp32 of bf16 operands and rounding to nearest even, as tensor cores and GPUs have them; operands
rounded to TF32 where a product asks for that; associative scans by doubling, where it goes number by number; calls of device
functions that patch the language once; masks from comparisons of scalars; and in Triton 3.6 `range(T)`, which NumPy 2.4 ended.
Call it in a process that runs with TRITON_INTERPRET=1.
"""

import functools

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widen(handle: TensorHandle) -> np.ndarray:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _narrow(data: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).bfloat16()
    return x.view(torch.int16).numpy().view(np.uint16)


def _tf32(data: np.ndarray) -> np.ndarray:
    """Ten bits of mantissa, to nearest."""
    return ((data.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def repair(monkeypatch) -> None:
    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def to_or_from_bf16(otherwise):
        def run(self, src, dst_type, *args):
            source, target = src.dtype.scalar, dst_type.scalar
            if target == tl.bfloat16 and source != tl.bfloat16:
                return TensorHandle(_narrow(src.data), target)
            if source == tl.bfloat16 and target == tl.float32:
                return TensorHandle(_widen(src), target)
            return otherwise(self, src, dst_type, *args)

        return run

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = _widen(a), _widen(b)
        if input_precision == ir.INPUT_PRECISION.TF32 and x.dtype == y.dtype == np.float32:
            x, y = _tf32(x), _tf32(y)
        return TensorHandle(np.matmul(x, y, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", to_or_from_bf16(cast))
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", to_or_from_bf16(convert))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

    def generic_scan(self, inputs):
        data = [x.handle.data for x in inputs]
        length = data[0].shape[self.axis]
        shape = [1] * data[0].ndim
        shape[self.axis] = length
        position = np.arange(length).reshape(shape)
        # Each number is combined with the one 1, 2, 4, ... places before it, where there is one.
        shift = 1
        while shift < length:
            before = [np.roll(x, shift, self.axis) for x in data]
            dtypes = [x.dtype for x in inputs] * 2
            combined = self.combine_fn.fn(*map(self.to_tensor, before + data, dtypes))
            for i, x in enumerate(combined):
                data[i] = np.where(position < shift, data[i], x.handle.data)
            shift *= 2
        return [self.to_tensor(x, y.dtype) for x, y in zip(data, inputs, strict=True)]

    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", generic_scan)
    # A kernel patches the language; what a function patches stays.
    patch_once = functools.cache(interpreter._patch_lang)

    def call(self, *args, **kwargs):
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    patch = interpreter._patch_lang_tensor

    def index(self):
        return int(self.handle.data.squeeze())

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", index)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    splat = InterpreterBuilder.create_splat

    def create_splat(self, shape, arg):
        # A comparison of scalars calls itself an integer there, and a mask made of one is refused.
        if arg.data.dtype == bool:
            arg = TensorHandle(arg.data, tl.int1)
        return splat(self, shape, arg)

    monkeypatch.setattr(InterpreterBuilder, "create_splat", create_splat)
