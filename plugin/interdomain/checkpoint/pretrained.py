"""The standalone folder: `model, tokenizer = load_pretrained("exports/debug")`.

    config.json                       the model's configuration, checksums of the weights, facts about the run
    model.safetensors                 the weights; or model-00001-of-0000N.safetensors with model.safetensors.index.json
    tokenizer.model                   the tokenizer that the model was trained with (or tiktoken.json, hf_tokenizer.json)
    tokenizer.json, tokenizer_config.json   the same for transformers' AutoTokenizer

Nothing in it is ever unpickled. A folder is written under another name and renamed when it is complete.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interdomain.data import check_vocab, load_tokenizer, recorded_documents
from interdomain.data.indexed import file_sha256
from interdomain.data.tokenizer_export import padding_id
from interdomain.model.config import Execution, ModelConfig
from interdomain.model.transformer import Transformer, meta_model

from .config_json import from_transformers, to_transformers
from .step_folder import TOKENIZER, check_types

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO_MAP = {
    "AutoConfig": "configuration_interdomain.InterdomainConfig",
    "AutoModel": "modeling_interdomain.InterdomainModel",
    "AutoModelForCausalLM": "modeling_interdomain.InterdomainForCausalLM",
    "AutoModelForSequenceClassification": "modeling_interdomain.InterdomainForSequenceClassification",
}
BASE = "model."  # before the name of every tensor but the head's: transformers' base_model_prefix


def stored_name(name: str) -> str:
    """A tensor's name in a folder. `name.removeprefix(BASE)` is the inverse."""
    return name if name.startswith("output.") else BASE + name


def storage_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a model of this one: the dynamics and random frequencies are never less than float32."""
    spared = ".attention.ssm." in name or ".feature_map." in name
    return torch.promote_types(dtype, torch.float32) if spared else dtype


def shard_names(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Tensor names in order, cut into shards of at most `max_bytes` each (a larger tensor stands alone)."""
    shards, filled = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    read: Callable[[list[str]], dict[str, Tensor]],
    max_shard_bytes: int,
) -> int:
    """Write the model's tensors shard by shard; `read(names)` returns {name: tensor} for one shard at a time.

    Returns: the number of tensors. Raises: OSError where the disk does not take it.
    """
    expected = meta_model(config).state_dict()
    dtypes = {name: storage_dtype(name, dtype) for name in expected}
    sizes = {name: t.numel() * dtypes[name].itemsize for name, t in expected.items()}
    shards = shard_names(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = (
            WEIGHTS if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        tensors = {
            stored_name(name): tensor.to(dtypes[name]).contiguous()
            for name, tensor in read(names).items()
        }
        (folder / file).touch()
        mode = (
            (folder / file).stat().st_mode
        )  # by the umask; safetensors writes for the owner alone
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as e:  # a full disk too arrives as this, which is no OSError
            raise OSError(
                f"writing {folder / file} failed ({e}). Check the free space and the permissions."
            ) from e
        (folder / file).chmod(mode)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(weight_map)


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """{file name: sha256}."""
    return {file.name: file_sha256(file) for file in files}


def write_config(
    folder: Path, config: ModelConfig, dtype: str, tokenizer: Any, facts: dict[str, Any]
) -> None:
    """config.json, for weights that are written."""
    record = {
        "model_type": "interdomain",
        "architectures": ["InterdomainForCausalLM"],
        "auto_map": AUTO_MAP,
        "use_cache": True,
        "dtype": dtype,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": padding_id(tokenizer),
        **to_transformers(config),
        "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256},
        "weights": checksums(sorted(folder.glob("*.safetensors"))),
        "facts": facts,
    }
    (folder / CONFIG).write_text(json.dumps(record, indent=2) + "\n")


def read_config(folder: Path | str) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's configuration in a standalone folder, and all of config.json, with checksums and facts about the run.

    Raises: FileNotFoundError; ValueError for a config.json that is damaged, or of another project or version.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a model folder: it has no {CONFIG}. Make one with interdomain convert."
        )
    try:
        record = json.loads(path.read_text())
        if record["model_type"] != "interdomain":
            raise KeyError("model_type")
        check_types(record, tokenizer=dict, weights=dict | None, facts=dict)
        return from_transformers(record), record
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(
            f"{path} is damaged, or not of this project and version ({type(e).__name__}: {e})."
        ) from e


def weight_files(folder: Path | str) -> list[Path]:
    """model.safetensors, or without it the shards that the index names. Raises: FileNotFoundError, ValueError."""
    folder, names = Path(folder), {WEIGHTS}
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        try:
            names = {
                Path(name).name
                for name in json.loads((folder / INDEX).read_text())["weight_map"].values()
            }
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f"{folder / INDEX} is damaged ({e}); convert the checkpoint again."
            ) from e
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} lacks {name}; copy the whole folder again or convert again."
            )
    return [folder / name for name in sorted(names)]


def read_tensors(folder: Path | str) -> dict[str, Tensor]:
    """The tensors of a folder by name, on the CPU, as stored. Raises: FileNotFoundError, ValueError."""
    tensors = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as f:
                tensors |= {name.removeprefix(BASE): f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        except SafetensorError as e:
            raise ValueError(
                f"{file} is truncated or damaged ({e}); copy the folder again or convert again."
            ) from e
    return tensors


def check_tensors(folder: Path | str, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Check that names and shapes are exactly the model's, and the values floating point. Raises ValueError."""
    expected = {
        name: list(tensor.shape) for name, tensor in meta_model(config).state_dict().items()
    }
    stored = {
        name: list(x.shape) if x.dtype in DTYPES.values() else x.dtype
        for name, x in tensors.items()
    }
    wrong = [
        f"{name} is {stored.get(name, 'missing')}, the configuration says {expected.get(name, 'nothing of it')}"
        for name in sorted(expected.keys() | stored.keys())
        if stored.get(name) != expected.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the weights of {folder} do not fit its {CONFIG}: {'; '.join(wrong[:3])}{more}."
        )


def check_weights(folder: Path | str, record: dict[str, Any]) -> None:
    """Raises ValueError unless every weight file is the one of `record`, byte for byte. transformers records no checksums."""
    if (recorded := record.get("weights")) is None:
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
    """The model of a standalone folder, in eval mode, without gradients.

    Args:
        dtype: of the weights. None: as stored. The dynamics are float32, or float64 in a model of that.
        backend: of the scan, one of `interdomain.scan.BACKENDS`.
        verify: compare the checksums of the weights, which reads them once more.
    Raises: FileNotFoundError; ValueError for a file that is damaged, or does not belong to the others.
    """
    config, record = read_config(folder)
    tensors = read_tensors(folder)
    check_tensors(folder, config, tensors)
    if verify:
        check_weights(folder, record)
    with torch.device("meta"):
        model = Transformer(config, Execution(backend))
    placed = {
        name: x.to(device, storage_dtype(name, dtype or x.dtype)) for name, x in tensors.items()
    }
    model.load_state_dict(placed, assign=True)
    return model.requires_grad_(False).eval()


def load_pretrained(folder: Path | str, **options: Any) -> tuple[Transformer, Any]:
    """The model, in eval mode, and the tokenizer (`interdomain.data.Tokenizer`) of a folder that `interdomain convert` wrote.

    Args:
        options: device, dtype, backend and verify, as in `load_model`. Its errors may arise.
    """
    config, record = read_config(folder)
    tokenizer = load_checked_tokenizer(folder, config, record)
    return load_model(folder, **options), tokenizer


def load_checked_tokenizer(folder: Path | str, config: ModelConfig, record: dict[str, Any]) -> Any:
    """The tokenizer of a folder or checkpoint, with the documents of its data. Raises ValueError unless it is the one of
    `record`."""
    folder, described = Path(folder), record.get("tokenizer") or {}
    check_types(described, file=str | None, sha256=str | None)
    file = Path(described.get("file") or TOKENIZER).name
    if not (folder / file).is_file():  # perhaps there is another kind's, made for others to read
        raise FileNotFoundError(
            f"{folder} has no {file}. Copy it from the folder that the model came from."
        )
    tokenizer = load_tokenizer(folder / file)
    if tokenizer.sha256 != described.get("sha256"):
        raise ValueError(
            f"{folder / file} is not the tokenizer of this model: its checksum differs from the record's."
        )
    check_vocab(tokenizer.vocab_size, config.vocab_size)
    # A checkpoint's record has "run" itself; a folder's has it among the facts.
    run = record.get("run") or record.get("facts", {}).get("run") or {}
    check_types({"run": run}, run=dict)
    tokenizer.documents = recorded_documents(run, tokenizer)
    return tokenizer
