"""Parts that the tests of this folder share: corpora, and runs that begin when a test asks for them (runs.py)."""

import random
import string
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from interdomain.tools import prepare_data

from ..common import write_rows
from ..ranks import forks
from .runs import RUNS, Runs


def refusal(capsys, act, *arguments, **named):
    """Returns what a refusal prints."""
    with pytest.raises(SystemExit) as end:
        act(*arguments, **named)
    assert end.value.code == 1
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Code in this process runs as on a machine without a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", mock.Mock(return_value=False))


@pytest.fixture
def alone(monkeypatch):
    """A process group of this process only."""
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepare(folder, *arguments):
    """Runs `interdomain prepare-data`, and returns the folder of the corpus."""
    split = ["--validation-fraction", "0.1", "--output", str(folder)]
    assert prepare_data.main([*arguments, *split]) == 0
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A real corpus: 400 kB of the standard library under a vocabulary of 512."""
    folder = tmp_path_factory.mktemp("corpus") / "tiny"
    source = ["--input", "stdlib", "--max-bytes", "400000", "--vocab-size", "512"]
    return prepare(folder, *source)


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """Documents of 24 made-up words. Every Python makes the same, and in every batch some end."""
    folder = tmp_path_factory.mktemp("short")
    draw = random.Random(1)
    words = []
    for _ in range(500):
        letters = draw.choices(string.ascii_lowercase, k=draw.randint(1, 6))
        words.append("".join(letters))
    rows = [{"text": " ".join(draw.choices(words, k=24))} for _ in range(1000)]
    path = write_rows(folder / "short.jsonl", rows)
    source = ["--input", str(path), "--vocab-size", "512"]
    return prepare(folder / "tiny", *source)


def synthetic(folder, kind, items, vocab, length=64):
    """Makes 500 examples of a recall task."""
    sizes = f"--synthetic-items {items} --synthetic-vocab {vocab} --synthetic-length {length}"
    examples = ["--synthetic", kind, "--synthetic-examples", "500"]
    return prepare(folder, *examples, *sizes.split())


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Examples of two keys and two values: half of the answers are soon right."""
    return synthetic(tmp_path_factory.mktemp("pairs") / "tiny", "mqar", 2, 6)


@pytest.fixture(scope="package")
def runs(tmp_path_factory, corpus, short, pairs):
    """All runs of runs.py, none of which has begun. Idle ranks wake often: they end with this folder's tests."""
    corpora = {"text": corpus, "short": short, "pairs": pairs}
    started = Runs(tmp_path_factory.mktemp("runs"), corpora, forks())
    for name, settings in RUNS.items():
        started.add(name, **settings)
    yield started
    started.end()
