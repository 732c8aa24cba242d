"""One start of four ranks for all tests of this folder, and a small prepared corpus."""

import pytest
import torch

from interdomain.tools import prepare_data

from . import ranks


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"Document {i}. " + "abc def ghi jkl " * (i + 1))
    options = ["--vocab-size", "300", "--validation-fraction", "0.2"]
    assert prepare_data.main(["--input", str(texts), "--output", str(folder / "corpus"), *options]) == 0
    return folder / "corpus"


@pytest.fixture(scope="session")
def computed(tmp_path_factory, corpus):
    """(the folder, what each rank has seen)."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.compute(folder, corpus)
    return folder, [torch.load(folder / f"seen {rank}.pt", weights_only=False) for rank in range(ranks.RANKS)]
