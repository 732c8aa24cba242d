"""The mixer's life signs in Megatron's TensorBoard, which a person watching a run of TorchTitan has too."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from interdomain.model.mixers.ssm import LIFE_SIGNS, Dynamics, SSMDynamics, scalars

from .mixer import InterdomainAttention


@torch.no_grad()
def mixer_statistics(chunks: list[Any]) -> dict[str, float]:
    """LIFE_SIGNS of each layer with basis functions, of all ranks' heads and layers. One read of the device. Collective.

    chunks: of the model on this rank, as many as it has virtual stages.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    device = next(chunks[0].parameters()).device
    # Zeros: of the layers of other stages.
    signs = torch.zeros(chunks[0].config.num_layers, len(LIFE_SIGNS), device=device)
    for mixer in (module for module in modules if isinstance(module, InterdomainAttention)):
        if isinstance(ssm := getattr(mixer.core, "ssm", None), SSMDynamics):
            gather = functools.partial(tensor_parallel.gather_from_sequence_parallel_region, group=mixer.tp_group)
            heads = Dynamics(*(None if p is None else gather(p) for p in ssm()))
            signs[mixer.layer] = heads.life_signs()
    dist.all_reduce(signs, group=parallel_state.get_pipeline_model_parallel_group())
    return scalars(signs)


def watch(training: Any) -> None:
    """Lets Megatron-LM's `megatron.training.training` write them every --log-interval steps, if it has a --tensorboard-dir."""
    train, log = training.train, training.training_log

    def with_statistics(forward_step: Any, chunks: list[Any], *others: Any, **named: Any) -> Any:
        def training_log(losses: Any, totals: Any, rate: Any, iteration: int, *others: Any, **named: Any) -> Any:
            args = training.get_args()
            if args.tensorboard_dir and iteration % args.log_interval == 0:
                statistics = mixer_statistics(chunks)
                if writer := training.get_tensorboard_writer():  # of the last rank
                    for name, value in statistics.items():
                        writer.add_scalar(name, value, iteration)
            return log(losses, totals, rate, iteration, *others, **named)

        training.training_log = training_log
        return train(forward_step, chunks, *others, **named)

    training.train = with_statistics
