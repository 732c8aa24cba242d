"""What this project changes inside Megatron-Core and Megatron-LM 0.16 to 0.19, for `interdomain.megatron.run`.

Each entry has its reason and says when it can go. Megatron-LM's scripts are run as they are; all else is passed to Megatron as
arguments and specifications.
"""

import functools
from argparse import Namespace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from interdomain.model.flops import train_flops_per_token
from interdomain.model.mixers.ssm import LIFE_SIGNS, Dynamics, SSMDynamics, scalars

from .arguments import add_arguments, check, key_heads, layers_of, params_of
from .mixer import InterdomainAttention, plain_config
from .spec import RMSNorm
from .training import DynamicsOnce, Schedule, contiguous, overrides


def install() -> None:
    """All of them, in this process. The first before the modules that import it."""
    cut_batches_contiguously()
    use_norm_without_transformer_engine()
    training: Any = import_module("megatron.training.training")
    arguments: Any = import_module("megatron.training.arguments")
    add_arguments_to_parser(arguments)
    use_recipe(training)
    count_flops(training)
    compute_dynamics_once(training)
    write_statistics(training)


def cut_batches_contiguously() -> None:
    """A context-parallel rank has one piece of a sequence, and not two as for softmax: a state goes from piece to piece.

    Can go when Megatron takes the function that cuts batches; 0.19 does not.
    """
    utils: Any = import_module("megatron.core.utils")
    utils.get_batch_on_this_cp_rank = contiguous


def use_norm_without_transformer_engine() -> None:
    """The last norm knows sequence parallelism without Transformer Engine.

    Can go when a transformer_layer_spec may name GPTModel's last norm; 0.19 builds its own.
    """
    block: Any = import_module("megatron.core.transformer.transformer_block")
    block.LayerNormImpl = RMSNorm


def add_arguments_to_parser(arguments: Any) -> None:
    """The mixer's settings, --model.size and --data.corpus, and the check of the command line before anything is built.

    Can go when Megatron-LM's scripts take further arguments; those of 0.19 give `extra_args_provider` their own.
    """
    standard = arguments.add_megatron_arguments

    def add_megatron_arguments(parser: Any) -> Any:
        parser = standard(parser)
        add_arguments(parser.add_argument_group(title="interdomain"))
        parse = parser.parse_known_args  # by which parse_args reads, too

        def parse_known_args(*given: Any) -> Any:
            args, unknown = parse(*given)
            try:
                check(args)
            except (ImportError, ValueError) as e:
                parser.exit(2, f"error: {e}\n")
            return args, unknown

        parser.parse_known_args = parse_known_args
        return parser

    arguments.add_megatron_arguments = add_megatron_arguments


def use_recipe(training: Any) -> None:
    """The parameter group of the SSM parameters and the schedule of a run of TorchTitan.

    Can go when Megatron-LM's scripts take parameter groups and a schedule; 0.19's make them from arguments.
    """
    standard = training.get_megatron_optimizer_config

    def get_megatron_optimizer_config(args: Namespace) -> Any:
        # Megatron's schedule counts samples.
        training.OptimizerParamScheduler = functools.partial(Schedule, each=args.global_batch_size)
        config, groups = standard(args)
        # All of Megatron's groups (--decoupled-lr) but its rule that vectors do not decay.
        groups = {key: group for key, group in groups.items() if group != {"wd_mult": 0.0}}
        return config, groups | overrides(args.lr, args.min_lr, args.ssm_lr)

    training.get_megatron_optimizer_config = get_megatron_optimizer_config


def count_flops(training: Any) -> None:
    """The throughput in the log counts this model; Megatron counts softmax in every layer. Can go when a layer may count its
    own; 0.19 counts by its arguments."""
    training.num_floating_point_operations = flops


def flops(
    args: Namespace, batch_size: int, *, total_real_tokens_in_batch: Any = None, **_: Any
) -> Any:
    """FLOPs of a step of so many sequences, or of tokens without padding."""
    _, layers = layers_of(args)
    mixers = tuple(mixer for layer in layers for mixer in params_of(layer)["mixers"])
    mlp_apart = params_of(layers[0])["mlp_apart"]
    config = plain_config(
        args, key_heads(args), mixers, mlp_apart, vocab_size=args.padded_vocab_size
    )
    tokens = total_real_tokens_in_batch or batch_size * args.seq_length
    return tokens * train_flops_per_token(config, args.seq_length)


def compute_dynamics_once(training: Any) -> None:
    """SSM parameters are read once a step, with one backward pass before Megatron finalizes the gradients.

    Can go when Megatron-LM's scripts leave a `finalize_model_grads_func` that is set; 0.19's set their own.
    """
    training.finalize_model_grads = DynamicsOnce(training.finalize_model_grads)


def write_statistics(training: Any) -> None:
    """The mixer's statistics in TensorBoard every --log-interval steps, if there is a --tensorboard-dir.

    Can go when Megatron-LM's log takes further scalars; 0.19's does not.
    """
    train, log = training.train, training.training_log

    def train_with_statistics(
        forward_step: Any, chunks: list[Any], *others: Any, **named: Any
    ) -> Any:
        def training_log(
            losses: Any, totals: Any, rate: Any, iteration: int, *others: Any, **named: Any
        ) -> Any:
            args = training.get_args()
            if args.tensorboard_dir and iteration % args.log_interval == 0:
                statistics = mixer_statistics(chunks)
                if writer := training.get_tensorboard_writer():  # of the last rank
                    for name, value in statistics.items():
                        writer.add_scalar(name, value, iteration)
            return log(losses, totals, rate, iteration, *others, **named)

        training.training_log = training_log
        return train(forward_step, chunks, *others, **named)

    training.train = train_with_statistics


@torch.no_grad()
def mixer_statistics(chunks: list[Any]) -> dict[str, float]:
    """LIFE_SIGNS of each layer with basis functions, of all ranks' heads and layers. One read of the device. Collective.

    Args:
        chunks: The model on this rank, one module for each of its virtual stages.
    """
    device = next(chunks[0].parameters()).device
    # Layers of other stages are zeros, until the sum.
    signs = torch.zeros(chunks[0].config.num_layers, len(LIFE_SIGNS), device=device)
    for mixer in (
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, InterdomainAttention)
    ):
        ssm = getattr(mixer.core, "ssm", None)
        if not isinstance(ssm, SSMDynamics):
            continue
        all_heads = []
        for p in ssm():
            if p is not None:
                p = tensor_parallel.gather_from_sequence_parallel_region(p, group=mixer.tp_group)
            all_heads.append(p)
        signs[mixer.layer] = Dynamics(*all_heads).life_signs()
    dist.all_reduce(signs, group=parallel_state.get_pipeline_model_parallel_group())
    return scalars(signs)
