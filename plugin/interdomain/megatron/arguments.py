"""The mixer's settings as arguments of a parser, under the names that they have in the other host: `--mixer.n_basis 32`."""

import argparse
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from interdomain.data.corpus import read_manifest
from interdomain.folders import expand_path
from interdomain.model.config import EXECUTION_SETTINGS, SIZES, Execution, ModelConfig, build_config

from .spec import SETTINGS, backbone


def add_mixer_arguments(parser: Any) -> None:
    """Settings of MixerConfig are None where they are not given; then the condition or the size decides."""
    for name, f in (SETTINGS | EXECUTION_SETTINGS).items():
        of: Any = f.type
        kind = _true_or_false if of is bool else next(kind for kind in (int, float, str) if isinstance(kind(), of))
        default = f.default if name in EXECUTION_SETTINGS else None
        choices = f.metadata.get("choices") or None
        parser.add_argument(f"--mixer.{name}", type=kind, choices=choices, default=default, help=f.metadata["text"])
    parser.add_argument("--ssm-lr", type=float, default=1e-3, help="the dynamics' peak learning rate is min(lr, this)")


def mixer_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given."""
    return {name: value for name in SETTINGS if (value := getattr(args, f"mixer.{name}")) is not None}


def execution(args: argparse.Namespace) -> Execution:
    return Execution(**{name: getattr(args, f"mixer.{name}") for name in EXECUTION_SETTINGS})


def corpus_files(folder: str, split: str) -> list[str]:
    """The prefixes of a prepared corpus's shards. Raises: ValueError for a corpus with answers; as `read_manifest`."""
    manifest = read_manifest(Path(folder))
    if "answers" in manifest:
        raise ValueError(
            f"{folder} is a corpus whose loss is that of its answers, and Megatron's data sets would train on every token. "
            "Train on it under TorchTitan (./launch.sh)."
        )
    return [f"{folder}/{shard['name']}" for shard in manifest["splits"].get(split, [])]


def corpus_record(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint records of a prepared corpus, as params of InterdomainAttention."""
    documents = {"begin": [], "end": [manifest["eos_id"]]}
    return {"tokenizer": manifest["tokenizer"]["sha256"], "documents": documents}


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
        setattr(namespace, self.dest, values)
        for name, value in model_arguments(build_config(values)).items():
            setattr(namespace, name, value)
        setattr(namespace, "mixer.n_basis", SIZES[values]["n_basis"])


class Corpus(argparse.Action):
    """`--data.corpus FOLDER`: a prepared corpus, whose tokens Megatron's data sets read as they are."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            values = expand_path(values)
            manifest = read_manifest(Path(values))
            paths = [corpus_files(values, split) for split in ("train", "validation")]
        except (OSError, ValueError) as e:
            parser.exit(2, f"error: {e}\n")
        setattr(namespace, self.dest, values)
        namespace.train_data_path, namespace.valid_data_path = paths
        namespace.tokenizer_type = "NullTokenizer"
        namespace.vocab_size = manifest["vocab_size"] - NullTokenizer(0).vocab_size  # up to 0.17 it adds one
        if hasattr(namespace, "null_tokenizer_eod_id"):  # from 0.19
            namespace.null_tokenizer_eod_id = manifest["eos_id"]
        namespace.make_vocab_size_divisible_by = 1  # rows that are added take part in the softmax


def _true_or_false(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False") from None
