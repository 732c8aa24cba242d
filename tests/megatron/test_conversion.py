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

from interdomain.data import IndexedDataset, TokenCorpus, read_manifest
from interdomain.files.megatron_checkpoint import MegatronCheckpoint
from interdomain.files.pretrained import BASE, load_model, read_config
from interdomain.megatron.arguments import corpus_files
from interdomain.tools import convert

from . import ranks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow_group(
        "plugin/interdomain/megatron/",
        "plugin/interdomain/model/",
        "plugin/interdomain/data/",
        "tools/convert",
        "tests/megatron/",
    ),
]


def run(*argv, expect=0):
    assert convert.main([str(a) for a in argv]) == expect


def loss_of(model):
    tokens = ranks.tokens_of(5)
    return (model(tokens[:, :-1], labels=tokens[:, 1:]) / (ranks.BATCH * ranks.T)).item()


@pytest.mark.parametrize("leg", ["tensor and sequence", "one", "bf16", "transformer engine"])
def test_a_run_becomes_a_folder(leg, computed, tmp_path, capsys):
    """The checkpoint of step 5, whose model gives the loss that the run had next; Megatron's pickled objects are never read."""
    folder, seen = computed
    shutil.copytree(folder / leg, tmp_path / "run")
    (tmp_path / "run" / "iter_0000005" / "common.pt").write_bytes(b"no pickle")
    run(tmp_path / "run", "--tokenizer", folder / "corpus", "--output", tmp_path / "out")
    wrote = capsys.readouterr().out
    assert "step 5, logits equal" in wrote
    assert "by the plain model, whose settings are those that Megatron recorded" in wrote
    config, record = read_config(tmp_path / "out")
    assert config == ranks.config_of()
    facts = record["facts"]
    assert (facts["step"], facts["tokens"], facts["condition"]) == (5, None, "interdomain, n_basis 6")
    wanted = seen[-1]["losses"][leg][5][0]
    assert loss_of(load_model(tmp_path / "out")) == pytest.approx(wanted, rel=3e-3 if leg == "bf16" else 1e-5)


@pytest.mark.parametrize("case", ["gate, kv2, soft", "hybrid", "mamba2"])
def test_a_folder_goes_to_megatron_and_comes_back(case, computed, tmp_path, capsys):
    """To the bit; what Megatron makes of such a checkpoint is in test_training: every leg starts from one."""
    start, corpus = computed[0] / "start" / case, computed[0] / "corpus"
    run(start, "--tokenizer", corpus, "--output", tmp_path / "folder")
    run(tmp_path / "folder", "--to-megatron", "--output", tmp_path / "start")
    assert f"start with Megatron's --load {tmp_path / 'start'}" in capsys.readouterr().out
    run(tmp_path / "start" / "release", "--tokenizer", corpus, "--output", tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("folder", "again"))
    assert read_config(tmp_path / "again")[0] == ranks.config_of(case)
    wanted = ranks.plain_model(case).state_dict()
    assert {name.removeprefix(BASE) for name in first} == {*wanted}
    for name in first:
        assert torch.equal(first[name], wanted[name.removeprefix(BASE)])
        assert torch.equal(first[name], second[name])


def test_what_is_refused(computed, tmp_path, capsys):
    folder, out = computed[0], tmp_path / "out"

    def refused(words, *argv):
        run(*argv, "--output", out, expect=2)
        assert words in capsys.readouterr().err
        assert not out.exists()

    refused("without a tokenizer. Give the corpus's with --tokenizer", folder / "one")
    damaged = tmp_path / "iter_0000005"
    shutil.copytree(folder / "one" / "iter_0000005", damaged)
    shard = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    at = data.index(next(iter(MegatronCheckpoint(damaged).read(["norm.weight"]).values())).numpy().tobytes())
    data[at] ^= 1
    shard.write_bytes(data)
    refused("is damaged", damaged, "--tokenizer", folder / "corpus")


# Data


def test_gpt_dataset_reads_a_prepared_corpus(corpus, tmp_path):
    """Unmodified, through megatron-core's own builder: pieces of our stream."""
    manifest, (shard,) = read_manifest(corpus), TokenCorpus(corpus).shards
    names = {"eod": manifest["eos_id"], "pad": None, "vocab_size": manifest["vocab_size"], "unique_identifiers": {}}
    off = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    config = GPTDatasetConfig(
        random_seed=42,
        sequence_length=256,
        blend_per_split=[(corpus_files(corpus, "train"), None), None, None],
        path_to_cache=str(tmp_path),
        tokenizer=SimpleNamespace(**names),
        **dict.fromkeys(off, False),
    )
    data, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], lambda *_: True, config).build()
    documents = {tuple(shard[i].tolist()) for i in range(len(shard))}
    found = set()
    for sample in (data[i] for i in range(10)):
        tokens = [*sample["tokens"].tolist(), sample["labels"][-1].item()]
        assert tokens[1:] == sample["labels"].tolist()
        ends = [i for i, token in enumerate(tokens) if token == manifest["eos_id"]]
        found |= {tuple(tokens[a + 1 : b + 1]) for a, b in pairwise(ends)}  # whole documents
    assert len(found) > 3
    assert found <= documents


def test_our_reader_reads_megatron_s_data(tmp_path):
    generator = np.random.default_rng(0)
    documents = [generator.integers(300, size=n).astype(np.uint16) for n in (5, 1, 40, 7)]
    builder = IndexedDatasetBuilder(str(tmp_path / "tokens.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_item(torch.from_numpy(document.astype(np.int64)))
        builder.end_document()
    builder.finalize(str(tmp_path / "tokens.idx"))
    ours = IndexedDataset(tmp_path / "tokens")
    ours.verify()
    assert [x.tolist() for x in islice(ours, len(ours))] == [x.tolist() for x in documents]
    assert np.array_equal(TokenCorpus([tmp_path / "tokens"]).read(0, 53), np.concatenate(documents))
