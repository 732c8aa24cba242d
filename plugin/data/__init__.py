"""Pretokenised text, packed to the context length, in an order that is a function of (seed, global index).

Here: readers of raw text, tokenizers, tokenising in processes, shards and corpora, samples and mixtures of them. Imports
numpy, sentencepiece and interdomain.folders only, other libraries where a file needs them; never torch or TorchTitan.
The training loader around it is in `interdomain.titan`. Public API: import from here only, but for tools.
"""

from interdomain.data.corpus import TokenCorpus, read_manifest
from interdomain.data.indexed import IndexedDataset, IndexedDatasetWriter
from interdomain.data.sampling import MixtureDataset, PackedDataset
from interdomain.data.tokenizer import StreamDecoder, Tokenizer, check_vocab, load_tokenizer

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MixtureDataset",
    "PackedDataset",
    "StreamDecoder",
    "TokenCorpus",
    "Tokenizer",
    "check_vocab",
    "load_tokenizer",
    "read_manifest",
]
