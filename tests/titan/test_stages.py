"""Data stages: a run of three, resumed in the middle of each; its plan, and what is refused."""

import hashlib
import json
import re

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from interdomain.data import MixtureDataset, PackedDataset, TokenCorpus
from interdomain.files.checkpoint_index import as_arrays
from interdomain.model import build_config
from interdomain.titan.data.dataloader import PackedLoader, StageData, open_data
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.resume.resume_from import ResumePoint, require_same_run
from interdomain.titan.settings.job_config import read_job_config

from .conftest import refusal
from .runs import SAVED, TINY, VALIDATED, assert_same_run, flags, parallel, steps
from .test_data import take

# Of tiny.toml's steps of 8 x 64 tokens: after 2 steps another mixture; after 4 longer sequences and another batch.
TABLES = """
[[data.stages]]
at_tokens = 1_000
corpus = ["{corpus}", "{corpus}/validation-00000"]
weights = [3, 1]

[[data.stages]]
at_tokens = 2_048
seq_len = 192
global_batch_size = 4
local_batch_size = 1
"""
ADDED = """
[[data.stages]]
at_tokens = 3_584
corpus = "{corpus}"
weights = []
"""
TOKENS = [512, 1024, 1536, 2048, 2816, 3584]  # trained after each step
SAVES = SAVED | {"checkpoint__interval": 5} | steps(6)
AXES = parallel(context=2, pipeline=2)


def toml_of(folder, corpus, tables=TABLES):
    path = folder / f"stages-{len(tables)}.toml"
    path.write_text(TINY.read_text() + tables.format(corpus=corpus))
    return path


@pytest.fixture(scope="module")
def staged(runs, corpus):
    tables = {"toml": toml_of(runs.folder, corpus)}
    runs.add("2 stages", **tables | SAVES | {"checkpoint__interval": 1})
    runs.add("2 stages again", **tables | SAVES, of=("2 stages", 1))
    runs.add("4 stages", **tables | SAVES, of=("2 stages", 3))
    added = {"toml": toml_of(runs.folder, corpus, TABLES + ADDED)}
    runs.add("1 stages added", **added | SAVES | steps(7), of=("4 stages", 5))
    runs.add("4 stages axes", **tables | AXES | VALIDATED | steps(6))
    return runs


def datasets_of(corpus):
    """The windows of the three stages: of the run's corpus; of it and another one; longer ones."""
    train, other = TokenCorpus(corpus), TokenCorpus(f"{corpus}/validation-00000", vocab_size=512)
    mixed = MixtureDataset([PackedDataset(train, 64, 42), PackedDataset(other, 64, 42)], [3, 1])
    mixed.datasets[0].first = 16  # as many as the first stage reads
    longer = [PackedDataset(train, 192, 42), PackedDataset(other, 192, 42)]
    return PackedDataset(train, 64, 42), mixed, MixtureDataset(longer, [3, 1])


def test_the_samples_of_each_stage(staged, corpus):
    first, mixed, longer = datasets_of(corpus)
    batches = [(first, 8 * i, 8) for i in range(2)] + [(mixed, 8 * i, 8) for i in range(2)]
    batches += [(longer, 4 * i, 4) for i in range(2)]
    expected = [sorted(map(digest, data.read_batch(range(i, i + n)))) for data, i, n in batches]
    assert staged.samples("2 stages") == expected
    assert len({sample for step in expected[:4] for sample in step}) == 32  # of one length: none twice


def digest(window):
    return hashlib.sha256(window.tobytes()).hexdigest()


def test_a_run_continues_in_the_middle_of_each_stage(staged):
    """On the same ranks to the bit; on others, and where ranks share sequences and layers, with the same samples and losses."""
    whole, again = (staged.seen(name)["log"] for name in ("2 stages", "2 stages again"))
    assert list(again) == list(range(2, 7))
    for step, scalars in again.items():
        for quantity in ("loss", "grad_norm", "lr", "n_tokens_seen"):
            assert scalars[quantity] == whole[step][quantity]
    assert staged.samples("2 stages again") == staged.samples("2 stages")[1:]
    for name, begins in (("4 stages", 4), ("4 stages axes", 1)):
        assert min(staged.seen(name)["log"]) == begins
        assert_same_run(staged, name, "2 stages")


def test_a_stage_added_to_a_run(staged, corpus):
    """It begins where the run was to end. Its corpus goes on where the last stage, with windows of the same length, left it."""
    said = staged.said("1 stages added")
    assert said.count("data.stages: ") == 1  # the warning of changed settings
    before, added = staged.samples("1 stages added")
    assert before == staged.samples("2 stages")[5]
    longer = PackedDataset(TokenCorpus(corpus), 192, 42)
    longer.first = 6  # of 8 in a mixture of 3 to 1
    assert added == sorted(map(digest, longer.read_batch(range(4))))


def test_what_a_run_says_of_its_stages(staged):
    log = staged.seen("2 stages")["log"]
    assert [scalars["n_tokens_seen"] for scalars in log.values()] == TOKENS
    assert [scalars["data_stage"] for scalars in log.values()] == [1, 1, 2, 2, 3, 3]
    assert all(5 < scalars["loss"] < 6.5 for scalars in log.values())  # of a label: log 512 = 6.2 at the start
    said = staged.said("2 stages")
    assert "data from step 3: " in said
    assert "2,816 of 3,584 tokens, data stage 3 of 3" in said
    for step, facts in ((3, (64, 8, 512)), (5, (192, 4, 768))):
        record = json.loads((staged.checkpoint("2 stages", step) / "interdomain.json").read_text())
        assert record["tokens"] == TOKENS[step - 1]
        assert tuple(record["run"][name] for name in ("seq_len", "global_batch", "tokens_per_step")) == facts


def test_the_plan_of_stages(tmp_path):
    """Steps from tokens, rounded; the warmup and the end in tokens; FLOPs by length, and the largest memory."""
    toml = toml_of(tmp_path, "corpus")
    text = toml.read_text().replace("warmup_steps = 2", "warmup_tokens = 2_816").replace("total_steps = 6", "")
    toml.write_text(text.replace("\nsteps = 6", "\ntokens = 3_000"))
    given = ["--training.local_batch_size=4", "--mixer.condition=softmax"]
    plan = make_plan(read_job_config([f"--job.config_file={toml}", *given]), 2)
    assert [stage.begins for stage in plan.data_stages] == [0, 2, 4]
    assert (plan.steps, plan.warmup_steps, plan.tokens) == (6, 5, 3_584)
    assert [plan.tokens_at(step) for step in range(1, 7)] == TOKENS
    assert [plan.data_stage_of(step) for step in (0, 1, 2, 3, 4, 5, 6)] == [0, 0, 0, 1, 1, 2, 2]
    first, _, last = plan.data_stages
    assert plan.flops_at(6) == 2_048 * first.flops_per_token + 1_536 * last.flops_per_token
    assert first.flops_per_token < last.flops_per_token
    assert plan.config.max_seq_len == 192
    said = plan.describe()
    assert (
        "data stage 3  from step 5 (2,048 tokens): corpus, corpus/validation-00000 (3, 1); 4 x 192 = 1 per rank x 2"
        in said
    )
    most = max(sum(stage.memory.values()) for stage in plan.data_stages)
    assert f"memory per device  about {most / 2**30:.2f} GiB" in said


WRONG = {
    "at_tokens = 512\nseq_len = 100": ("", "2 of [[data.stages]]: at_tokens = 512 leaves the stage before it no step"),
    "at_tokens = 3_072": ("--training.steps=6", "begins after step 6, and the run ends with step 6"),
    "at_tokens = 2_000\nglobal_batch_size = 6": ("", "2 of [[data.stages]]: training.global_batch_size = 6"),
    "at_tokens = 2_000\nseq_len = 65": (
        "--parallelism.context_parallel_degree=2",
        "[[data.stages]]: training.seq_len = 65",
    ),
    "at_tokens = 2_000\nbatch = 8": (
        "",
        "2 of [[data.stages]]: there is no setting batch here, only at_tokens, corpus",
    ),
    "at_tokens = 2_000\nweights = 3": ("", "2 of [[data.stages]]: weights must be list[float]: got 3"),
    "seq_len = 32": ("", "2 of [[data.stages]]: at_tokens must be int: got None"),
}


@pytest.mark.parametrize("table", WRONG)
def test_a_stage_that_cannot_be(tmp_path, table):
    first = "[[data.stages]]\nat_tokens = 1_024\n[[data.stages]]\n"
    flag, words = WRONG[table]
    toml = toml_of(tmp_path, "corpus", first + table)
    with pytest.raises(ValueError, match=re.escape(words)):
        make_plan(read_job_config([f"--job.config_file={toml}", "--training.local_batch_size=4", *flag.split()]), 2)


def test_the_data_of_a_stage_that_cannot_be(corpus, pairs, tmp_path, alone, capsys):
    for table, words in (
        (f'corpus = "{pairs}"', f"is not the tokenizer that made data.corpus = '{pairs}'"),
        ('corpus = "nowhere"', "data.corpus = 'nowhere': there is no such folder"),
        ("weights = [1, 2]", "data.corpus names 1 corpora and data.weights 2 weights"),
    ):
        toml = toml_of(tmp_path, corpus, f"[[data.stages]]\nat_tokens = 1_024\n{table}")
        job = read_job_config(flags(corpus, "folder", toml))
        error = refusal(capsys, open_data, job, make_plan(job, 1), 0, 1)
        assert "table 1 of [[data.stages]]: " in error
        assert words in error


def test_the_tokens_of_the_past_are_no_setting(tmp_path, alone, capsys):
    """A record of 1,000 steps of 512 tokens and then steps of 1,024."""

    run = {"data_stages": [{"begins": 0, "tokens_per_step": 512}, {"begins": 1_000, "tokens_per_step": 1_024}]}

    def resume(step, *stages, run=run, saved="train_state.step"):
        each = [{"begins": begins, "tokens_per_step": tokens} for begins, tokens in stages]
        model = {"model": build_config("debug").to_dict(), "size": "debug", "condition": "interdomain"}
        record, now = (model | {"run": facts} for facts in (run, {"data_stages": each}))
        index = as_arrays(Metadata({}, storage_data={}))
        index.entries.update({saved: BytesStorageMetadata()} if saved else {})
        point = ResumePoint(tmp_path, index, record | {"step": step}, "latest")
        require_same_run(point, now, {}, batch=True)

    resume(1_000, (0, 512))
    resume(1_000, (0, 512), (1_500, 2_048))
    resume(1_001, (0, 512), (1_000, 1_024), (1_001, 2_048))
    assert "tokens_per_step is 1024 there and 512 here" in refusal(capsys, resume, 1_001, (0, 512))
    moved = refusal(capsys, resume, 1_001, (0, 512), (999, 1_024))
    assert "the number of tokens at step 1001 is 513024 there and 513536 here" in moved
    assert "holds the weights alone" in refusal(capsys, resume, 1_000, (0, 512), saved=None)
    made_by_convert = {"started_from": {}}  # which trained nothing
    assert "tokens_per_step is 0 there and 512 here" in refusal(capsys, resume, 0, (0, 512), run=made_by_convert)


def test_a_changed_past_is_no_continuation(corpus, alone, capsys):
    """A stage that has not begun may change."""
    first, mixed, longer = datasets_of(corpus)

    def loader(*later):
        return PackedLoader([StageData(first, 8, 8), *later], rank=0, ranks=1)

    second, third = StageData(mixed, 8, 8, 3), StageData(longer, 12, 12, 6)
    states = {}
    for n in (3, 5, 7):
        one = loader(second, third)
        take(one, n)
        states[n] = one.state_dict()
    plain = loader()
    take(plain, 3)
    assert states[3] == plain.state_dict()  # as of a run without stages
    loader(third._replace(begins=4)).load_state_dict(states[3])
    loader(second).load_state_dict(states[5])
    for changed in ((second._replace(begins=2),), (second._replace(begins=4), third), (third._replace(begins=4),)):
        error = refusal(capsys, loader(*changed).load_state_dict, states[5])
        assert "was made with other data" in error
