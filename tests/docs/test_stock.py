"""The stories of docs/torchtitan.md: a TOML file, TorchTitan's own entry, convert, generate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from interdomain.data.readers import read_documents

from ..common import REPOSITORY, TIMEOUT
from .pages import blocks

STORIES = {
    "a corpus": ("cat > run.toml", 4, "def main("),
    "TorchTitan's data": ("c4_test.toml", 10, "The "),
}


def checkout(folder):
    """Writes the files of TorchTitan's repository that a run reads: texts, and a tokenizer with its control tokens' names."""
    texts = list(read_documents(["stdlib"], max_bytes=300_000))
    (folder / "tests/assets/c4_test").mkdir(parents=True)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "tests/assets/c4_test/data.json").write_text("\n".join(lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet)
    )
    (folder / "tests/assets/tokenizer").mkdir()
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(names))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_a_run_under_torchtitans_own_entry(tmp_path, story):
    begins, last, prompt = STORIES[story]
    page = REPOSITORY / "docs" / "torchtitan.md"
    (block,) = [
        block for block in blocks(page) if block.language == "bash" and begins in block.text
    ]
    if story == "TorchTitan's data":
        checkout(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"step {last})" in done.stdout
    assert prompt in done.stdout
