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
        _require_corpus(corpus)
    if (len(corpora) > 1 and len(data.weights) != len(corpora)) or len(corpora) == 1 < len(data.weights):
        raise ValueError(
            f"data.corpus names {len(corpora)} corpora and data.weights {len(data.weights)} weights. Give one weight for each "
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
    also = data.validation_corpus
    for corpus in prepared + [also] * os.path.isdir(also):
        made_with = read_manifest(corpus)["tokenizer"]["sha256"]
        if tokenizer.sha256 != made_with:
            named = f"data.tokenizer = {data.tokenizer!r}" if data.tokenizer else f"the tokenizer of {prepared[0]!r}"
            raise ValueError(
                f"{named} is not the tokenizer that made data.corpus = {corpus!r} "
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
    seq_len = job.validation.seq_len if split == "validation" else job.training.seq_len
    if split == "validation" and data.validation_corpus:
        corpora = [data.validation_corpus]
        _require_corpus(corpora[0])
    else:
        corpora = corpora_of(job)
        bare = [corpus for corpus in corpora if not os.path.isdir(corpus)]
        if split == "validation" and bare:
            raise ValueError(
                f"data.corpus = {bare[0]!r} is shards without a manifest and has no validation split. Set "
                "data.validation_corpus to other shards, or validation.enable to false."
            )
    datasets = []
    for corpus in corpora:
        # A prepared corpus knows its own vocabulary.
        vocab_size = None if os.path.isdir(corpus) else model_config(job).vocab_size
        tokens = TokenCorpus(corpus, split, vocab_size=vocab_size)
        datasets.append(PackedDataset(tokens, seq_len=seq_len, seed=job.debug.seed, shuffle=split == "train"))
    return datasets[0] if len(datasets) == 1 else MixtureDataset(datasets, data.weights)


def epochs_in_words(job: JobConfig, dataset: PackedDataset | MixtureDataset, samples: int) -> str:
    """How often this many samples read each corpus: `data/web for 1.20 epochs`."""
    names = folders_of(job.data.corpus)
    epochs = dataset.epochs(samples)
    return ", ".join(f"{name} for {n:.2f} epochs" for name, n in zip(names, epochs, strict=True))


def data_record(job: JobConfig, dataset: PackedDataset | MixtureDataset, tokenizer: Tokenizer) -> dict[str, Any]:
    """Facts of the training data for the run's record: a fingerprint, how documents begin and end, and name, share, tokens and
    sources of each corpus."""
    named = zip(folders_of(job.data.corpus), dataset.made_of["weights"], dataset.parts, strict=True)
    corpora = [
        {"name": PurePath(name).name, "share": share, "tokens": part.num_tokens, **sources(part.corpus.source)}
        for name, share, part in named
    ]
    documents = documents_in([part.corpus for part in dataset.parts], tokenizer)
    described = None if documents is None else documents.to_dict()
    return {"data_fingerprint": dataset.fingerprint, "documents": described, "corpora": corpora}


def text_fingerprint(dataset: PackedDataset | MixtureDataset) -> str:
    """Equal for two datasets of the same corpora with the same weights, whatever the folders, the windows and their order."""
    made_of = [dataset.made_of[name] for name in ("corpora", "weights")]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]


def _require_corpus(corpus: str) -> None:
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
