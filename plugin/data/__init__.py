"""Pretokenised text, packed to the context length, in an order that is a function of (seed, global index).

numpy and sentencepiece only, but where a file needs another library; the training loader around it is in `interdomain.titan`.
"""

from interdomain.data.corpus import TokenCorpus, read_manifest
from interdomain.data.indexed import IndexedDataset, IndexedDatasetWriter, ShardInfo
from interdomain.data.mixture import MixtureDataset
from interdomain.data.sampling import FeistelPermutation, PackedDataset
from interdomain.data.tokenizer import (
    SentencePieceTokenizer,
    StreamDecoder,
    Tokenizer,
    check_vocab,
    load_tokenizer,
)

__all__ = [
    "FeistelPermutation",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MixtureDataset",
    "PackedDataset",
    "SentencePieceTokenizer",
    "ShardInfo",
    "StreamDecoder",
    "TokenCorpus",
    "Tokenizer",
    "check_vocab",
    "load_tokenizer",
    "read_manifest",
]
