"""Checkpoints and data of Megatron-Core are read without it, and it reads ours."""

import shutil

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from safetensors.torch import load_file

from interdomain.checkpoint.pretrained import MODEL_PREFIX, load_model, read_config
from interdomain.data import TokenCorpus
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


def test_megatron_reads_a_prepared_corpus(corpus):
    (path,) = corpus_files(corpus, "train")
    found = IndexedDataset(path)
    (shard,) = TokenCorpus(corpus).shards
    assert [document.tolist() for document in found] == [list(document) for document in shard]
    assert found.document_indices.tolist() == list(range(len(shard) + 1))
