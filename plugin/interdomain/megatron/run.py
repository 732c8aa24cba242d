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

from interdomain.data.corpus import read_manifest
from interdomain.model.config import CONDITIONS, SIZES, with_settings
from interdomain.model.costs.flops import train_flops_per_token

from .arguments import Corpus, Size, add_mixer_arguments, execution, mixer_settings
from .context import contiguous
from .mixer import InterdomainAttention, plain_config
from .optimizer import Schedule, overrides
from .settings import refuse
from .spec import RMSNorm


def mixer_specs(args: Namespace) -> list[Any]:
    """The mixers that --spec names: one spec for all layers of GPTModel; for HybridModel, that of each layer in order.

    Raises: ValueError, ImportError.
    """
    if not args.spec or len(args.spec) != 2:
        raise ValueError("name the layer: --spec interdomain.megatron.spec CONDITION (interdomain, s4d, softmax, ...).")
    # Megatron-Core 0.19 trains its own softmax model where the module cannot be imported.
    module, name = args.spec
    parts: Any = getattr(vars(import_module(module)).get(name), "submodules", None)
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)
    if hybrid := hasattr(parts, "gdn_layer"):
        if not pattern:
            raise ValueError('give the layers of the HybridModel: --hybrid-layer-pattern "G-G-*-G-", say.')
        from .hybrid import SLOTS, mixer_letters

        layers = [getattr(parts, SLOTS[letter]).submodules for letter in mixer_letters(pattern)]
    else:
        layers = [parts]
    specs: list[Any] = [getattr(layer, "self_attention", None) for layer in layers]
    if any(getattr(spec, "module", None) is not InterdomainAttention for spec in specs):
        raise ValueError(
            f"--spec {module} {name} is no layer of this project. Name a layer that interdomain.megatron.layer_spec made, or "
            f"--spec interdomain.megatron.spec with one of {', '.join(CONDITIONS)}."
        )
    if pattern and not hybrid:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} is ignored by GPTModel's layers, as {module} makes them. Take "
            "pretrain_hybrid.py and --spec interdomain.megatron.hybrid, or a spec made by layer_spec(layers=...)."
        )
    return specs


def check(args: Namespace) -> None:
    """Puts the settings into the layer that --spec names. Raises ValueError, with the setting to change."""
    specs = mixer_specs(args)
    refuse(args)
    if args.num_query_groups > 1 and not args.group_query_attention:
        raise ValueError("--num-query-groups is ignored without --group-query-attention. Set both, or neither.")
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
    mixers = with_settings([mixer for spec in specs for mixer in spec.params["mixers"]], mixer_settings(args))
    args.hetereogenous_dist_checkpoint = any(len(spec.params["mixers"]) > 1 for spec in specs)
    shared = dict(
        rope_theta=float(args.rotary_base),
        max_seq_len=args.seq_length,
        execution=execution(args),
        seed=args.seed,
        contiguous=True,
    )
    if corpus := getattr(args, "data.corpus"):
        shared["tokenizer"] = read_manifest(Path(corpus))["tokenizer"]["sha256"]
    for spec in specs:
        own, mixers = mixers[: (n := len(spec.params["mixers"]))], mixers[n:]
        spec.params |= shared | {"mixers": own}


def flops(args: Namespace, batch_size: int, *, total_real_tokens_in_batch: Any = None, **_: Any) -> Any:
    """FLOPs of a step of so many sequences, or tokens without padding, for the log: Megatron counts softmax in every layer."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    specs = [spec.params for spec in mixer_specs(args)]
    mixers = tuple(mixer for params in specs for mixer in params["mixers"])
    hybrid = specs[0].get("mlp_apart", False)
    config = plain_config(args, groups, mixers, hybrid, vocab_size=args.padded_vocab_size)
    return (total_real_tokens_in_batch or batch_size * args.seq_length) * train_flops_per_token(config, args.seq_length)


def install() -> None:
    """Gives Megatron's training this project's arguments, parameter groups, schedule and count of FLOPs; contiguous pieces of
    batches; and a last norm that knows sequence parallelism without Transformer Engine."""
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
