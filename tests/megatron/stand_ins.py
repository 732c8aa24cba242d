"""Stand-ins for Megatron's classes of Transformer Engine, which runs only on GPUs.

They are Megatron's local linears and a norm, with the arguments, results and state names of those
classes.
"""

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import layers
from torch.nn import functional as F

from interdomain.megatron import spec

DELAYED = []  # the linears whose backward_dw was called


# Arguments that have no default in Megatron.
REQUIRED = {"bias", "skip_bias_add", "is_expert", "tp_comm_buffer_name"}


class Column(layers.ColumnParallelLinear):
    def __init__(self, *sizes, gather_output, **options):
        assert not gather_output
        assert options.keys() >= REQUIRED
        super().__init__(*sizes, **options)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def backward_dw(self):
        DELAYED.append(self)


class LayerNormColumn(Column):
    def __init__(self, input_size, *others, **options):
        super().__init__(input_size, *others, **options)
        weight = torch.nn.Parameter(torch.ones(input_size, dtype=self.config.params_dtype))
        weight.sequence_parallel = self.config.sequence_parallel
        self.layer_norm_weight = weight

    def forward(self, x):
        return super().forward(
            F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)
        )


class Row(layers.RowParallelLinear):
    def __init__(self, *sizes, **options):
        assert options.keys() >= REQUIRED | {"input_is_parallel"}
        super().__init__(*sizes, **options)

    get_extra_state = Column.get_extra_state
    backward_dw = Column.backward_dw


class Provider(LocalSpecProvider):
    def column_parallel_linear(self):
        return Column

    def column_parallel_layer_norm_linear(self):
        return LayerNormColumn

    def row_parallel_linear(self):
        return Row

    def fuse_layernorm_and_linear(self):
        return True


def install(put=setattr):
    """Puts the stand-ins in the place of Transformer Engine's classes."""
    put(spec, "HAVE_TE", True)
    put(spec, "TESpecProvider", Provider)
