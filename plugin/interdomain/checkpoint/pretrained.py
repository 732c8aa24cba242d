"""Exported models: `model, tokenizer = load_pretrained("exports/debug")`.

    config.json                       the model's configuration, checksums of the weights, facts about the run
    model.safetensors                 the weights; or model-00001-of-0000N.safetensors with
                                      model.safetensors.index.json
    tokenizer.model                   the tokenizer that the model was trained with (or tiktoken.json,
                                      hf_tokenizer.json)
    tokenizer.json, tokenizer_config.json   the same for transformers' AutoTokenizer

Nothing in an exported model is ever unpickled. `interdomain convert` writes it under another name,
and renames it when it is complete.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interdomain.data import Tokenizer, check_vocab, load_tokenizer, recorded_documents
from interdomain.data.indexed import file_sha256
from interdomain.data.tokenizer_export import padding_id
from interdomain.model.config import Execution, ModelConfig
from interdomain.model.transformer import Transformer, meta_model

from .config_json import from_transformers, to_transformers
from .step_folder import TOKENIZER

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # names the files of the weights if there are several
# The data types of exported weights, by their names in config.json.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The classes of the exported model's own Python files, which transformers' Auto classes load.
AUTO_MAP = {
    "AutoConfig": "configuration_interdomain.InterdomainConfig",
    "AutoModel": "modeling_interdomain.InterdomainModel",
    "AutoModelForCausalLM": "modeling_interdomain.InterdomainForCausalLM",
    "AutoModelForSequenceClassification": "modeling_interdomain.InterdomainForSequenceClassification",
}
# transformers' base_model_prefix, which begins the name of every tensor but the head's.
MODEL_PREFIX = "model."


def stored_name(name: str) -> str:
    """Returns a tensor's name in an exported model.

    transformers' classes have the decoder as `model` and the head beside it, as `output`. The
    inverse is `name.removeprefix(MODEL_PREFIX)`.

    Args:
        name: The tensor's name in the package's own model.
    """
    if name.startswith("output."):
        return name
    return MODEL_PREFIX + name


def storage_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the data type in which a tensor is stored.

    Args:
        name: The tensor's name in the package's model or in an exported one.
        dtype: The data type of the model. SSM parameters, and the random frequencies of feature
            maps, are stored as float32 if it is less precise.
    """
    if ".attention.ssm." in name or ".feature_map." in name:
        return torch.promote_types(dtype, torch.float32)
    return dtype


def shard_names(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Distributes tensors over files, in order.

    Args:
        sizes: Bytes of each tensor, by name.
        max_bytes: Largest number of bytes per file. A larger tensor has a file of its own.

    Returns:
        The names of the tensors in each file. There is always a file: without tensors it is empty.
    """
    files: list[list[str]] = [[]]
    filled = 0  # bytes in the last file
    for name, size in sizes.items():
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def write_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    read: Callable[[list[str]], dict[str, Tensor]],
    max_shard_bytes: int,
) -> int:
    """Writes the model's tensors, one file at a time.

    Args:
        folder: The folder of the exported model.
        config: The model's configuration, which gives the tensors' names and sizes.
        dtype: The data type to store. If it is less precise than float32, SSM parameters and random
            frequencies of feature maps are stored in float32.
        read: read(names) -> tensors by name. It is called once per file, with the names of the
            tensors in it, which are those of the package's own model.
        max_shard_bytes: Largest number of bytes per file. A larger tensor has a file of its own.

    Returns:
        The number of tensors.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
        ValueError: A tensor has another shape than the model's.
    """
    # Plan the files before any tensor is read.
    expected = meta_model(config).state_dict()
    dtypes = {name: storage_dtype(name, dtype) for name in expected}
    sizes = {name: x.numel() * dtypes[name].itemsize for name, x in expected.items()}
    shards = shard_names(sizes, max_shard_bytes)

    # Write them one by one, so that only the tensors of one file are in memory. Their names in the
    # file are those of the transformers model. `weight_map` has the file of each.
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = folder / WEIGHTS
        if len(shards) > 1:
            file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        sources = read(names)
        tensors = {}
        for name in names:
            # A source is let go of when it is converted: the file is not in memory twice.
            source = sources.pop(name)
            if source.shape != expected[name].shape:
                raise ValueError(
                    f"the weights do not fit the configuration: {name} is {list(source.shape)}, and "
                    f"the model needs {list(expected[name].shape)}. Take another checkpoint."
                )
            tensors[stored_name(name)] = source.to(dtypes[name]).contiguous()
        # safetensors makes files that only their owner can read. Give this one the permissions of
        # a usual new file.
        file.touch()
        mode = file.stat().st_mode
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except SafetensorError as e:  # this is no OSError, even where the disk is full
            raise OSError(
                f"writing {file} failed ({e}). Check the free space and the permissions."
            ) from e
        file.chmod(mode)
        weight_map |= dict.fromkeys(tensors, file.name)
        tensors.clear()  # before the next file's are read

    # The index says in which file each tensor is.
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(weight_map)


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """Returns the SHA-256 of each file by its name."""
    return {file.name: file_sha256(file) for file in files}


def write_config(
    folder: Path, config: ModelConfig, dtype: str, tokenizer: Tokenizer, facts: dict[str, Any]
) -> None:
    """Writes config.json beside weights that are there already.

    Args:
        folder: The folder of the exported model.
        config: The model's configuration.
        dtype: The name of the weights' data type: float32, bfloat16 or float16.
        tokenizer: The model's tokenizer.
        facts: What is known of the run, such as its step and its data.
    """
    record = {
        # What transformers reads. `auto_map` names the classes in the exported model's own code.
        "model_type": "interdomain",
        "architectures": ["InterdomainForCausalLM"],
        "auto_map": AUTO_MAP,
        "use_cache": True,
        "dtype": dtype,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": padding_id(tokenizer),
        # The model's settings.
        **to_transformers(config),
        # What this package compares when it loads the model.
        "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256},
        "weights": checksums(sorted(folder.glob("*.safetensors"))),
        # Where the model comes from.
        "facts": facts,
    }
    (folder / CONFIG).write_text(json.dumps(record, indent=2) + "\n")


def read_config(folder: Path | str) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads config.json of an exported model.

    Args:
        folder: The exported model.

    Returns:
        The model's configuration, and all of config.json.

    Raises:
        FileNotFoundError: The folder has no config.json.
        ValueError: It is damaged, or of another project or version.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a model folder: it has no {CONFIG}. Make one with interdomain convert."
        )
    try:
        record = json.loads(path.read_text())
        if record["model_type"] != "interdomain":
            raise ValueError(f"its model_type is {record['model_type']!r}")
        return from_transformers(record), record
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is damaged, or not of this project and version ({type(e).__name__}: {e})."
        ) from e


def weight_files(folder: Path | str) -> list[Path]:
    """Returns the files of an exported model's weights.

    They are model.safetensors, or the files that model.safetensors.index.json names.

    Args:
        folder: The exported model.

    Raises:
        FileNotFoundError: A file is missing.
    """
    folder = Path(folder)
    names = {WEIGHTS}
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        # Take their last names only: the index cannot lead out of this folder.
        names = {Path(file).name for file in weight_map.values()}
    files = [folder / name for name in sorted(names)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} lacks {file.name}; copy the whole folder again or convert again."
            )
    return files


@contextmanager
def open_weights(path: Path) -> Iterator[safe_open]:
    """Opens a file of weights, of which tensors are read one by one.

    Args:
        path: The file, one of `weight_files`.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as e:
        raise ValueError(
            f"{path} is truncated or damaged ({e}); copy the folder again or convert again."
        ) from e


def read_tensors(folder: Path | str) -> dict[str, Tensor]:
    """Reads the tensors of an exported model to the CPU, in the data types that are stored.

    Args:
        folder: The exported model.

    Returns:
        The tensors by the names that the package's own model has for them.

    Raises:
        FileNotFoundError, ValueError: A file is missing or damaged.
    """
    tensors = {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118 (a safetensors file cannot be iterated)
                tensors[name.removeprefix(MODEL_PREFIX)] = file.get_tensor(name)
    return tensors


def check_weights(folder: Path | str, record: dict[str, Any]) -> None:
    """Checks that every file of the weights has the bytes that `interdomain convert` wrote.

    Args:
        folder: The exported model.
        record: The contents of config.json. One that transformers wrote, when it saved a model
            anew, has no checksums, and passes.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A checksum differs.
    """
    recorded = record.get("weights")
    if recorded is None:
        return
    for file, checksum in checksums(weight_files(folder)).items():
        if recorded.get(file) != checksum:
            raise ValueError(
                f"{Path(folder) / file} is not as it was written: its checksum differs from {CONFIG}'s."
            )


def load_model(
    folder: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    verify: bool = True,
) -> Transformer:
    """Loads an exported model, in eval mode and without gradients.

    Args:
        folder: The exported model.
        device: The device of the weights.
        dtype: The data type of the weights; None for the one that is stored. SSM parameters are
            float32, or float64 in a model of that type.
        backend: The backend of the scan, one of `interdomain.scan.BACKENDS`. "auto" chooses the
            fastest that runs on the device.
        verify: True to compare the checksums of the weights with those in config.json. This reads
            the files once more.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or does not belong to the others.
    """
    config, record = read_config(folder)
    tensors = read_tensors(folder)
    # The model takes over the tensors themselves (`assign`), so it is made without memory.
    with torch.device("meta"):
        model = Transformer(config, Execution(backend))
    placed = {}
    for name, tensor in tensors.items():
        placed[name] = tensor.to(device, storage_dtype(name, dtype or tensor.dtype))
    try:
        model.load_state_dict(placed, assign=True)
    except RuntimeError as e:  # it lists the tensors that are missing, unknown or of another shape
        differences = " ".join(str(e).split())
        raise ValueError(f"the weights of {folder} do not fit its {CONFIG}: {differences}") from e
    if verify:
        check_weights(folder, record)
    return model.requires_grad_(False).eval()


def load_pretrained(folder: Path | str, **options: Any) -> tuple[Transformer, Tokenizer]:
    """Loads the model, in eval mode, and the tokenizer of an exported model.

    Args:
        folder: The exported model.
        options: The keyword arguments of `load_model`: `device`, `dtype`, `backend` and `verify`.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or does not belong to the others.
    """
    config, record = read_config(folder)
    tokenizer = load_checked_tokenizer(folder, config, record)
    return load_model(folder, **options), tokenizer


def load_checked_tokenizer(
    folder: Path | str, config: ModelConfig, record: dict[str, Any]
) -> Tokenizer:
    """Loads the tokenizer of an exported model or of a checkpoint.

    Its `documents` say how documents begin and end in the model's training data.

    Args:
        folder: The exported model or the checkpoint.
        config: The model's configuration.
        record: The contents of config.json or of interdomain.json.

    Raises:
        FileNotFoundError: The folder lacks the tokenizer's file.
        ValueError: The file is another tokenizer than the record's, or has more ids than the
            model's vocabulary.
    """
    folder = Path(folder)
    # The name and the checksum of the tokenizer's file.
    described = record.get("tokenizer", {})
    # The folder may have other tokenizers, too, which were made from this one for other programs.
    file = folder / Path(described.get("file", TOKENIZER)).name
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {file.name}. Copy it from the folder that the model came from."
        )
    tokenizer = load_tokenizer(file)
    if tokenizer.sha256 != described.get("sha256"):
        raise ValueError(
            f"{file} is not the tokenizer of this model: its checksum differs from the record's."
        )
    check_vocab(tokenizer.vocab_size, config.vocab_size)
    # The description of the run, whose "documents" are the tokens around documents. It stands in
    # interdomain.json itself, and in config.json among the facts.
    run = record.get("run") or record.get("facts", {}).get("run", {})
    tokenizer.documents = recorded_documents(run, tokenizer)
    return tokenizer
