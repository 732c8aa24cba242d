"""What Triton's interpreter lacks: it multiplies bf16 bit patterns as integers and truncates to bf16 instead of rounding.

`repair` gives it products in fp32 of bf16 operands and rounding to nearest even, as tensor cores and GPUs have them;
associative scans by rows, where it goes number by number; and in Triton 3.6 `range(T)`, which NumPy 2.4 ended. Call it
in a process that runs with TRITON_INTERPRET=1.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widen(handle: TensorHandle) -> np.ndarray:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _narrow(data: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).bfloat16()
    return x.view(torch.int16).numpy().view(np.uint16)


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
        return TensorHandle(np.matmul(_widen(a), _widen(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", to_or_from_bf16(cast))
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", to_or_from_bf16(convert))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

    def generic_scan(self, inputs):
        rows = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        found = [tuple(row[0] for row in rows)]
        for i in range(1, len(rows[0])):
            both = (*found[-1], *(row[i] for row in rows))
            wrapped = (self.to_tensor(x, y.dtype) for x, y in zip(both, inputs * 2, strict=True))
            found.append(tuple(x.handle.data for x in self.combine_fn.fn(*wrapped)))
        columns = zip(*found, strict=True)
        return [self.to_tensor(np.stack(c, self.axis), x.dtype) for c, x in zip(columns, inputs, strict=True)]

    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", generic_scan)
    patch = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
