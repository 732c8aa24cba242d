"""Shards and tokenizers that several tests of the data make."""

import sentencepiece

from interdomain.data import IndexedDatasetWriter, load_tokenizer
from interdomain.data.readers import read_documents


def write_shard(prefix, documents, vocab_size=600):
    """Writes a shard and returns its record."""
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
        return writer.finalize()


def train_by_library(folder, **options):
    """Returns a small tokenizer that sentencepiece's own trainer makes with these options."""
    settings = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "vocab_size": 400,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    text = "".join(read_documents(["stdlib"], max_bytes=20_000))
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(text.splitlines()),
        model_prefix=str(folder / "tokenizer"),
        **settings | options,
    )
    return load_tokenizer(folder / "tokenizer.model")
