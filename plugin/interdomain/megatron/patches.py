"""Changes inside Megatron-Core and Megatron-LM 0.16 to 0.19, for `interdomain.megatron.run`.

Each function gives its reason and says when it can go. Megatron-LM's scripts run as they are;
everything else is passed to Megatron as arguments and specifications.
"""

import functools
from argparse import Namespace
from importlib import import_module
from typing import Any

from interdomain.model.config import MixerConfig
from interdomain.model.flops import train_flops_per_token

from .arguments import add_arguments, check, key_heads, layers_of, params_of
from .mixer import plain_config
from .spec import RMSNorm
from .training import Schedule, SSMTensorsOnce, contiguous, overrides


def install() -> None:
    """Makes all changes in this process."""
    # These two before the modules that import the changed names.
    cut_batches_contiguously()
    use_norm_without_transformer_engine()
    training: Any = import_module("megatron.training.training")
    arguments: Any = import_module("megatron.training.arguments")
    add_arguments_to_parser(arguments)
    use_recipe(training)
    count_flops(training)
    compute_ssm_tensors_once(training)


def cut_batches_contiguously() -> None:
    """Gives a context-parallel rank one piece of a sequence, and not two as for softmax.

    The ranks hand a state from piece to piece. This change can go when Megatron takes the function
    that cuts batches; 0.19 does not.
    """
    utils: Any = import_module("megatron.core.utils")
    utils.get_batch_on_this_cp_rank = contiguous


def use_norm_without_transformer_engine() -> None:
    """Takes a last norm that knows sequence parallelism without Transformer Engine.

    This change can go when a transformer_layer_spec may name GPTModel's last norm; 0.19 builds its
    own.
    """
    block: Any = import_module("megatron.core.transformer.transformer_block")
    block.LayerNormImpl = RMSNorm


def add_arguments_to_parser(arguments: Any) -> None:
    """Adds this project's arguments, and checks the command line before anything is built.

    This change can go when Megatron-LM's scripts take further arguments; those of 0.19 give
    `extra_args_provider` their own.

    Args:
        arguments: Megatron-LM's module megatron.training.arguments.
    """
    original = arguments.add_megatron_arguments

    # The functions below replace Megatron's functions of the same names.

    def add_megatron_arguments(parser: Any) -> Any:
        parser = original(parser)
        add_arguments(parser.add_argument_group(title="interdomain"))
        # argparse's parse_args calls parse_known_args, so this one is replaced for both.
        parse = parser.parse_known_args

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
    """Gives Megatron's script the parameter groups and the schedule of runs under TorchTitan.

    This change can go when Megatron-LM's scripts take parameter groups and a schedule; those of
    0.19 make them from arguments.

    Args:
        training: Megatron-LM's module megatron.training.training.
    """
    original = training.get_megatron_optimizer_config

    def get_megatron_optimizer_config(args: Namespace) -> Any:
        # Megatron's schedule counts samples, so a training step adds a global batch to it.
        training.OptimizerParamScheduler = functools.partial(Schedule, each=args.global_batch_size)
        config, groups = original(args)
        # Keep Megatron's groups (--decoupled-lr), but not its rule that vectors do not decay.
        groups = {key: group for key, group in groups.items() if group != {"wd_mult": 0.0}}
        return config, groups | overrides(args.lr, args.min_lr, args.ssm_lr)

    training.get_megatron_optimizer_config = get_megatron_optimizer_config


def count_flops(training: Any) -> None:
    """Makes the throughput in the log that of this model: Megatron counts softmax in every layer.

    This change can go when a layer may count its own FLOPs; 0.19 counts by its arguments.

    Args:
        training: Megatron-LM's module megatron.training.training.
    """
    training.num_floating_point_operations = flops


def flops(
    args: Namespace, batch_size: int, *, total_real_tokens_in_batch: Any = None, **_: Any
) -> Any:
    """Returns the FLOPs of a training step, in place of Megatron's num_floating_point_operations.

    Args:
        args: Megatron's parsed arguments, after `arguments.check`.
        batch_size: Number of sequences of the step, on all ranks.
        total_real_tokens_in_batch: Number of tokens without padding; None if it is not known.
    """
    # The mixers of all layers, from the specification that --spec names. A layer of GPTModel has
    # those of the whole model.
    _, layers = layers_of(args)
    mixers: list[MixerConfig] = []
    for layer in layers:
        mixers += params_of(layer)["mixers"]
    # True for HybridModel, where a mixer and its MLP are two layers.
    mlp_apart = params_of(layers[0])["mlp_apart"]
    config = plain_config(
        args, key_heads(args), tuple(mixers), mlp_apart, vocab_size=args.padded_vocab_size
    )
    tokens = total_real_tokens_in_batch or batch_size * args.seq_length
    return tokens * train_flops_per_token(config, args.seq_length)


def compute_ssm_tensors_once(training: Any) -> None:
    """Computes the SSM parameters once a step.

    One backward pass goes through them before Megatron finalizes the gradients.

    This change can go when Megatron-LM's scripts keep a `finalize_model_grads_func` that a
    configuration has already; those of 0.19 set their own.

    Args:
        training: Megatron-LM's module megatron.training.training.
    """
    training.finalize_model_grads = SSMTensorsOnce(training.finalize_model_grads)
