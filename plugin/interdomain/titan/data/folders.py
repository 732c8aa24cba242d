"""Opens the corpora and the tokenizer that the section [data] names.

A corpus is the folder of a prepared corpus, or a prefix of bare .bin/.idx shards (no manifest).
"""

import glob
import hashlib
import json
import os
from pathlib import PurePath
from typing import Any, cast

from interdomain.data import (
    MixtureDataset,
    PackedDataset,
    TokenCorpus,
    Tokenizer,
    check_vocab,
    documents_in,
    load_tokenizer,
    read_manifest,
)
from interdomain.data.corpus import sources

from ..plan.run_plan import model_config
from ..settings.schema import JobConfig


def folders_of(corpus: str | list[str]) -> list[str]:
    """Returns the setting data.corpus as a list. On the command line, commas separate its entries.

    Args:
        corpus: The setting, a list or the text of a command line.
    """
    if isinstance(corpus, str):
        return corpus.split(",")
    return list(corpus)


def corpora_of(job: JobConfig, split: str = "train") -> list[str]:
    """Returns the corpora of a split.

    Args:
        job: The configuration of the run.
        split: "train" or "validation".

    Raises:
        ValueError: data.corpus is not set, or a manifest is damaged.
        FileNotFoundError: There is no such corpus.
    """
    corpora = folders_of(job.data.corpus)
    if split == "validation" and job.data.validation_corpus:
        corpora = [job.data.validation_corpus]
    prepare = "Prepare one (interdomain prepare-data --help) and pass --data.corpus FOLDER"
    # Check that they exist, with advice that the readers of a corpus cannot give.
    if not corpora or "" in corpora:
        raise ValueError(
            f"data.corpus is not set. {prepare}, or set it in the TOML file. TorchTitan's data sets (training.dataset) are "
            "read under its own trainer: -m torchtitan.train."
        )
    for corpus in corpora:
        if os.path.isdir(corpus):
            # Raises an error unless this is a prepared corpus.
            read_manifest(corpus)
        elif not glob.glob(f"{corpus}*"):
            raise FileNotFoundError(
                f"data.corpus = {corpus!r}: there is no such folder, and no shard of that name. {prepare}."
            )
    return corpora


def open_tokenizer(job: JobConfig) -> Tokenizer:
    """Opens the tokenizer of the run.

    Args:
        job: The configuration of the run.

    Raises:
        ValueError: Bare shards, and data.tokenizer is not set; or another tokenizer made a corpus;
            or the model's vocabulary is smaller than the tokenizer's.
    """
    data = job.data
    prepared = [corpus for corpus in corpora_of(job) if os.path.isdir(corpus)]
    path = data.tokenizer
    # A prepared corpus has a copy of its tokenizer.
    if not path:
        if not prepared:
            raise ValueError(
                f"data.corpus = {data.corpus!r} is shards without a manifest, and no tokenizer is set. Set data.tokenizer "
                "to the tokenizer file that made the shards (a sentencepiece .model, a tokenizer.json, ...)."
            )
        path = prepared[0]
    tokenizer = cast(Tokenizer, load_tokenizer(path))

    # All corpora must have been made with this tokenizer. Bare shards do not say.
    if os.path.isdir(data.validation_corpus):
        prepared.append(data.validation_corpus)
    for corpus in prepared:
        made_with = read_manifest(corpus)["tokenizer"]["sha256"]
        if tokenizer.sha256 != made_with:
            raise ValueError(
                f"the tokenizer of {path!r} is not the tokenizer that made data.corpus = {corpus!r}. Leave data.tokenizer "
                "empty to use the corpus's own, or prepare the corpus with this tokenizer."
            )
    check_vocab(tokenizer.vocab_size, model_config(job).vocab_size)
    return tokenizer


def open_dataset(job: JobConfig, split: str) -> PackedDataset | MixtureDataset:
    """Opens the windows of a split, seq_len + 1 tokens each.

    Args:
        job: The configuration of the run.
        split: "train", in a random order, or "validation", in the order of the text.

    Raises:
        ValueError: The corpora have no such split or do not fit together, or data.weights does not
            have one weight for each of several corpora.
        FileNotFoundError: There is no such corpus.
    """
    data = job.data
    is_training = split == "train"
    seq_len = job.training.seq_len if is_training else job.validation.seq_len
    datasets = []
    for corpus in corpora_of(job, split):
        # Bare shards do not say how large their vocabulary is, and have no splits.
        vocab_size = None
        if not os.path.isdir(corpus):
            vocab_size = model_config(job).vocab_size
            if not is_training and not data.validation_corpus:
                raise ValueError(
                    f"data.corpus = {corpus!r} is shards without a manifest and has no validation split. Set "
                    "data.validation_corpus to other shards, or validation.enable to false."
                )
        tokens = TokenCorpus(corpus, split, vocab_size=vocab_size)
        datasets.append(
            PackedDataset(tokens, seq_len=seq_len, seed=job.debug.seed, shuffle=is_training)
        )
    if len(datasets) == 1 and len(data.weights) <= 1:
        return datasets[0]
    return MixtureDataset(datasets, data.weights)


def data_record(
    job: JobConfig, dataset: PackedDataset | MixtureDataset, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the facts of the training data for the run's record (`interdomain.json`).

    Args:
        job: The configuration of the run.
        dataset: The training data.
        tokenizer: The tokenizer of the run.

    Returns:
        A fingerprint, how documents begin and end (None if they do so in several ways), and the
        corpora with names, shares, tokens and sources.
    """
    folders = folders_of(job.data.corpus)
    shares = dataset.made_of["weights"]
    corpora = []
    for folder, share, part in zip(folders, shares, dataset.parts, strict=True):
        corpus = {"name": PurePath(folder).name, "share": share, "tokens": part.num_tokens}
        corpora.append(corpus | sources(part.corpus.source))
    record = {"data_fingerprint": dataset.fingerprint, "documents": None, "corpora": corpora}
    documents = documents_in([part.corpus for part in dataset.parts], tokenizer)
    if documents is not None:
        record["documents"] = documents.to_dict()
    return record


def text_fingerprint(dataset: PackedDataset | MixtureDataset) -> str:
    """Returns a hash of the texts of a data set and their weights.

    It does not depend on the names of folders, the length of windows and their order.

    Args:
        dataset: The training data, or the validation data.
    """
    made_of = [dataset.made_of["corpora"], dataset.made_of["weights"]]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
