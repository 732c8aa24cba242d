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

from ..plan.run_plan import RunPlan, model_config
from ..settings.job_config import data_stages, in_data_stage
from ..settings.schema import JobConfig


def folders_of(corpus: str | list[str]) -> list[str]:
    """`data.corpus` as a list. A string may be a list too: on the command line lists have commas."""
    return corpus.split(",") if isinstance(corpus, str) else list(corpus)


def corpora_of(job_config: JobConfig) -> list[str]:
    """`data.corpus` as a list of folders here, checked to exist, with weights that fit."""
    data = job_config.data
    corpora = folders_of(data.corpus)
    for corpus in corpora or [""]:
        _require_corpus(corpus)
    if (len(corpora) > 1 and len(data.weights) != len(corpora)) or len(corpora) == 1 < len(data.weights):
        raise ValueError(
            f"data.corpus names {len(corpora)} corpora and data.weights {len(data.weights)} weights. Give one weight for each "
            "corpus of a mixture, and none for a single corpus."
        )
    return corpora


def open_tokenizer(job_config: JobConfig) -> Tokenizer:
    """The run's tokenizer, checked against every corpus of every data stage and the model's vocabulary."""
    data, corpora = job_config.data, {}
    for number, job in enumerate(data_stages(job_config)):
        with in_data_stage(number):
            corpora |= {corpus: corpora.get(corpus, number) for corpus in corpora_of(job)}
    prepared = [corpus for corpus in corpora if os.path.isdir(corpus)]
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
            with in_data_stage(corpora.get(corpus, 0)):
                raise ValueError(
                    f"{named} is not the tokenizer that made data.corpus = {corpus!r} "
                    f"(sha256 {tokenizer.sha256[:16]}... against {made_with[:16]}...). Leave data.tokenizer empty to use the "
                    "corpus's own, or prepare the corpus with this tokenizer."
                )
    try:
        check_vocab(tokenizer.vocab_size, model_config(job_config).vocab_size)
    except ValueError as e:
        raise ValueError(
            f"{e} The setting is model.vocab_size; 0 takes that of model.flavor = {job_config.model.flavor}."
        ) from e
    return tokenizer


def open_dataset(job_config: JobConfig, split: str) -> PackedDataset | MixtureDataset:
    """The `train` or `validation` windows of the run: [seq_len + 1] tokens each."""
    data = job_config.data
    seq_len = job_config.validation.seq_len if split == "validation" else job_config.training.seq_len
    if split == "validation" and data.validation_corpus:
        corpora = [data.validation_corpus]
        _require_corpus(corpora[0])
    else:
        corpora = corpora_of(job_config)
        bare = [corpus for corpus in corpora if not os.path.isdir(corpus)]
        if split == "validation" and bare:
            raise ValueError(
                f"data.corpus = {bare[0]!r} is shards without a manifest and has no validation split. Set "
                "data.validation_corpus to other shards, or validation.enable to false."
            )
    datasets = []
    for corpus in corpora:
        # A prepared corpus knows its own vocabulary.
        vocab_size = None if os.path.isdir(corpus) else model_config(job_config).vocab_size
        tokens = TokenCorpus(corpus, split, vocab_size=vocab_size)
        datasets.append(PackedDataset(tokens, seq_len=seq_len, seed=job_config.debug.seed, shuffle=split == "train"))
    return datasets[0] if len(datasets) == 1 else MixtureDataset(datasets, data.weights)


def open_training(plan: RunPlan) -> list[PackedDataset | MixtureDataset]:
    """The training windows of each data stage. A corpus goes on where the stages before it, with windows of the same length,
    have left it."""
    datasets, read = [], {}
    for number, (stage, steps) in enumerate(zip(plan.data_stages, plan.steps_by_data_stage(plan.steps), strict=True)):
        with in_data_stage(number):
            datasets.append(dataset := open_dataset(stage.costs.job, "train"))
        for part in dataset.parts:
            part.first = read.get(part.fingerprint, 0)
        for part, count in zip(dataset.parts, dataset.counts(steps * stage.global_batch), strict=True):
            read[part.fingerprint] = max(read.get(part.fingerprint, 0), part.first + count)
    return datasets


def epochs_in_words(plan: RunPlan, datasets: list[PackedDataset | MixtureDataset]) -> list[str]:
    """How often each data stage reads its corpora: `data/web for 1.20 epochs`."""
    said = []
    for stage, steps, dataset in zip(plan.data_stages, plan.steps_by_data_stage(plan.steps), datasets, strict=True):
        ends = zip(dataset.epochs(0), dataset.epochs(steps * stage.global_batch), strict=True)
        epochs = [f"{end - begin:.2f} epochs" + f" (from {begin:.2f} on)" * (begin > 0) for begin, end in ends]
        named = zip(folders_of(stage.costs.job.data.corpus), epochs, strict=True)
        said.append(", ".join(f"{name} for {words}" for name, words in named))
    return said


def data_record(job_config: JobConfig, dataset: PackedDataset | MixtureDataset, tokenizer: Tokenizer) -> dict[str, Any]:
    """Facts of a data stage for the run's record: a fingerprint, how documents begin and end, and of each corpus name, share,
    tokens and sources."""
    named = zip(folders_of(job_config.data.corpus), dataset.made_of["weights"], dataset.parts, strict=True)
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
