"""Parts that the tests of this folder share: corpora, and runs that begin when a test asks for them (runs.py)."""

import json
import random
import string

import pytest
import torch
import torch.distributed as dist

from interdomain.tools import prepare_data

from ..ranks import forks
from .runs import RUNS, Runs


def refusal(capsys, act, *arguments, **named):
    with pytest.raises(SystemExit) as end:
        act(*arguments, **named)
    assert end.value.code == 1
    error = capsys.readouterr().err
    _, *problems = error.strip().splitlines()
    assert all(line.startswith("  - ") for line in problems)  # several problems in one message
    return error


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Code in this process runs as on a machine without a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def alone(monkeypatch):
    """A process group of one: what the hooks ask for their rank."""
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(folder, *source):
    sizes = ["--vocab-size", "512", "--validation-fraction", "0.1"]
    assert prepare_data.main(["--input", *source, *sizes, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A real corpus: 400 kB of the standard library under a vocabulary of 512."""
    return prepared(tmp_path_factory.mktemp("corpus") / "tiny", "stdlib", "--max-bytes", "400000")


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """Documents of 24 words, made up: every Python has the same, and in every batch some end."""
    folder, draw = tmp_path_factory.mktemp("short"), random.Random(1)
    words = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 6))) for _ in range(500)
    ]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=24))}) for _ in range(1000)]
    (folder / "short.jsonl").write_text("\n".join(lines))
    return prepared(folder / "tiny", str(folder / "short.jsonl"))


def synthetic(folder, kind, items, vocab, length=64):
    """500 examples of a recall task."""
    numbers = {"length": length, "items": items, "vocab": vocab, "examples": 500}
    options = [f"--synthetic-{name}={n}" for name, n in numbers.items()]
    given = ["--synthetic", kind, *options, "--validation-fraction", "0.1", "--output", str(folder)]
    assert prepare_data.main(given) == 0
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Two keys and two values: half of the answers are soon right."""
    return synthetic(tmp_path_factory.mktemp("pairs") / "tiny", "mqar", 2, 6)


@pytest.fixture(scope="package")
def runs(tmp_path_factory, corpus, short, pairs):
    """All runs of runs.py, none of which has begun. Idle ranks wake often: they end with this folder's tests."""
    folder = tmp_path_factory.mktemp("runs")
    started = Runs(folder, {"text": corpus, "short": short, "pairs": pairs}, forks())
    for name, given in RUNS.items():
        started.add(name, **given)
    yield started
    started.end()
