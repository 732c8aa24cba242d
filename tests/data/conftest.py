"""One tokenizer for all data tests, trained on a part of the standard library."""

import pytest

from interdomain.data import SentencePieceTokenizer
from interdomain.data.documents import read_documents
from interdomain.tools.train_tokenizer import train_sentencepiece


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_sentencepiece(read_documents(["stdlib"], max_bytes=500_000), 600))
    return path


@pytest.fixture(scope="session")
def tokenizer(model_file):
    return SentencePieceTokenizer(model_file)
