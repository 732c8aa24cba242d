"""An exported folder: who may read it, its model card, and what transformers' `generate` starts from."""

import json
import os

import pytest

from interdomain.model import cell_of, count_parameters
from interdomain.model.distributed_checkpoint import SIDECAR
from interdomain.model.pretrained import read_config
from interdomain.tools import convert
from interdomain.tools._model_card import last_validation

from .checkpoints import small_model, write_checkpoint


@pytest.fixture
def output(tmp_path):
    return tmp_path / "folder"


def convert_to(output, checkpoint):
    assert convert.main([str(checkpoint), "--output", str(output)]) == 0


def test_what_transformers_generates_with(tmp_path, tokenizer, output):
    """The vocabulary has rows that are no tokens; a text begins where training documents began."""
    convert_to(output, write_checkpoint(tmp_path / "run", small_model(), tokenizer))
    record = json.loads((output / "generation_config.json").read_text())
    assert record == {
        "bos_token_id": tokenizer.eos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.unk_id,
        "suppress_tokens": list(range(tokenizer.vocab_size, 420)),
    }


def test_files_have_the_permissions_that_the_umask_gives(tmp_path, tokenizer, output):
    umask, checkpoint = 0o027, write_checkpoint(tmp_path / "run", small_model(), tokenizer)
    before = os.umask(umask)
    try:
        convert_to(output, checkpoint)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {0o666 & ~umask}
    assert output.stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_the_card_says_what_the_run_recorded(tmp_path, tokenizer, output, condition):
    pytest.importorskip("tensorboard", reason="the extra `train` is not installed")
    from torch.utils.tensorboard import SummaryWriter

    model = small_model(condition)
    checkpoint = write_checkpoint(tmp_path / "run" / "checkpoint", model, tokenizer)
    record = json.loads((checkpoint / SIDECAR).read_text())
    record |= {"size": "debug", "condition": condition}  # as it was once written, whatever n_basis is
    (checkpoint / SIDECAR).write_text(json.dumps(record))
    convert_to(output, checkpoint)
    assert "| validation perplexity | not recorded |" in (output / "README.md").read_text()
    with SummaryWriter(str(tmp_path / "run" / "tb")) as writer:
        for step, perplexity in ((50, 30.0), (100, 20.25), (150, 10.0)):
            writer.add_scalar("validation_metrics/perplexity", perplexity, step)
    convert_to(tmp_path / "measured", checkpoint)
    card = (tmp_path / "measured" / "README.md").read_text()
    cell = cell_of(model.config, "debug")
    assert ("n_basis 6" in cell.condition) == (condition == "interdomain")
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    for line in (
        f"- {condition}",
        f"# Interdomain Attention, {cell}",
        f"| condition | {cell.condition} |",
        f"| parameters | {count_parameters(model):,} |",
        "| tokens trained on | 204,800 |",
        "| step | 100 of 400 |",
        "| validation perplexity | 20.250 at step 100 |",
        "| vocabulary | 420 (400 in use) |",
    ):
        assert line + "\n" in card
    assert f"trust_remote_code=True,prefix_token_id={tokenizer.eos_id} --tasks" in card
    assert ("softmax attention, the baseline" in card) == (condition == "softmax")
    facts = read_config(tmp_path / "measured")[1]["facts"]
    assert facts["validation"] == {"step": 100, "perplexity": 20.25}


def test_what_stands_beside_the_run_s_checkpoints_needs_no_tensorboard(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoint"
    for name, text in (
        ("step-50", '{"step": 50, "loss": 3.0, "perplexity": 20.1}'),
        ("step-80", '{"step": 80, "lo'),  # cut off
        ("step-85", '{"step": 85, "loss": 1.0, "perplexity": 2.7}'),  # its save was cut short
        ("step-90.superseded", '{"step": 90, "loss": 1.1, "perplexity": 3.0}'),  # of another course
        ("step-95.superseded", None),
        ("step-100", None),
        ("step-150", '{"step": 150, "loss": 2.0, "perplexity": 7.4}'),
    ):
        (checkpoints / name).mkdir(parents=True)
        if name != "step-85":
            (checkpoints / name / ".metadata").touch()
        if text:
            (checkpoints / name / "validation.json").write_text(text)
    (checkpoints / "step-70" / "validation.json").mkdir(parents=True)  # not to be read
    (checkpoints / "step-70" / ".metadata").touch()
    measured = {step: last_validation(checkpoints / f"step-{step}", step) for step in (20, 50, 100, 150)}
    assert measured[20] is None
    assert measured[50] == measured[100] == {"step": 50, "perplexity": 20.1}
    assert measured[150] == {"step": 150, "perplexity": 7.4}
    assert last_validation(checkpoints / "step-90.superseded", 90) == {"step": 90, "perplexity": 3.0}
    assert last_validation(checkpoints / "step-95.superseded", 95) is None
    moved = (checkpoints / "step-150").rename(tmp_path / "best")
    assert last_validation(moved, 150) == {"step": 150, "perplexity": 7.4}
