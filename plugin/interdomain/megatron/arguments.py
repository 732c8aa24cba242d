"""This project's arguments of Megatron-LM's scripts, and their check before anything is built.

The mixer's settings have the names that they have under TorchTitan: `--mixer.n_basis 32`.
"""

import argparse
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

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
from .settings import check_settings
from .spec import OWN_MIXER_SETTINGS, backbone, mlp_submodules, submodules


def add_arguments(parser: Any) -> None:
    """Adds this project's arguments to a parser.

    The mixer's settings are `--mixer.NAME`. A field of MixerConfig that is not given is None: its
    value then comes from the condition that --spec names, or from --model.size. A field of
    Execution, such as the backend, has its own default.

    Args:
        parser: An argparse parser, or a group of its arguments.
    """
    parser.add_argument(
        "--model.size", choices=SIZES, action=Size, help="of the study; what comes after it wins"
    )
    parser.add_argument("--data.corpus", action=Corpus, help="folder of interdomain prepare-data")
    for name, f in (OWN_MIXER_SETTINGS | EXECUTION_SETTINGS).items():
        default = None
        if name in EXECUTION_SETTINGS:
            default = f.default
        parser.add_argument(
            f"--mixer.{name}",
            type=_parser_of(f.type),
            choices=f.metadata["choices"] or None,
            default=default,
            help=f.metadata["text"],
        )
    text = "the peak learning rate of the SSM parameters is min(lr, this)"
    parser.add_argument("--ssm-lr", type=float, default=1e-3, help=text)


def _parser_of(kind: Any) -> Callable[[str], Any]:
    """Returns the function that reads a setting's value from text.

    Args:
        kind: The type of the setting, such as `int | None`, whose function is int.
    """
    if kind is bool:
        return _true_or_false
    # int() is 0 and float() is 0.0, which belong to the type or do not.
    for parser in (int, float):
        if isinstance(parser(), kind):
            return parser
    return str


def _true_or_false(text: str) -> bool:
    """Reads a bool from text."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() == "true"


def model_arguments(config: ModelConfig) -> dict[str, Any]:
    """Returns Megatron's own arguments for a model, by their names in the parsed arguments."""
    return backbone(config) | dict(
        seq_length=config.max_seq_len,
        max_position_embeddings=config.max_seq_len,
        position_embedding_type="none",
        layernorm_epsilon=config.norm_eps,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
    )


class Size(argparse.Action):
    """`--model.size 125M`: sets Megatron's arguments for a size of the study.

    Arguments that come after it win. It also sets mixer.n_basis, the size's number of basis
    functions.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Sets the arguments when argparse reads this one.

        Args:
            parser: The parser. Unused.
            namespace: The parsed arguments so far, which are changed.
            values: The size.
            option_string: Unused.
        """
        arguments = model_arguments(build_config(values))
        arguments["mixer.n_basis"] = SIZES[values]["n_basis"]
        arguments[self.dest] = values
        vars(namespace).update(arguments)


class Corpus(argparse.Action):
    """`--data.corpus FOLDER`: sets Megatron's arguments for a corpus of `interdomain prepare-data`.

    Megatron's data sets read its files as they are.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Sets the arguments when argparse reads this one.

        Args:
            parser: The parser, which ends the program if there is no such corpus.
            namespace: The parsed arguments so far, which are changed.
            values: The folder of the corpus.
            option_string: Unused.
        """
        try:
            folder = expand_path(values)
            manifest = read_manifest(Path(folder))
            namespace.train_data_path = corpus_files(folder, "train")
            namespace.valid_data_path = corpus_files(folder, "validation")
        except (OSError, ValueError) as e:
            parser.exit(2, f"error: {e}\n")
        setattr(namespace, self.dest, folder)
        # The files hold ids of tokens already: Megatron needs only their number.
        namespace.tokenizer_type = "NullTokenizer"
        # Up to Megatron-Core 0.17 NullTokenizer adds one token to this number: NullTokenizer(0) has
        # 1.
        namespace.vocab_size = manifest["vocab_size"] - NullTokenizer(0).vocab_size
        if hasattr(namespace, "null_tokenizer_eod_id"):  # from 0.19
            namespace.null_tokenizer_eod_id = manifest["eos_id"]
        # Megatron would add rows to the vocabulary, which take part in the softmax.
        namespace.make_vocab_size_divisible_by = 1


def corpus_files(folder: str, split: str) -> list[str]:
    """Returns the prefixes of the files of a prepared corpus.

    Args:
        folder: The folder of the corpus.
        split: "train" or "validation".
    Raises:
        ValueError: The corpus is one with answers, or not a corpus.
    """
    manifest = read_manifest(Path(folder))
    if "answers" in manifest:
        raise ValueError(
            f"{folder} is a corpus whose loss is that of its answers, and Megatron's data sets "
            "would train on every token. Train on it under TorchTitan (./launch.sh)."
        )
    return [f"{folder}/{shard['name']}" for shard in manifest["splits"].get(split, [])]


def check(args: Namespace) -> None:
    """Checks the parsed arguments, and puts the mixer's settings into the layers that --spec names.

    The linear layers are those that --transformer-impl names.

    Args:
        args: The parsed arguments. `hetereogenous_dist_checkpoint` is set in them.
    Raises:
        ValueError: A setting must be changed.
        ImportError: --spec cannot be imported.
    """
    spec, layers = layers_of(args)
    check_settings(args)
    _check_combinations(args)

    # The mixers of all layers, with the settings that were given.
    given = {}
    for name in OWN_MIXER_SETTINGS:
        value = getattr(args, f"mixer.{name}")
        if value is not None:
            given[name] = value
    mixers: list[MixerConfig] = []
    for layer in layers:
        mixers += params_of(layer)["mixers"]
    mixers = list(with_settings(mixers, given))
    if args.group_query_attention and all(mixer.kind in FIXED_STATE for mixer in mixers):
        raise ValueError(
            "--group-query-attention is ignored: no layer shares heads of keys and values. Leave "
            "it out."
        )
    _check_shape(args, tuple(mixers), params_of(layers[0])["mlp_apart"])

    # What all layers have in common.
    execution = {name: getattr(args, f"mixer.{name}") for name in EXECUTION_SETTINGS}
    shared: dict[str, Any] = dict(
        rope_theta=float(args.rotary_base),
        max_seq_len=args.seq_length,
        execution=Execution(**execution),
        seed=args.seed,
        contiguous=True,
    )
    corpus = getattr(args, "data.corpus")
    if corpus:
        manifest = read_manifest(Path(corpus))
        shared["tokenizer"] = manifest["tokenizer"]["sha256"]
        shared["documents"] = {"begin": [], "end": [manifest["eos_id"]]}

    # Give each layer its mixers. A layer of GPTModel has those of all layers, one of HybridModel
    # has one.
    args.hetereogenous_dist_checkpoint = False
    engine = args.transformer_impl == "transformer_engine"
    for layer in layers:
        params = params_of(layer)
        n = len(params["mixers"])
        if n > 1:
            args.hetereogenous_dist_checkpoint = True
        own = {"mixers": tuple(mixers[:n])}
        layer.submodules = submodules(params | shared | own, engine)
        mixers = mixers[n:]
    # In a HybridModel the MLPs are layers of their own.
    if spec not in layers:
        spec.submodules.mlp_layer.submodules = mlp_submodules(engine)


def _check_combinations(args: Namespace) -> None:
    """Checks arguments of Megatron that depend on one another.

    Args:
        args: The parsed arguments.
    Raises:
        ValueError: A setting must be changed.
    """
    if args.num_query_groups > 1 and not args.group_query_attention:
        raise ValueError(
            "--num-query-groups is ignored without --group-query-attention. Set both, or neither."
        )
    knows_end_of_text = hasattr(args, "null_tokenizer_eod_id")
    if args.eod_mask_loss and getattr(args, "data.corpus") and not knows_end_of_text:
        raise ValueError(
            "--eod-mask-loss: this version of Megatron knows no end-of-text token of "
            "--data.corpus. Leave it out."
        )
    # Megatron-Core 0.19 has another setting in its place.
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
            "--overlap-grad-reduce with pipeline stages reduces the gradients of the SSM "
            "parameters before they are there, at the end of a step. Set --no-align-grad-reduce."
        )
    if args.sft and args.context_parallel_size > 1:
        raise ValueError(
            "--sft with --context-parallel-size: Megatron's scripts cut its packed documents "
            "into pieces for softmax, which do not follow one another. Leave one out."
        )
    if (args.bf16 or args.fp16) and not args.use_distributed_optimizer:
        raise ValueError(
            "the SSM parameters stay float32 in a half-precision model, and only the distributed "
            "one of Megatron's optimizers can save and load both. Set "
            "--use-distributed-optimizer."
        )
    if args.use_distributed_optimizer and (args.save or args.load):
        if not args.dist_ckpt_optim_fully_reshardable:
            raise ValueError(
                "Megatron's default checkpoint of the distributed optimizer saves float32 "
                "parameters and cannot load them. Set --dist-ckpt-optim-fully-reshardable."
            )
        if torch.cuda.is_available() and not distrib_optimizer.HAVE_APEX_OR_TE:
            raise ValueError(
                "Megatron cannot load its distributed optimizer's state without Transformer "
                "Engine and Apex. Install one of them."
            )


def layers_of(args: Namespace) -> tuple[Any, list[Any]]:
    """Finds the layers that --spec names.

    Args:
        args: The parsed arguments.
    Returns:
        The object that --spec names, and its layers with a mixer. GPTModel has one layer for all,
        HybridModel has one for each mixer in order.
    Raises:
        ValueError: It has no layers of this project.
        ImportError: It cannot be imported.
    """
    if not args.spec or len(args.spec) != 2:
        raise ValueError(
            "name the layer: --spec interdomain.megatron.spec CONDITION (interdomain, s4d, "
            "softmax, ...)."
        )
    # If the module cannot be imported, Megatron-Core 0.19 would train its own softmax model.
    module, name = args.spec
    spec: Any = vars(import_module(module)).get(name)
    # The layer pattern. Up to Megatron-Core 0.17 its option was --hybrid-override-pattern.
    pattern = getattr(args, "hybrid_layer_pattern", None)
    pattern = pattern or getattr(args, "hybrid_override_pattern", None)
    # `spec` is GPTModel's layer, or HybridModel's stack, whose submodules are layers by letter.
    layers = [spec]
    slots = getattr(spec, "submodules", None)
    if hasattr(slots, "gdn_layer"):
        if not pattern:
            raise ValueError(
                'give the layers of the HybridModel: --hybrid-layer-pattern "G-G-*-G-", say.'
            )
        from .hybrid import SLOTS, mixer_letters

        layers = [getattr(slots, SLOTS[letter]) for letter in mixer_letters(pattern)]
    elif pattern:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} is ignored by GPTModel's layers, as {module} makes "
            "them. Take the script of the HybridModel and --spec interdomain.megatron.hybrid, or "
            "a spec made by layer_spec(layers=...)."
        )
    for layer in layers:
        attention = getattr(getattr(layer, "submodules", None), "self_attention", None)
        if getattr(attention, "module", None) is not InterdomainAttention:
            raise ValueError(
                f"--spec {module} {name} is no layer of this project. Name a layer that "
                "interdomain.megatron.layer_spec made, or --spec interdomain.megatron.spec with "
                f"one of {', '.join(CONDITIONS)}."
            )
    return spec, layers


def params_of(layer: Any) -> dict[str, Any]:
    """Returns the keyword arguments of a layer's InterdomainAttention.

    Args:
        layer: The specification of a layer, such as `layer_spec` returned.
    """
    return layer.submodules.self_attention.params


def _check_shape(args: Namespace, mixers: tuple[MixerConfig, ...], mlp_apart: bool) -> None:
    """Checks widths and numbers of heads before Megatron builds a layer.

    An error there would be a traceback.

    Args:
        args: The parsed arguments.
        mixers: The mixers of the layers.
        mlp_apart: True if Megatron counts a mixer and its MLP as two layers, as HybridModel does.
    Raises:
        ValueError: They make no model. The error has Megatron's names of the sizes.
    """
    # Megatron asks for these if they are missing.
    if None in (args.hidden_size, args.num_attention_heads, args.num_layers):
        return
    shape = Namespace(**vars(args))
    if mlp_apart:
        # Megatron counts the layers of the pattern only later.
        shape.num_layers = 2 * len(mixers)
    if shape.kv_channels is None:
        shape.kv_channels = args.hidden_size // args.num_attention_heads
    ranks = args.tensor_model_parallel_size
    groups = key_heads(args)
    # plain_config checks the sizes, and check_split the number of ranks.
    try:
        check_split(plain_config(shape, groups, mixers, mlp_apart), ranks)
    except ValueError as e:
        raise ValueError(
            f"--hidden-size {args.hidden_size}, --num-layers {args.num_layers}, "
            f"--num-attention-heads {args.num_attention_heads}, --kv-channels "
            f"{shape.kv_channels}, --num-query-groups {groups} and --tensor-model-parallel-size "
            f"{ranks} make no model of this project: {e}"
        ) from e


def key_heads(args: Namespace) -> int:
    """Returns the number of heads of keys and values that Megatron's arguments give."""
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads
