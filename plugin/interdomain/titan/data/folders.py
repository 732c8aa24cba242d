"""The folders of tokens and the tokenizer that [data] names, opened and checked against one another."""

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
    """`data.corpus` as a list. A string may be a list too: on the command line lists have commas."""
    return corpus.split(",") if isinstance(corpus, str) else list(corpus)


def corpora_of(job: JobConfig) -> list[str]:
    """`data.corpus` as a list of folders here, checked to exist, with weights that fit."""
    data = job.data
    corpora = folders_of(data.corpus)
    for corpus in corpora or [""]:
        _check_corpus(corpus)
    weights = len(data.weights)
    if weights != len(corpora) and (weights > 1 or len(corpora) > 1):
        raise ValueError(
            f"data.corpus names {len(corpora)} corpora and data.weights {weights} weights. Give one weight for each "
            "corpus of a mixture, and none for a single corpus."
        )
    return corpora


def open_tokenizer(job: JobConfig) -> Tokenizer:
    """The run's tokenizer, checked against every corpus and the model's vocabulary."""
    data = job.data
    prepared = [corpus for corpus in corpora_of(job) if os.path.isdir(corpus)]
    if not prepared and not data.tokenizer:
        raise ValueError(
            f"data.corpus = {data.corpus!r} is shards without a manifest, and no tokenizer is set. Set data.tokenizer "
            "to the tokenizer file that made the shards (a sentencepiece .model, a tokenizer.json, ...)."
        )
    tokenizer = cast(Tokenizer, load_tokenizer(data.tokenizer or prepared[0]))
    name = (
        f"data.tokenizer = {data.tokenizer!r}"
        if data.tokenizer
        else f"the tokenizer of {prepared[0]!r}"
    )
    if os.path.isdir(data.validation_corpus):
        prepared.append(data.validation_corpus)
    for corpus in prepared:
        made_with = read_manifest(corpus)["tokenizer"]["sha256"]
        if tokenizer.sha256 != made_with:
            raise ValueError(
                f"{name} is not the tokenizer that made data.corpus = {corpus!r} "
                f"(sha256 {tokenizer.sha256[:16]}... against {made_with[:16]}...). Leave data.tokenizer empty to use the "
                "corpus's own, or prepare the corpus with this tokenizer."
            )
    try:
        check_vocab(tokenizer.vocab_size, model_config(job).vocab_size)
    except ValueError as e:
        raise ValueError(
            f"{e} The setting is model.vocab_size; 0 takes that of model.flavor = {job.model.flavor}."
        ) from e
    return tokenizer


def open_dataset(job: JobConfig, split: str) -> PackedDataset | MixtureDataset:
    """The `train` or `validation` windows of the run: [seq_len + 1] tokens each."""
    data = job.data
    seq_len = job.training.seq_len
    corpora = []
    if split == "validation":
        seq_len = job.validation.seq_len
        if data.validation_corpus:
            corpora = [data.validation_corpus]
            _check_corpus(data.validation_corpus)
    corpora = corpora or corpora_of(job)
    datasets = []
    for corpus in corpora:
        vocab_size = None  # a prepared corpus knows its own
        if not os.path.isdir(corpus):
            vocab_size = model_config(job).vocab_size
            if split == "validation" and not data.validation_corpus:
                raise ValueError(
                    f"data.corpus = {corpus!r} is shards without a manifest and has no validation split. Set "
                    "data.validation_corpus to other shards, or validation.enable to false."
                )
        tokens = TokenCorpus(corpus, split, vocab_size=vocab_size)
        datasets.append(
            PackedDataset(tokens, seq_len=seq_len, seed=job.debug.seed, shuffle=split == "train")
        )
    return datasets[0] if len(datasets) == 1 else MixtureDataset(datasets, data.weights)


def data_record(
    job: JobConfig, dataset: PackedDataset | MixtureDataset, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Facts of the training data for the run's record: a fingerprint, how documents begin and end, and name, share, tokens and
    sources of each corpus."""
    corpora = []
    for folder, share, part in zip(
        folders_of(job.data.corpus), dataset.made_of["weights"], dataset.parts, strict=True
    ):
        corpus = {"name": PurePath(folder).name, "share": share, "tokens": part.num_tokens}
        corpora.append(corpus | sources(part.corpus.source))
    documents = documents_in([part.corpus for part in dataset.parts], tokenizer)
    return {
        "data_fingerprint": dataset.fingerprint,
        "documents": None if documents is None else documents.to_dict(),
        "corpora": corpora,
    }


def text_fingerprint(dataset: PackedDataset | MixtureDataset) -> str:
    """Equal for two datasets of the same corpora with the same weights, whatever the folders, the windows and their order."""
    made_of = [dataset.made_of[name] for name in ("corpora", "weights")]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]


def _check_corpus(corpus: str) -> None:
    """Raises: ValueError, FileNotFoundError for a corpus that is not set or not there."""
    prepare = "Prepare one (interdomain prepare-data --help) and pass --data.corpus FOLDER"
    if not corpus:
        raise ValueError(
            f"data.corpus is not set. {prepare}, or set it in the TOML file. TorchTitan's data sets (training.dataset) are "
            "read under its own trainer: -m torchtitan.train."
        )
    if not os.path.exists(corpus) and not glob.glob(f"{corpus}*"):
        raise FileNotFoundError(
            f"data.corpus = {corpus!r}: there is no such folder, and no shard of that name. {prepare}."
        )
    if os.path.isdir(corpus):
        read_manifest(corpus)  # says what is wrong with a folder that is no prepared corpus
