"""Checkpoints as the trainer writes them, made without it: model, optimizer and loader state, the record, the tokenizer."""

import json
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from interdomain.checkpoint.step_folder import RECORD_FILE, TOKENIZER
from interdomain.model import Transformer, cell_of

from ..model.common import lively, small_config

VOCAB = 420  # a few more than the tokenizer's


def small_model(condition="interdomain", **overrides) -> Transformer:
    return lively(small_config(condition, vocab_size=VOCAB, **overrides), torch.float32)


def edit_run(folder: Path, **facts) -> Path:
    """Set facts of the run in the record of a checkpoint or an exported model, or remove those that are None."""
    checkpoint = (folder / RECORD_FILE).is_file()
    file = folder / (RECORD_FILE if checkpoint else "config.json")
    record = json.loads(file.read_text())
    run = record["run"] if checkpoint else record["facts"]["run"]
    for name, fact in facts.items():
        run[name] = fact
        if fact is None:
            del run[name]
    file.write_text(json.dumps(record))
    return folder


def write_checkpoint(folder: Path, model, tokenizer, step=100) -> Path:
    """folder/step-N with one rank's shard."""
    checkpoint = folder / f"step-{step}"
    checkpoint.mkdir(parents=True)
    shutil.copyfile(tokenizer.path, checkpoint / TOKENIZER)
    record = {  # as interdomain.titan.resume.checkpoint writes it
        "format_version": 1,
        "model": model.config.to_dict(),
        **cell_of(model.config, "debug")._asdict(),
        "run": {
            "seed": 42,
            "seq_len": 128,
            "planned_steps": 400,
            "data_fingerprint": "0123abcd",
            "documents": tokenizer.documents.to_dict(),
        },
        "tokenizer": {
            "file": TOKENIZER,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
        },
        "versions": {"interdomain": "0.1.0", "torch": torch.__version__, "torchtitan": "0.2.2"},
        "step": step,
        "tokens": step * 2048,
    }
    (checkpoint / RECORD_FILE).write_text(json.dumps(record))
    state = dict(model.state_dict())
    beside = {
        f"optimizer.state.{name}.exp_avg": torch.zeros_like(tensor)
        for name, tensor in state.items()
    }
    beside |= {"optimizer.param_groups.norm.weight.lr": 3e-4, "train_state": {"step": step}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({**state, **beside}, checkpoint_id=checkpoint, no_dist=True)
    return checkpoint
