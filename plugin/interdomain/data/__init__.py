"""Text as training samples: readers, tokenizers, corpora, samples and mixtures.

Text is tokenized once and packed to the context length. The order of the samples is a function of
the seed and the sample's number. Imports numpy, sentencepiece, interdomain.folders; other libraries
only where a file needs them; never TorchTitan. The training loader is in `interdomain.titan`.
"""

from interdomain.data.corpus import TokenCorpus, read_manifest
from interdomain.data.documents import Documents, documents_in, recorded_documents
from interdomain.data.indexed import IndexedDataset, IndexedDatasetWriter
from interdomain.data.sampling import MixtureDataset, PackedDataset
from interdomain.data.tokenizer import StreamDecoder, Tokenizer, check_vocab, load_tokenizer

__all__ = [
    "Documents",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MixtureDataset",
    "PackedDataset",
    "StreamDecoder",
    "TokenCorpus",
    "Tokenizer",
    "check_vocab",
    "documents_in",
    "load_tokenizer",
    "read_manifest",
    "recorded_documents",
]
