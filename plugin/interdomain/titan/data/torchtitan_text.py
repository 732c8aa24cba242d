"""TorchTitan's own text data sets and tokenizers, as the run's record describes them."""

import json
import tempfile
from pathlib import Path
from typing import Any

from interdomain.data import Documents, Tokenizer, load_tokenizer

from ..host import tokenizer_settings


def check_tokenizer_folder(setting: str, folder: str) -> None:
    """Checks that the folder of TorchTitan's tokenizer exists.

    Args:
        setting: The setting that names the folder.
        folder: Its value.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"{setting} = {folder!r}: there is no folder {Path(folder).absolute()}. Set it to a folder with "
            "tokenizer.json, or with vocab.json and merges.txt. Or train on a prepared corpus, which has a tokenizer: set "
            "data.corpus."
        )


def text_record(dataset: str, tokenizer: Any) -> dict[str, Any]:
    """Returns the facts of the training data for the run's record (`interdomain.json`).

    Args:
        dataset: TorchTitan's name of the data set.
        tokenizer: TorchTitan's tokenizer.
    """
    corpus = {"name": dataset, "share": "1", "tokens": None, "sources": [], "datasets": []}
    return {
        "data_fingerprint": "",
        "documents": loader_documents(tokenizer).to_dict(),
        "corpora": [corpus],
    }


def loader_documents(tokenizer: Any) -> Documents:
    """Finds out how documents begin and end in what TorchTitan's loader reads.

    The configuration does not say: TorchTitan adds BOS and EOS, the tokenizer's own post-processor
    may add tokens, and TorchTitan takes a tokenizer with one token for both to have no EOS.

    Args:
        tokenizer: TorchTitan's tokenizer.

    Raises:
        ValueError: The tokenizer encodes no text.
    """
    # A text whose tokens are not control tokens: an entry of the vocabulary.
    control_tokens = tokenizer.tokenizer.get_added_tokens_decoder().keys()
    for text in tokenizer.get_vocab():
        plain = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        if plain and control_tokens.isdisjoint(plain):
            break
    else:
        raise ValueError(
            f"the tokenizer in {tokenizer.tokenizer_path} encodes no text. Check model.hf_assets_path."
        )

    # The same text as torchtitan.hf_datasets encodes it: what comes before and after it was added.
    document = tokenizer.encode(text, add_bos=True, add_eos=True)
    begin = 0
    while document[begin : begin + len(plain)] != plain:
        begin += 1
    return Documents(tuple(document[:begin]), tuple(document[begin + len(plain) :]))


def as_trained(tokenizer: Any) -> Tokenizer:
    """Converts TorchTitan's tokenizer into this package's.

    It gets the control tokens that TorchTitan adds from tokenizer_config.json.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tokenizer.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(tokenizer_settings(tokenizer)))
        return load_tokenizer(folder)
