"""The standalone folder: `model, tokenizer = load_pretrained("exports/debug")`.

    config.json                       the model's configuration, checksums of the weights, facts about the run
    model.safetensors                 the weights; or model-00001-of-0000N.safetensors with model.safetensors.index.json
    tokenizer.model                   the tokenizer that the model was trained with (or tiktoken.json, hf_tokenizer.json)
    tokenizer.json, tokenizer_config.json   the same for transformers' AutoTokenizer

Nothing in it is ever unpickled. A folder is written under another name and renamed when it is whole.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interdomain.data import check_vocab, load_tokenizer
from interdomain.data.indexed import file_sha256
from interdomain.folders import require_utf8

from .config import PRECISIONS, Execution, ModelConfig
from .joined import join_projections
from .transformer import Transformer, meta_model
from .transformers_names import AUTO_MAP, BASE, from_transformers, stored_name, to_transformers

CONFIG, WEIGHTS, INDEX, TOKENIZER = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.model",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def is_dynamics(name: str) -> bool:
    """Whether a parameter belongs to the dynamics, which stay float32 in every folder, and are no less on every device."""
    return ".attention.ssm." in name


def storage_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    spared = is_dynamics(name) or name.endswith(".feature_map.frequencies")
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


def write_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, read, max_shard_bytes: int) -> int:
    """Write the model's tensors shard by shard; `read(names)` returns {name: tensor} for one shard at a time.

    Returns: the number of tensors. Raises: OSError where the disk does not take it.
    """
    expected = meta_model(config).state_dict()
    dtypes = {name: storage_dtype(name, dtype) for name in expected}
    shards = shard_names({name: t.numel() * dtypes[name].itemsize for name, t in expected.items()}, max_shard_bytes)
    weight_map = {}
    for i, names in enumerate(shards):
        file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {stored_name(name): tensor.to(dtypes[name]).contiguous() for name, tensor in read(names).items()}
        (folder / file).touch()
        mode = (folder / file).stat().st_mode  # by the umask; safetensors writes for the owner alone
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as e:  # a full disk too arrives as this, which is no OSError
            raise OSError(f"writing {folder / file} failed ({e}). Check the free space and the permissions.") from e
        (folder / file).chmod(mode)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(t.numel() * dtypes[name].itemsize for name, t in expected.items())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(weight_map)


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """{file name: sha256}; several at a time, for reading is slower than hashing on many a machine, and on others not."""
    files = list(files)
    with ThreadPoolExecutor() as pool:
        return dict(zip((f.name for f in files), pool.map(file_sha256, files), strict=True))


def write_config(folder: Path, config: ModelConfig, dtype: str, tokenizer, facts: dict) -> None:
    """config.json, for weights that are written."""
    record = {
        "model_type": "interdomain",
        "architectures": ["InterdomainForCausalLM"],
        "auto_map": AUTO_MAP,
        "use_cache": True,
        "dtype": dtype,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        **to_transformers(config),
        "tokenizer": {"file": tokenizer.file, "sha256": tokenizer.sha256},
        "weights": checksums(sorted(folder.glob("*.safetensors"))),
        "facts": facts,
    }
    (folder / CONFIG).write_text(json.dumps(record, indent=2) + "\n")


def read_config(folder: Path | str) -> tuple[ModelConfig, dict]:
    """(configuration, the whole record) of a standalone folder. Raises FileNotFoundError, ValueError."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} is not a model folder: it has no {CONFIG}. Make one with python -m interdomain.tools.convert."
        )
    try:
        record = json.loads(path.read_text())
        if record["model_type"] != "interdomain":
            raise KeyError("model_type")
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is damaged or not ours ({type(e).__name__}: {e}); convert the checkpoint again."
        ) from e
    try:
        return from_transformers(record), record
    except KeyError as e:
        raise ValueError(f"{path} lacks the setting {e}; convert the checkpoint again.") from e


def weight_files(folder: Path | str) -> dict[str, Path]:
    """{tensor name: file}, checked to exist; one whole file comes first, as in transformers.

    Raises: FileNotFoundError, ValueError.
    """
    folder = Path(folder)
    require_utf8(folder)
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
            files = {name.removeprefix(BASE): folder / Path(file).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{folder / INDEX} is damaged ({type(e).__name__}: {e}); convert the checkpoint again."
            ) from e
    else:
        files = {"": folder / WEIGHTS}
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise FileNotFoundError(f"{folder} lacks {file.name}; copy the whole folder again or convert again.")
    if "" in files:
        with _open(folder / WEIGHTS) as f:
            files = {name.removeprefix(BASE): folder / WEIGHTS for name in f.keys()}  # noqa: SIM118
    return files


@contextmanager
def _open(file: Path):
    try:
        with safe_open(file, framework="pt") as f:
            yield f
    except SafetensorError as e:
        raise ValueError(f"{file} is truncated or damaged ({e}); copy the folder again or convert again.") from e


def read_tensors(folder: Path | str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a folder by name, on the CPU, as stored."""
    files = weight_files(folder)
    names = list(files) if names is None else list(names)
    missing = [name for name in names if name not in files]
    if missing:
        raise ValueError(f"{folder} lacks the tensor {missing[0]} (and {len(missing) - 1} more); convert again.")
    tensors = {}
    for file in sorted({files[name] for name in names}):
        with _open(file) as f:
            held = {name.removeprefix(BASE): name for name in f.keys()}  # noqa: SIM118
            for name in (n for n in names if files[n] == file):
                if name not in held:
                    raise ValueError(f"{file} lacks the tensor {name} that the index puts there; convert again.")
                tensors[name] = f.get_tensor(held[name])
    return tensors


def check_tensors(folder: Path | str, config: ModelConfig, found: dict[str, Tensor]) -> None:
    """Names and shapes must be exactly the model's, and the values floating point. Raises ValueError."""
    expected = meta_model(config).state_dict()
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in expected]
    wrong += [
        f"{name} is {list(found[name].shape)}, the configuration says {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    wrong += [
        f"{name} is stored as {tensor.dtype}, which no parameter is"
        for name, tensor in found.items()
        if tensor.dtype not in DTYPES.values()
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ValueError(
            f"the weights of {folder} do not fit its {CONFIG}: {'; '.join(wrong[:3])}{more}. Convert the checkpoint again."
        )


def check_weights(folder: Path | str, record: dict) -> None:
    """Raises ValueError unless every weight file is the one of `record`, byte for byte. Old folders have no checksums."""
    recorded = record.get("weights")
    if recorded is None:
        return
    found = checksums(sorted(set(weight_files(folder).values())))
    for file, checksum in found.items():
        if not isinstance(recorded, dict) or recorded.get(file) != checksum:
            raise ValueError(
                f"{Path(folder) / file} is not as it was written: its checksum differs from {CONFIG}'s. Copy the folder "
                "again or convert again."
            )


def load_model(
    folder: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    precision: str | None = None,
    backend: str = "auto",
    verify: bool = True,
) -> Transformer:
    """The model of a folder, in eval mode.

    Args:
        dtype: None keeps the stored one; the dynamics are float32, or float64 in a model of that.
        precision: in place of dtype, as training has it: `bf16`, `bf16-products` or `float32` (`PRECISIONS`). What a run
            trained in stands in config.json, facts.run.precision.
        verify: compare the checksums of the weights, which reads them once more.
    Raises: FileNotFoundError, ValueError with what is wrong and what to do.
    """
    if dtype not in (None, torch.float64, *DTYPES.values()):
        raise ValueError(f"dtype is {dtype!r}: give torch.float32, float64, bfloat16 or float16.")
    if precision is not None:
        if precision not in PRECISIONS or dtype is not None:
            raise ValueError(f"precision is {precision!r}: give {', '.join(PRECISIONS)}, and no dtype (got {dtype}).")
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config, record = read_config(folder)
    tensors = read_tensors(folder)
    check_tensors(folder, config, tensors)
    if verify:
        check_weights(folder, record)
    with torch.device("meta"):
        model = Transformer(config, Execution(backend, bf16_products=precision == "bf16-products"))
    placed = {
        name: tensor.to(device=device, dtype=storage_dtype(name, dtype or tensor.dtype))
        for name, tensor in tensors.items()
    }
    model.load_state_dict(placed, assign=True)
    join_projections(model)
    return model.requires_grad_(False).eval()


def load_pretrained(folder: Path | str, **options):
    """(model, tokenizer) of a standalone folder. Options and errors: `load_model`."""
    config, record = read_config(folder)
    tokenizer = load_checked_tokenizer(folder, config, record, CONFIG)
    return load_model(folder, **options), tokenizer


def load_checked_tokenizer(folder: Path | str, config: ModelConfig, record: dict, source: str):
    """The tokenizer of a folder or checkpoint. Raises ValueError unless it is the one of `record`, read from file `source`."""
    described = record.get("tokenizer")
    file = Path(str(described.get("file", TOKENIZER))).name if isinstance(described, dict) else TOKENIZER
    if not (Path(folder) / file).is_file():  # perhaps there is another kind's, made for others to read
        raise FileNotFoundError(
            f"{folder} has no {file}; copy the whole folder again or convert again. (A model that transformers saved: copy the "
            "file from the folder that it was loaded from.)"
        )
    tokenizer = load_tokenizer(Path(folder) / file)
    if not isinstance(described, dict) or tokenizer.sha256 != described.get("sha256"):
        raise ValueError(
            f"the tokenizer of {folder} is not the one that the model was trained with (its checksum differs from "
            f"{source}'s). Copy the folder again or convert again."
        )
    check_vocab(tokenizer.vocab_size, config.vocab_size)
    return tokenizer
