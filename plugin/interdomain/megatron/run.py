"""python -m interdomain.megatron.run pretrain_gpt.py --spec interdomain.megatron.spec interdomain --model.size 125M ...

Runs a training script of Megatron-LM as it is. It adds to Megatron's arguments the mixer's settings, `--model.size` and
`--data.corpus`, and to its optimizer the group of the dynamics; and refuses at the start what would fail hours later.
"""

import runpy
import sys
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from interdomain.model.config import SIZES

from .arguments import Corpus, Size, add_mixer_arguments, execution, mixer_settings
from .context import contiguous
from .optimizer import overrides


def check(args: Namespace) -> None:
    """Puts the settings into the layer that --spec names. Raises ValueError, with the setting to change."""
    if not args.spec or len(args.spec) != 2:
        raise ValueError("name the layer: --spec interdomain.megatron.spec CONDITION (interdomain, s4d, softmax, ...).")
    # Megatron-Core 0.19 trains its own softmax model where the module cannot be imported.
    module, name = args.spec
    spec = vars(import_module(module)).get(name)
    if spec is None:
        raise ValueError(f"--spec: {module} has no layer {name!r}.")
    if args.position_embedding_type != "none":
        raise ValueError(
            f"--position-embedding-type {args.position_embedding_type}: this mixer rotates queries and keys itself. Set none."
        )
    if not args.untie_embeddings_and_output_weights:
        raise ValueError(
            "this model has an output layer of its own: set --untie-embeddings-and-output-weights, or --model.size, which does."
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
    params = spec.submodules.self_attention.params
    params["mixers"] = tuple(replace(mixer, **mixer_settings(args)) for mixer in params["mixers"])
    args.hetereogenous_dist_checkpoint = len(params["mixers"]) > 1
    params |= dict(
        rope_theta=float(args.rotary_base),
        max_seq_len=args.seq_length,
        execution=execution(args),
        seed=args.seed,
        contiguous=True,
    )


def install() -> None:
    """Adds the arguments and the parameter group to Megatron's training, and cuts batches into contiguous pieces."""
    core_utils: Any = import_module("megatron.core.utils")
    core_utils.get_batch_on_this_cp_rank = contiguous  # before the modules that import it
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

    def with_overrides(args: Namespace) -> Any:
        config, groups = standard_optimizer(args)
        return config, {**(groups or {}), **overrides(args.lr, args.min_lr, args.ssm_lr)}

    arguments.add_megatron_arguments, training.get_megatron_optimizer_config = with_arguments, with_overrides


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
