"""Checkpoints as the trainer writes them, made without it: model, optimizer and loader state, the record, the tokenizer."""

import json
import shutil
import tomllib
from pathlib import Path

import torch

from interdomain.checkpoint.index import write_tensors
from interdomain.checkpoint.step_folder import RECORD_FILE, TOKENIZER
from interdomain.model import Transformer, cell_of

from ..model.common import lively, small_config

VOCAB = 420  # a few more than the tokenizer's


def small_model(condition="interdomain", **overrides) -> Transformer:
    return lively(small_config(condition, vocab_size=VOCAB, **overrides), torch.float32)


def edit_run(folder: Path, part="run", **changes) -> Path:
    """Sets entries in a part of the record of a checkpoint or an exported model. Removes those that are None."""
    file = folder / RECORD_FILE
    if not file.is_file():
        file = folder / "config.json"
    record = json.loads(file.read_text())
    entries = record.get("facts", record).setdefault(part, {})
    for name, entry in changes.items():
        entries[name] = entry
        if entry is None:
            del entries[name]
    file.write_text(json.dumps(record))
    return folder


def write_checkpoint(folder: Path, model, tokenizer, step=100) -> Path:
    """Writes folder/step-N with one rank's shard."""
    checkpoint = folder / f"step-{step}"
    checkpoint.mkdir(parents=True)
    shutil.copyfile(tokenizer.path, checkpoint / TOKENIZER)
    # As interdomain.titan.resume.checkpoint writes it.
    record = tomllib.loads(f"""
format_version = 1
step = {step}
tokens = {step * 2048}
[run]
seed = 42
seq_len = 128
planned_steps = 400
data_fingerprint = "0123abcd"
[tokenizer]
file = "{TOKENIZER}"
sha256 = "{tokenizer.sha256}"
vocab_size = {tokenizer.vocab_size}
[versions]
interdomain = "0.1.0"
torch = "{torch.__version__}"
torchtitan = "0.2.2"
""")
    record["model"] = model.config.to_dict()
    record |= cell_of(model.config, "debug")._asdict()
    record["run"]["documents"] = tokenizer.documents.to_dict()
    (checkpoint / RECORD_FILE).write_text(json.dumps(record))
    state = {"optimizer.param_groups.norm.weight.lr": 3e-4, "train_state": {"step": step}}
    for name, tensor in model.state_dict().items():
        state[name] = tensor
        state[f"optimizer.state.{name}.exp_avg"] = torch.zeros_like(tensor)
    write_tensors(checkpoint, state)
    return checkpoint
