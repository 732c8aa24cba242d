"""The command line of Megatron-LM's scripts: this project's arguments, and what is refused before anything is built.

The mixer's settings have the names that they have under TorchTitan: `--mixer.n_basis 32`.
"""

import argparse
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from interdomain.data.corpus import read_manifest
from interdomain.folders import expand_path
from interdomain.model.config import (
    CONDITIONS,
    EXECUTION_SETTINGS,
    FIXED_STATE,
    SIZES,
    Execution,
    MixerConfig,
    ModelConfig,
    build_config,
    with_settings,
)

from .mixer import InterdomainAttention, check_split, plain_config
from .settings import refuse
from .spec import SETTINGS, backbone, mlp_submodules, submodules


def add_arguments(parser: Any) -> None:
    """Settings of MixerConfig are None where they are not given; then the condition or the size decides."""
    parser.add_argument(
        "--model.size", choices=SIZES, action=Size, help="of the study; what comes after it wins"
    )
    parser.add_argument("--data.corpus", action=Corpus, help="folder of interdomain prepare-data")
    for name, f in (SETTINGS | EXECUTION_SETTINGS).items():
        kind = _true_or_false
        if f.type is not bool:
            kind = next(kind for kind in (int, float, str) if isinstance(kind(), cast(Any, f.type)))
        default = f.default if name in EXECUTION_SETTINGS else None
        choices = f.metadata.get("choices") or None
        parser.add_argument(
            f"--mixer.{name}", type=kind, choices=choices, default=default, help=f.metadata["text"]
        )
    text = "the peak learning rate of the SSM parameters is min(lr, this)"
    parser.add_argument("--ssm-lr", type=float, default=1e-3, help=text)


def _true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


def model_arguments(config: ModelConfig) -> dict[str, Any]:
    """The arguments (dest) of Megatron's own parser that make a model, with their values."""
    return backbone(config) | dict(
        seq_length=config.max_seq_len,
        max_position_embeddings=config.max_seq_len,
        position_embedding_type="none",
        layernorm_epsilon=config.norm_eps,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
    )


class Size(argparse.Action):
    """`--model.size 125M`: sets Megatron's arguments for a size of the study; those that come after it win."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        vars(namespace).update(model_arguments(build_config(values)))
        vars(namespace).update({self.dest: values, "mixer.n_basis": SIZES[values]["n_basis"]})


class Corpus(argparse.Action):
    """`--data.corpus FOLDER`: a prepared corpus, whose tokens Megatron's data sets read as they are."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            values = expand_path(values)
            manifest = read_manifest(Path(values))
            namespace.train_data_path = corpus_files(values, "train")
            namespace.valid_data_path = corpus_files(values, "validation")
        except (OSError, ValueError) as e:
            parser.exit(2, f"error: {e}\n")
        setattr(namespace, self.dest, values)
        namespace.tokenizer_type = "NullTokenizer"
        namespace.vocab_size = (
            manifest["vocab_size"] - NullTokenizer(0).vocab_size
        )  # up to 0.17 it adds one
        if hasattr(namespace, "null_tokenizer_eod_id"):  # from 0.19
            namespace.null_tokenizer_eod_id = manifest["eos_id"]
        namespace.make_vocab_size_divisible_by = 1  # rows that are added take part in the softmax


def corpus_files(folder: str, split: str) -> list[str]:
    """The prefixes of a prepared corpus's shards. Raises: ValueError for a corpus with answers; as `read_manifest`."""
    manifest = read_manifest(Path(folder))
    if "answers" in manifest:
        raise ValueError(
            f"{folder} is a corpus whose loss is that of its answers, and Megatron's data sets would train on every token. "
            "Train on it under TorchTitan (./launch.sh)."
        )
    return [f"{folder}/{shard['name']}" for shard in manifest["splits"].get(split, [])]


def check(args: Namespace) -> None:
    """Puts the settings into the layers that --spec names, whose linears are those that --transformer-impl names.

    Raises: ValueError, with the setting to change; ImportError for a --spec that cannot be imported.
    """
    spec, layers = layers_of(args)
    refuse(args)
    if args.num_query_groups > 1 and not args.group_query_attention:
        raise ValueError(
            "--num-query-groups is ignored without --group-query-attention. Set both, or neither."
        )
    if (
        args.eod_mask_loss
        and getattr(args, "data.corpus")
        and not hasattr(args, "null_tokenizer_eod_id")
    ):
        raise ValueError(
            "--eod-mask-loss: this version of Megatron knows no end-of-text token of --data.corpus. Leave it out."
        )
    if args.rampup_batch_size and hasattr(args, "step_batch_size_schedule"):
        raise ValueError(
            "--rampup-batch-size is ignored by this version of Megatron. Leave it out."
        )
    if (
        args.overlap_grad_reduce
        and args.align_grad_reduce
        and args.pipeline_model_parallel_size > 1
    ):
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
    if args.use_distributed_optimizer and (args.save or args.load):
        if not args.dist_ckpt_optim_fully_reshardable:
            raise ValueError(
                "Megatron's default checkpoint of the distributed optimizer saves float32 parameters and cannot load them. Set "
                "--dist-ckpt-optim-fully-reshardable."
            )
        if torch.cuda.is_available() and not distrib_optimizer.HAVE_APEX_OR_TE:
            raise ValueError(
                "Megatron cannot load its distributed optimizer's state without Transformer Engine and Apex. Install one of "
                "them."
            )

    # The mixers with the settings that were given.
    given = {name: getattr(args, f"mixer.{name}") for name in SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    mixers = with_settings(
        [mixer for layer in layers for mixer in params_of(layer)["mixers"]], given
    )
    if args.group_query_attention and all(mixer.kind in FIXED_STATE for mixer in mixers):
        raise ValueError(
            "--group-query-attention is ignored: no layer shares heads of keys and values. Leave it out."
        )
    _check_shape(args, mixers, params_of(layers[0])["mlp_apart"])

    # The layers with these mixers.
    shared: dict[str, Any] = dict(
        rope_theta=float(args.rotary_base),
        max_seq_len=args.seq_length,
        execution=Execution(
            **{name: getattr(args, f"mixer.{name}") for name in EXECUTION_SETTINGS}
        ),
        seed=args.seed,
        contiguous=True,
    )
    if corpus := getattr(args, "data.corpus"):
        manifest = read_manifest(Path(corpus))
        shared["tokenizer"] = manifest["tokenizer"]["sha256"]
        shared["documents"] = {"begin": [], "end": [manifest["eos_id"]]}
    args.hetereogenous_dist_checkpoint = any(
        len(params_of(layer)["mixers"]) > 1 for layer in layers
    )
    engine = args.transformer_impl == "transformer_engine"
    for layer in layers:
        params = params_of(layer)
        n = len(params["mixers"])
        layer.submodules = submodules(params | shared | {"mixers": mixers[:n]}, engine)
        mixers = mixers[n:]
    if spec not in layers:
        spec.submodules.mlp_layer.submodules = mlp_submodules(engine)


def layers_of(args: Namespace) -> tuple[Any, list[Any]]:
    """The object that --spec names, and its layers with a mixer.

    GPTModel has one layer for all. HybridModel has one for each mixer, in order.

    Raises: ValueError, ImportError.
    """
    if not args.spec or len(args.spec) != 2:
        raise ValueError(
            "name the layer: --spec interdomain.megatron.spec CONDITION (interdomain, s4d, softmax, ...)."
        )
    # Megatron-Core 0.19 trains its own softmax model where the module cannot be imported.
    module, name = args.spec
    spec: Any = vars(import_module(module)).get(name)
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(
        args, "hybrid_override_pattern", None
    )
    layers = [spec]
    if hasattr(parts := getattr(spec, "submodules", None), "gdn_layer"):
        if not pattern:
            raise ValueError(
                'give the layers of the HybridModel: --hybrid-layer-pattern "G-G-*-G-", say.'
            )
        from .hybrid import SLOTS, mixer_letters

        layers = [getattr(parts, SLOTS[letter]) for letter in mixer_letters(pattern)]
    elif pattern:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} is ignored by GPTModel's layers, as {module} makes them. Take the script of the "
            "HybridModel and --spec interdomain.megatron.hybrid, or a spec made by layer_spec(layers=...)."
        )
    for layer in layers:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        if getattr(attention, "module", None) is not InterdomainAttention:
            raise ValueError(
                f"--spec {module} {name} is no layer of this project. Name a layer that interdomain.megatron.layer_spec made, "
                f"or --spec interdomain.megatron.spec with one of {', '.join(CONDITIONS)}."
            )
    return spec, layers


def params_of(layer: Any) -> dict[str, Any]:
    return layer.submodules.self_attention.params


def _check_shape(args: Namespace, mixers: tuple[MixerConfig, ...], mlp_apart: bool) -> None:
    """Checks widths and numbers of heads before Megatron builds a layer, where a refusal would be a traceback.

    Raises: ValueError, with Megatron's names of what the model's shape comes from.
    """
    if None in (args.hidden_size, args.num_attention_heads, args.num_layers):
        return  # Megatron asks for them itself.
    shape = Namespace(**vars(args))
    if mlp_apart:
        shape.num_layers = 2 * len(mixers)  # Megatron counts the pattern's layers only later.
    if shape.kv_channels is None:
        shape.kv_channels = args.hidden_size // args.num_attention_heads
    ranks = args.tensor_model_parallel_size
    try:
        check_split(plain_config(shape, key_heads(args), mixers, mlp_apart), ranks)
    except ValueError as e:
        raise ValueError(
            f"--hidden-size {args.hidden_size}, --num-layers {args.num_layers}, --num-attention-heads "
            f"{args.num_attention_heads}, --kv-channels {shape.kv_channels}, --num-query-groups {key_heads(args)} and "
            f"--tensor-model-parallel-size {ranks} make no model of this project: {e}"
        ) from e


def key_heads(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads
