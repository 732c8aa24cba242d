"""Checkpoints and data of Megatron-Core are read without it, and it reads ours."""

import itertools
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from safetensors.torch import load_file

from interdomain.checkpoint.pretrained import MODEL_PREFIX, load_model, read_config
from interdomain.data import IndexedDataset, TokenCorpus, read_manifest
from interdomain.megatron.arguments import corpus_files
from interdomain.megatron.checkpoint import MegatronCheckpoint
from interdomain.tools import convert

from ..model.common import assert_same_tensors
from . import ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(
    ("leg", "tolerance"),
    [("tensor and sequence", 1e-5), ("one", 1e-5), ("bf16", 3e-3), ("transformer engine", 1e-5)],
)
def test_a_run_becomes_an_exported_model(leg, tolerance, computed, tmp_path):
    """The model of step 5 has the loss of the run's next step. Megatron's pickles are not read."""
    folder, seen = computed
    run = tmp_path / "run"
    model = tmp_path / "model"
    shutil.copytree(folder / leg, run)
    (run / "iter_0000005" / "common.pt").write_bytes(b"no pickle")
    assert convert.main(f"{run} --tokenizer {folder}/corpus --output {model}".split()) == 0
    config, record = read_config(model)
    assert config == ranks.config_of()
    assert record["facts"]["step"] == 5
    assert record["facts"]["condition"] == "interdomain, n_basis 6"
    tokens = ranks.tokens_of(5)
    loss = load_model(model)(tokens[:, :-1], labels=tokens[:, 1:]).item()
    wanted, _ = seen[-1]["losses"][leg][5]
    assert loss / (ranks.BATCH * ranks.T) == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize(
    ("case", "form", "words"),
    [
        ("gate, kv2, soft", "", "start with Megatron's --load "),
        ("hybrid", "", "start with Megatron's --load "),
        ("mamba2", "", "start with Megatron's --load "),
        ("layers", "hybrid", '--hybrid-layer-pattern "G-*-G-M-"'),
    ],
)
def test_an_exported_model_goes_to_megatron_and_comes_back(
    case, form, words, corpus, tmp_path, capsys
):
    """The values are bitwise the same. test_training.py starts every leg from such a checkpoint."""
    ranks.write_start(tmp_path / "start", case, hybrid=form == "hybrid")
    line = f"{tmp_path}/start --tokenizer {corpus} --output {tmp_path}/model"
    assert convert.main(line.split()) == 0
    line = f"{tmp_path}/model --to-megatron {form} --output {tmp_path}/again"
    assert convert.main(line.split()) == 0
    assert words in capsys.readouterr().out
    checkpoint = MegatronCheckpoint(tmp_path / "again" / "release")
    assert checkpoint.config.mixers == ranks.config_of(case).mixers
    wanted = ranks.plain_model(case).state_dict()
    assert_same_tensors(checkpoint.read(list(wanted)), wanted)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert_same_tensors({name.removeprefix(MODEL_PREFIX): x for name, x in stored.items()}, wanted)


def test_a_damaged_checkpoint_is_refused(computed, tmp_path, capsys):
    folder, _ = computed
    damaged = tmp_path / "iter_0000005"
    shutil.copytree(folder / "one" / "iter_0000005", damaged)
    norm = MegatronCheckpoint(damaged).read(["norm.weight"])["norm.weight"].numpy().tobytes()
    for shard in damaged.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes().replace(norm, norm[::-1]))
    line = f"{damaged} --tokenizer {folder}/corpus --output {tmp_path}/model"
    assert convert.main(line.split()) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


# Data


def always(*arguments):
    return True


def test_gpt_dataset_reads_a_prepared_corpus(corpus, tmp_path):
    """megatron-core's own builder gives pieces of our stream."""
    manifest = read_manifest(corpus)
    eos = manifest["eos_id"]
    vocab_size = manifest["vocab_size"]
    tokenizer = SimpleNamespace(eod=eos, pad=None, vocab_size=vocab_size, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=42,
        sequence_length=256,
        blend_per_split=[(corpus_files(corpus, "train"), None), None, None],
        path_to_cache=str(tmp_path),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], always, config)
    dataset, _, _ = builder.build()
    whole_documents = set()
    for i in range(10):
        sample = dataset[i]
        labels = sample["labels"].tolist()
        assert sample["tokens"].tolist()[1:] == labels[:-1]
        ends = [j + 1 for j, token in enumerate(labels) if token == eos]
        for begin, end in itertools.pairwise(ends):
            whole_documents.add(tuple(labels[begin:end]))
    (shard,) = TokenCorpus(corpus).shards
    assert len(whole_documents) > 3
    assert whole_documents <= {tuple(document) for document in shard}


def test_our_reader_reads_megatron_s_data(tmp_path):
    documents = [np.arange(n, dtype=np.uint16) * 7 for n in (5, 1, 40, 7)]
    path = tmp_path / "tokens"
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_item(torch.from_numpy(document.astype(np.int64)))
        builder.end_document()
    builder.finalize(f"{path}.idx")
    dataset = IndexedDataset(path)
    dataset.verify()
    for found, wanted in zip(dataset, documents, strict=True):
        assert found.tolist() == wanted.tolist()
    assert TokenCorpus(path).read(0, 53).tolist() == np.concatenate(documents).tolist()
