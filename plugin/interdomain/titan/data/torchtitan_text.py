"""TorchTitan's own text data: how its loader writes a document, and its tokenizer as one of ours."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from interdomain.data import Documents, Tokenizer, load_tokenizer

from ..host import tokenizer_settings


def text_record(dataset: str, tokenizer: Any) -> dict[str, Any]:
    """The part of a run's record that says what it was trained on. dataset: TorchTitan's name of the data set."""
    named = {"name": dataset, "share": "1", "tokens": None, "sources": [], "datasets": []}
    return {
        "data_fingerprint": "",
        "documents": loader_documents(tokenizer).to_dict(),
        "corpora": [named],
    }


def loader_documents(tokenizer: Any) -> Documents:
    """How documents begin and end in what TorchTitan's loader reads.

    Observed rather than read from the configuration: TorchTitan adds BOS and EOS, the file's post-processor may add tokens of
    its own, and a tokenizer with one token for both has no EOS in TorchTitan's eyes.
    """
    text, plain = _plain_text(tokenizer)
    document = tokenizer.encode(text, add_bos=True, add_eos=True)  # as torchtitan.hf_datasets does
    begin = next(i for i in range(len(document)) if document[i : i + len(plain)] == plain)
    return Documents(tuple(document[:begin]), tuple(document[begin + len(plain) :]))


def _plain_text(tokenizer: Any) -> tuple[str, list[int]]:
    """A text without control tokens, and its tokens without those that are added around a text."""
    control_tokens = tokenizer.tokenizer.get_added_tokens_decoder()
    for text in itertools.chain(["a"], tokenizer.get_vocab()):
        try:
            ids = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        except (
            Exception
        ):  # a vocabulary of words that lacks this one; the library has no narrower error
            continue
        if ids and control_tokens.keys().isdisjoint(ids):
            return text, ids
    raise ValueError(
        f"the tokenizer in {tokenizer.tokenizer_path} encodes no text. Check model.hf_assets_path."
    )


def as_trained(tokenizer: Any) -> Tokenizer:
    """TorchTitan's tokenizer as one of ours, with the control tokens that TorchTitan adds from tokenizer_config.json."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tokenizer.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(tokenizer_settings(tokenizer)))
        return load_tokenizer(folder)
