"""Checkpoints that Megatron-Core wrote, and data, read without it; and the other way round."""

import shutil
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from safetensors.torch import load_file

from interdomain.checkpoint.pretrained import BASE, load_model, read_config
from interdomain.data import IndexedDataset, TokenCorpus, read_manifest
from interdomain.megatron.arguments import corpus_files
from interdomain.megatron.checkpoint import MegatronCheckpoint
from interdomain.tools import convert

from . import ranks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
]


def run(*argv, expect=0):
    assert convert.main([str(a) for a in argv]) == expect


@pytest.mark.parametrize("leg", ["tensor and sequence", "one", "bf16", "transformer engine"])
def test_a_run_becomes_a_folder(leg, computed, tmp_path):
    """The checkpoint of step 5, whose model gives the loss that the run had next; Megatron's pickled objects are never read."""
    folder, seen = computed
    shutil.copytree(folder / leg, tmp_path / "run")
    (tmp_path / "run" / "iter_0000005" / "common.pt").write_bytes(b"no pickle")
    run(tmp_path / "run", "--tokenizer", folder / "corpus", "--output", tmp_path / "out")
    config, record = read_config(tmp_path / "out")
    assert config == ranks.config_of()
    assert (record["facts"]["step"], record["facts"]["condition"]) == (5, "interdomain, n_basis 6")
    tokens = ranks.tokens_of(5)
    loss = load_model(tmp_path / "out")(tokens[:, :-1], labels=tokens[:, 1:]).item() / (
        ranks.BATCH * ranks.T
    )
    assert loss == pytest.approx(seen[-1]["losses"][leg][5][0], rel=3e-3 if leg == "bf16" else 1e-5)


@pytest.mark.parametrize("case", ["gate, kv2, soft", "hybrid", "mamba2"])
def test_a_folder_goes_to_megatron_and_comes_back(case, computed, tmp_path, capsys):
    """To the bit; what Megatron makes of such a checkpoint is in test_training: every leg starts from one."""
    start, corpus = computed[0] / "start" / case, computed[0] / "corpus"
    run(start, "--tokenizer", corpus, "--output", tmp_path / "folder")
    run(tmp_path / "folder", "--to-megatron", "--output", tmp_path / "start")
    assert f"start with Megatron's --load {tmp_path / 'start'}" in capsys.readouterr().out
    wanted = ranks.plain_model(case).state_dict()
    for checkpoint in (
        MegatronCheckpoint(start / "release"),
        MegatronCheckpoint(tmp_path / "start" / "release"),
    ):
        assert checkpoint.config == ranks.config_of(case)
        for name, tensor in checkpoint.read([*wanted]).items():
            assert torch.equal(tensor, wanted[name])
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    assert {name.removeprefix(BASE) for name in stored} == {*wanted}
    for name, tensor in stored.items():
        assert torch.equal(tensor, wanted[name.removeprefix(BASE)])


def test_a_damaged_checkpoint_is_refused(computed, tmp_path, capsys):
    damaged = tmp_path / "iter_0000005"
    shutil.copytree(computed[0] / "one" / "iter_0000005", damaged)
    norm = MegatronCheckpoint(damaged).read(["norm.weight"])["norm.weight"].numpy().tobytes()
    shard = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes().replace(norm, norm[::-1]))
    run(damaged, "--tokenizer", computed[0] / "corpus", "--output", tmp_path / "out", expect=2)
    assert "is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Data


def test_gpt_dataset_reads_a_prepared_corpus(corpus, tmp_path):
    """Unmodified, through megatron-core's own builder: pieces of our stream."""
    manifest, (shard,) = read_manifest(corpus), TokenCorpus(corpus).shards
    config = GPTDatasetConfig(
        random_seed=42,
        sequence_length=256,
        blend_per_split=[(corpus_files(corpus, "train"), None), None, None],
        path_to_cache=str(tmp_path),
        tokenizer=SimpleNamespace(
            eod=manifest["eos_id"],
            pad=None,
            vocab_size=manifest["vocab_size"],
            unique_identifiers={},
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    data, _, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [10, 0, 0], lambda *_: True, config
    ).build()
    found = set()
    for i in range(10):
        tokens = [*data[i]["tokens"].tolist(), data[i]["labels"][-1].item()]
        assert tokens[1:] == data[i]["labels"].tolist()
        ends = [at for at, token in enumerate(tokens) if token == manifest["eos_id"]]
        found |= {tuple(tokens[a + 1 : b + 1]) for a, b in pairwise(ends)}  # whole documents
    assert len(found) > 3
    assert found <= {tuple(document.tolist()) for document in islice(shard, len(shard))}


def test_our_reader_reads_megatron_s_data(tmp_path):
    documents = [np.arange(n, dtype=np.uint16) * 7 for n in (5, 1, 40, 7)]
    builder = IndexedDatasetBuilder(str(tmp_path / "tokens.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_item(torch.from_numpy(document.astype(np.int64)))
        builder.end_document()
    builder.finalize(str(tmp_path / "tokens.idx"))
    ours = IndexedDataset(tmp_path / "tokens")
    ours.verify()
    assert [x.tolist() for x in islice(ours, len(ours))] == [x.tolist() for x in documents]
    assert np.array_equal(TokenCorpus(tmp_path / "tokens").read(0, 53), np.concatenate(documents))
