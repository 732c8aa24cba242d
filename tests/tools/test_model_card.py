"""An exported folder: who may read it, its model card, and what transformers' `generate` starts from."""

import json
import os

import pytest

from interdomain.model import cell_of, count_parameters
from interdomain.model.distributed_checkpoint import SIDECAR, VALIDATION
from interdomain.model.pretrained import read_config
from interdomain.tools import convert

from .checkpoints import small_model, write_checkpoint


def test_what_transformers_generates_with_and_the_umask(tmp_path, tokenizer):
    """The vocabulary has rows that are no tokens; a text begins where training documents began."""
    output, umask, checkpoint = tmp_path / "out", 0o027, write_checkpoint(tmp_path / "run", small_model(), tokenizer)
    before = os.umask(umask)
    try:
        assert convert.main([str(checkpoint), "--output", str(output)]) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {0o666 & ~umask}
    assert output.stat().st_mode & 0o777 == 0o777 & ~umask
    assert json.loads((output / "generation_config.json").read_text()) == {
        "bos_token_id": tokenizer.eos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.unk_id,
        "suppress_tokens": list(range(tokenizer.vocab_size, 420)),
    }


@pytest.mark.parametrize(("condition", "measured"), [("interdomain", "20.250"), ("softmax", None)])
def test_the_card_says_what_the_run_recorded(tmp_path, tokenizer, condition, measured):
    model = small_model(condition)
    checkpoint = write_checkpoint(tmp_path / "run" / "checkpoint", model, tokenizer)
    record = json.loads((checkpoint / SIDECAR).read_text())
    record |= {"size": "debug", "condition": condition}  # as it was once written, whatever n_basis is
    (checkpoint / SIDECAR).write_text(json.dumps(record))
    if measured:
        (checkpoint / VALIDATION).write_text('{"step": 100, "loss": 3.0, "perplexity": 20.25}')
    assert convert.main([str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    cell = cell_of(model.config, "debug")
    assert ("n_basis 6" in cell.condition) == (condition == "interdomain")
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: transformers\n")
    for line in (
        f"- {condition}",
        f"# Interdomain Attention, {cell}",
        f"| parameters | {count_parameters(model):,} |",
        "| tokens trained on | 204,800 |",
        "| step | 100 of 400 |",
        f"| validation perplexity | {measured or 'not recorded'} |",
        "| vocabulary | 420 (400 in use) |",
    ):
        assert line + "\n" in card
    assert f"trust_remote_code=True,prefix_token_id={tokenizer.eos_id} --tasks" in card
    validation = read_config(tmp_path / "out")[1]["facts"]["validation"]
    assert validation["perplexity"] == 20.25 if measured else validation is None
