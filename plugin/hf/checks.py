"""What a model is loaded from, and where to: refused where it cannot be."""

import hashlib
import json
from pathlib import Path


def check_places(places: dict) -> None:
    """Raises ValueError unless a device_map names one device, whose memory holds the model."""
    found = sorted(set(map(str, places.values())))
    if len(found) > 1 or "disk" in found:
        raise ValueError(f"this model runs on one device, device_map puts it on {', '.join(found)}: name one.")


def check_weights(folder: Path) -> None:
    """Raises FileNotFoundError, ValueError unless the files of weights are those that config.json names."""
    config = folder / "config.json"
    weights = json.loads(config.read_text()).get("weights") if config.is_file() else None
    for name, wanted in (weights or {}).items():
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{folder} lacks {name}; copy the whole folder again.")
        if sha256(file) != wanted:
            raise ValueError(f"{file} is not the file that was exported (its checksum differs). Copy the folder again.")


def sha256(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
