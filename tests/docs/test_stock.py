"""The stories of docs/torchtitan.md: a TOML file, TorchTitan's own entry, convert, generate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer

from interdomain.data.readers import read_documents
from interdomain.tools import main

from ..common import REPOSITORY, TIMEOUT, write_rows
from .pages import blocks, commands, words


def checkout(folder):
    """Writes the files of TorchTitan's repository that a run reads: texts, and a tokenizer with its control tokens' names."""
    texts = list(read_documents(["stdlib"], max_bytes=300_000))
    assets = folder / "tests/assets"
    (assets / "c4_test").mkdir(parents=True)
    write_rows(assets / "c4_test/data.json", [{"text": text} for text in texts])
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=1000)
    (assets / "tokenizer").mkdir()
    tokenizer.save(f"{assets}/tokenizer/tokenizer.json")
    names = '{"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}'
    (assets / "tokenizer/tokenizer_config.json").write_text(names)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("begins", "last_step", "prompt"),
    [("cat > run.toml", 4, "def main("), ("c4_test.toml", 10, "The ")],
)
def test_a_run_under_torchtitans_own_entry(
    begins, last_step, prompt, tmp_path, monkeypatch, capsys, environment
):
    """The commands of `interdomain` run in this process, which has imported what they need."""
    page = blocks(REPOSITORY / "docs/torchtitan.md")
    (block,) = [block for block in page if block.language == "bash" and begins in block.text]
    checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for _, text in commands(block):
        program, *arguments = words(text)
        if program == "interdomain":
            assert main.main(arguments) == 0, text
        else:
            bash = ["bash", "-eu", "-c", text]
            subprocess.run(bash, stdin=subprocess.DEVNULL, timeout=TIMEOUT, check=True)
    printed = capsys.readouterr().out
    assert f"step {last_step})" in printed
    assert prompt in printed
