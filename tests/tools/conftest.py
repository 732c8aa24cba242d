import pytest

from interdomain.data import load_tokenizer

from ..common import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"))
