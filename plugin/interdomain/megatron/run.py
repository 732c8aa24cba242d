"""python -m interdomain.megatron.run pretrain_gpt.py --spec interdomain.megatron.spec interdomain --model.size 125M ...

Runs a training script of Megatron-LM as it is. It adds to Megatron's arguments the mixer's settings, `--model.size` and
`--data.corpus`, gives it this project's parameter groups and schedule, and refuses at the start what would fail or be ignored.
"""

import functools
import runpy
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

from interdomain.data.corpus import read_manifest
from interdomain.model.config import CONDITIONS, FIXED_STATE, SIZES, MixerConfig, with_settings
from interdomain.model.flops import train_flops_per_token

from .arguments import Corpus, Size, add_mixer_arguments, corpus_record, execution, mixer_settings
from .context import contiguous
from .dynamics import DynamicsOnce
from .mixer import InterdomainAttention, check_split, plain_config
from .optimizer import Schedule, overrides
from .settings import refuse
from .spec import RMSNorm, mlp_submodules, submodules
from .watch import watch


def layers_of(args: Namespace) -> tuple[Any, list[Any]]:
    """(what --spec names, its layers with a mixer): one for all of GPTModel; of HybridModel one for each mixer, in order.

    Raises: ValueError, ImportError.
    """
    if not args.spec or len(args.spec) != 2:
        raise ValueError("name the layer: --spec interdomain.megatron.spec CONDITION (interdomain, s4d, softmax, ...).")
    # Megatron-Core 0.19 trains its own softmax model where the module cannot be imported.
    module, name = args.spec
    spec: Any = vars(import_module(module)).get(name)
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)
    layers = [spec]
    if hasattr(parts := getattr(spec, "submodules", None), "gdn_layer"):
        if not pattern:
            raise ValueError('give the layers of the HybridModel: --hybrid-layer-pattern "G-G-*-G-", say.')
        from .hybrid import SLOTS, mixer_letters

        layers = [getattr(parts, SLOTS[letter]) for letter in mixer_letters(pattern)]
    elif pattern:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} is ignored by GPTModel's layers, as {module} makes them. Take the script of the "
            "HybridModel and --spec interdomain.megatron.hybrid, or a spec made by layer_spec(layers=...)."
        )
    attentions: list[Any] = [getattr(getattr(x, "submodules", None), "self_attention", None) for x in layers]
    if any(getattr(attention, "module", None) is not InterdomainAttention for attention in attentions):
        raise ValueError(
            f"--spec {module} {name} is no layer of this project. Name a layer that interdomain.megatron.layer_spec made, or "
            f"--spec interdomain.megatron.spec with one of {', '.join(CONDITIONS)}."
        )
    return spec, layers


def params_of(layer: Any) -> dict[str, Any]:
    return layer.submodules.self_attention.params


def check(args: Namespace) -> None:
    """Puts the settings into the layers that --spec names, whose linears are those that --transformer-impl names.

    Raises: ValueError, with the setting to change.
    """
    spec, layers = layers_of(args)
    refuse(args)
    if args.num_query_groups > 1 and not args.group_query_attention:
        raise ValueError("--num-query-groups is ignored without --group-query-attention. Set both, or neither.")
    if args.eod_mask_loss and getattr(args, "data.corpus") and not hasattr(args, "null_tokenizer_eod_id"):
        raise ValueError(
            "--eod-mask-loss: this version of Megatron knows no end-of-text token of --data.corpus. Leave it out."
        )
    if args.rampup_batch_size and hasattr(args, "step_batch_size_schedule"):
        raise ValueError("--rampup-batch-size is ignored by this version of Megatron. Leave it out.")
    if args.overlap_grad_reduce and args.align_grad_reduce and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            "--overlap-grad-reduce with pipeline stages reduces the dynamics' gradients before they are there, at the "
            "end of a step. Set --no-align-grad-reduce."
        )
    if args.sft and args.context_parallel_size > 1:
        raise ValueError(
            "--sft with --context-parallel-size: Megatron's scripts cut its packed documents into pieces for softmax, which do "
            "not follow one another. Leave one out."
        )
    if (args.bf16 or args.fp16) and not args.use_distributed_optimizer:
        raise ValueError(
            "the dynamics stay float32 in a half-precision model, and of Megatron's optimizers only the distributed one can "
            "save and load both. Set --use-distributed-optimizer."
        )
    if args.use_distributed_optimizer and (args.save or args.load) and not args.dist_ckpt_optim_fully_reshardable:
        raise ValueError(
            "Megatron's default checkpoint of the distributed optimizer saves float32 parameters and cannot load them. Set "
            "--dist-ckpt-optim-fully-reshardable."
        )
    unloadable = torch.cuda.is_available() and not distrib_optimizer.HAVE_APEX_OR_TE
    if args.use_distributed_optimizer and (args.save or args.load) and unloadable:
        raise ValueError(
            "Megatron cannot load its distributed optimizer's state without Transformer Engine and Apex. Install one of them."
        )
    mixers = with_settings([mixer for layer in layers for mixer in params_of(layer)["mixers"]], mixer_settings(args))
    if args.group_query_attention and all(mixer.kind in FIXED_STATE for mixer in mixers):
        raise ValueError("--group-query-attention is ignored: no layer shares heads of keys and values. Leave it out.")
    check_shape(args, layers, mixers)
    args.hetereogenous_dist_checkpoint = any(len(params_of(layer)["mixers"]) > 1 for layer in layers)
    shared = dict(
        rope_theta=float(args.rotary_base),
        max_seq_len=args.seq_length,
        execution=execution(args),
        seed=args.seed,
        contiguous=True,
    )
    if corpus := getattr(args, "data.corpus"):
        shared |= corpus_record(read_manifest(Path(corpus)))
    engine = args.transformer_impl == "transformer_engine"
    for layer in layers:
        params = params_of(layer)
        own, mixers = mixers[: (n := len(params["mixers"]))], mixers[n:]
        layer.submodules = submodules(params | shared | {"mixers": own}, engine)
    if spec not in layers:
        spec.submodules.mlp_layer.submodules = mlp_submodules(engine)


def check_shape(args: Namespace, layers: list[Any], mixers: tuple[MixerConfig, ...]) -> None:
    """Checks widths and numbers of heads before Megatron builds a layer, where a refusal would be a traceback.

    Raises: ValueError, with Megatron's names of what the model's shape comes from.
    """
    if None in (args.hidden_size, args.num_attention_heads, args.num_layers):
        return  # Megatron asks for them itself.
    settings = Namespace(**vars(args))
    ranks = getattr(args, "tensor_model_parallel_size", 1)
    mlp_apart = params_of(layers[0])["mlp_apart"]
    if mlp_apart:
        settings.num_layers = 2 * len(mixers)  # Megatron counts the pattern's layers only later.
    if settings.kv_channels is None:
        settings.kv_channels = args.hidden_size // args.num_attention_heads
    try:
        config = plain_config(settings, key_heads(args), mixers, mlp_apart)
        check_split(config, ranks)
    except ValueError as e:
        raise ValueError(
            f"--hidden-size {args.hidden_size}, --num-layers {args.num_layers}, --num-attention-heads "
            f"{args.num_attention_heads}, --kv-channels {settings.kv_channels}, --num-query-groups {key_heads(args)} and "
            f"--tensor-model-parallel-size {ranks} make no model of this project: {e}"
        ) from e


def key_heads(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def flops(args: Namespace, batch_size: int, *, total_real_tokens_in_batch: Any = None, **_: Any) -> Any:
    """FLOPs of a step of so many sequences, or tokens without padding, for the log: Megatron counts softmax in every layer."""
    layers = [params_of(layer) for layer in layers_of(args)[1]]
    mixers = tuple(mixer for params in layers for mixer in params["mixers"])
    config = plain_config(args, key_heads(args), mixers, layers[0]["mlp_apart"], vocab_size=args.padded_vocab_size)
    return (total_real_tokens_in_batch or batch_size * args.seq_length) * train_flops_per_token(config, args.seq_length)


def install() -> None:
    """Gives Megatron's training this project's arguments, parameter groups, schedule, count of FLOPs and life signs; dynamics
    once a step; contiguous pieces of batches; and a last norm that knows sequence parallelism without Transformer Engine."""
    core: Any = [import_module(f"megatron.core.{name}") for name in ("utils", "transformer.transformer_block")]
    core_utils, block = core
    core_utils.get_batch_on_this_cp_rank = contiguous  # before the modules that import it
    block.LayerNormImpl = RMSNorm
    modules: Any = [import_module(f"megatron.training.{name}") for name in ("arguments", "training")]
    arguments, training = modules
    standard_arguments, standard_optimizer = arguments.add_megatron_arguments, training.get_megatron_optimizer_config

    def with_arguments(parser: Any) -> Any:
        parser = standard_arguments(parser)
        group = parser.add_argument_group(title="interdomain")
        group.add_argument("--model.size", choices=SIZES, action=Size, help="of the study; what comes after it wins")
        group.add_argument("--data.corpus", action=Corpus, help="folder of interdomain prepare-data")
        add_mixer_arguments(group)
        parser.parse_known_args = _checked(parser)  # by which parse_args reads, too
        return parser

    def with_recipe(args: Namespace) -> Any:
        training.OptimizerParamScheduler = functools.partial(Schedule, each=args.global_batch_size)  # it counts samples
        config, groups = standard_optimizer(args)
        # All of Megatron's groups (--decoupled-lr) but its rule that vectors do not decay.
        groups = {key: group for key, group in groups.items() if group != {"wd_mult": 0.0}}
        return config, groups | overrides(args.lr, args.min_lr, args.ssm_lr)

    training.num_floating_point_operations = flops
    training.finalize_model_grads = DynamicsOnce(training.finalize_model_grads)
    watch(training)
    arguments.add_megatron_arguments, training.get_megatron_optimizer_config = with_arguments, with_recipe


def _checked(parser: Any) -> Any:
    standard = parser.parse_known_args

    def parse_known_args(*arguments: Any) -> Any:
        args, unknown = standard(*arguments)
        try:
            check(args)
        except (ImportError, ValueError) as e:
            parser.exit(2, f"error: {e}\n")
        return args, unknown

    return parse_known_args


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        sys.exit(f"error: give Megatron-LM's training script: {str(__doc__).splitlines()[0]}")
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
