"""One TensorBoard folder per run: what TensorBoard's own readers make of restarts, and what a folder says about its run."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data import server_ingester
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.grpc_util import ChannelCredsType

from interdomain.titan.plan import make_plan
from interdomain.titan.run_log import CHARTS, RunLog, hyperparameters
from interdomain.titan.settings import read_job_config
from interdomain.tools._curves import hyperparameters_of, read_curves, read_events

from .conftest import flags

LOSS, BY_TOKENS = "loss_metrics/global_avg_loss", "by_tokens/loss"
SPIKE = "loss_metrics/spike"


@pytest.fixture(scope="module")
def job():
    return read_job_config(flags("corpus", "folder"))


def of_512(step):
    return 512 * step


@pytest.fixture
def start(tmp_path, job, monkeypatch):
    """start(first, last, value): a start of the run that logs `value` as the loss of each step, and is killed."""
    clock = iter(range(1_700_000_000, 1_800_000_000))
    # SummaryWriter names its file by the second; TensorBoard reads a folder's files in the order of their names.
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(clock)))

    def start(first, last, value, tokens_at=of_512):
        log = RunLog(tmp_path / "tb", make_plan(job, 1), job)
        log.begin(first, tokens_at)
        for step in range(first, last + 1):
            log.log({LOSS: value, **({SPIKE: value} if step == 6 else {})}, step)

    return start


@pytest.fixture(params=["python", "fast"])
def shown(request, tmp_path):
    """shown(): {run: {tag: {step: value}}} as TensorBoard draws it: by its own process, which it asks over gRPC, or where that
    has no build (aarch64) by Python. The two treat steps that come again differently."""
    server = None
    if request.param == "fast":
        try:
            binary = server_ingester.get_server_binary()
        except server_ingester.NoDataServerError:
            pytest.skip("no tensorboard-data-server for this machine")
        channel = {"channel_creds_type": ChannelCredsType.LOCAL, "reload_interval": 0}
        server = server_ingester.SubprocessServerDataIngester(server_binary=binary, logdir=str(tmp_path), **channel)

    def shown():
        if server:
            server.start()
            provider = server.data_provider
        else:
            multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
            multiplexer.Reload()
            provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
        runs = provider.read_scalars(RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000)
        drawn = {}
        for run, tags in runs.items():
            for tag, points in tags.items():
                assert [p.step for p in points] == sorted({p.step for p in points}), f"{run} {tag}: a zigzag"
                drawn.setdefault(run, {})[tag] = {p.step: p.value for p in points}
        return drawn

    yield shown
    if server:
        server._stdin_handle.close()


def test_steps_run_again_replace_the_old_ones(start, shown):
    """Also by tokens, of which the last start's steps have half as many."""
    start(1, 6, 1.0)
    start(4, 8, 2.0)
    start(6, 7, 3.0, lambda step: 5 * 512 + 256 * (step - 5))
    drawn = shown()
    losses = [1.0] * 3 + [2.0] * 2 + [3.0] * 2
    assert drawn["tb"][LOSS] == dict(zip(range(1, 8), losses, strict=True))
    assert drawn["tb"][SPIKE] == {6: 3.0}
    tokens = [512, 1024, 1536, 2048, 2560, 2816, 3072]
    assert drawn["tb/tokens"][BY_TOKENS] == dict(zip(tokens, losses, strict=True))


def test_a_run_from_the_beginning_does_not_mix_with_what_was_there(start, shown, tmp_path):
    start(1, 6, 1.0)
    start(1, 4, 2.0)
    (earlier,) = (tmp_path / "tb").glob("earlier-*")
    start(3, 5, 3.0)
    drawn = shown()
    assert drawn["tb"][LOSS] == {1: 2.0, 2: 2.0, 3: 3.0, 4: 3.0, 5: 3.0}
    assert drawn[f"tb/{earlier.name}"][LOSS] == dict.fromkeys(range(1, 7), 1.0)
    assert list(drawn[f"tb/{earlier.name}/tokens"][BY_TOKENS]) == [512 * step for step in range(1, 7)]


def test_the_folder_says_what_the_run_is(start, job, tmp_path):
    start(1, 2, 1.0)
    start(2, 3, 1.0)
    events = read_events(tmp_path / "tb")
    text = events.Tensors("run/configuration/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert json.loads(text.strip("`\n")) == json.loads(json.dumps(job.to_dict(), default=str))
    plan = events.Tensors("run/plan/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "6 of 512 tokens" in plan
    content = events.PluginTagToContent("hparams")
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= content.keys()
    facts = hyperparameters_of(events)
    assert (facts["model"], facts["condition"]) == ("debug with vocab_size 512, max_seq_len 64", "interdomain")
    assert (facts["lr"], facts["ssm_lr"], facts["seed"], facts["tokens"]) == (3e-3, 1e-3, 42, 6 * 512)
    assert (facts["n_basis"], facts["dt_min"], facts["a_init"]) == (32, 1e-3, "s4d-inv")
    low = read_job_config([*flags("corpus", "folder"), "--optimizer.lr", "5e-4", "--mixer.c_scale", "1"])
    found = hyperparameters(make_plan(low, 1), low)
    assert (found["lr"], found["ssm_lr"], found["c_scale"]) == (5e-4, 5e-4, 1.0)
    assert found["condition"] == "interdomain, c_scale 1"
    assert [path.name for path in (tmp_path / "tb").iterdir() if path.is_dir()] == ["tokens"]  # no sub-runs
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(CHARTS)


def test_every_chart_of_the_layout_finds_its_curves(one, two):
    """In a real run; and TensorBoard draws nothing where a tag has parentheses."""
    folder = two.folder / "interdomain" / "tb"
    tags = [*read_curves(folder), *read_curves(folder / "tokens")]
    for category, charts in CHARTS.items():
        for chart, patterns in charts.items():
            for pattern in patterns:
                found = [tag for tag in tags if re.fullmatch(pattern, tag)]
                assert found, f"{category}, {chart}: no tag matches {pattern}"
                assert not any("(" in tag for tag in found)
    events = read_events(folder)
    for tag in events.Tags()["scalars"]:
        drawn = [event.step for event in events.Scalars(tag)]
        assert drawn == sorted(set(drawn)), f"{tag}: a step twice"
    curves, steps = read_curves(folder), range(1, 7)
    assert list(curves["machine/tokens_per_second"]) == list(steps)
    for step in steps:
        assert curves["machine/tokens_per_second"][step] == pytest.approx(2 * curves["throughput(tps)"][step], rel=1e-5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("which", ["tb", "tb/tokens"])
def test_a_full_disk_ends_the_curves_and_not_the_run(which, start, job, tmp_path, caplog):
    log = RunLog(tmp_path / "tb", make_plan(job, 1), job)
    log.begin(1, of_512)
    (file,) = (tmp_path / which).glob("events*")
    file.unlink()
    file.symlink_to("/dev/full")
    for step in range(1, 4):
        log.log({LOSS: 1.0}, step)
        log.histogram("h", torch.ones(3), step)
    log.close()
    assert caplog.text.count(f"TensorBoard: writing into {tmp_path / 'tb'} failed (No space left on device)") == 1
    file.unlink()
    start(4, 5, 2.0)
    assert {4, 5} <= read_curves(tmp_path / "tb")[LOSS].keys()


def test_nothing_is_written_before_the_first_step(tmp_path, job):
    RunLog(tmp_path / "tb", make_plan(job, 1), job).close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_and_continued_on_other_ranks_is_one_curve(one, two):
    """Events to step 6 and a checkpoint of step 3: the real trainer runs steps 4 to 6 again and says so."""
    before, after = (read_curves(folder / "tb") for folder in (two.folder / "interdomain", one.folder / "after two"))
    assert list(after[LOSS]) == list(before[LOSS]) == list(range(1, 7))
    assert after["n_tokens_seen"] == before["n_tokens_seen"] == {step: 512 * step for step in range(1, 7)}
    assert [after[LOSS][step] == before[LOSS][step] for step in (1, 2, 3)] == [True] * 3  # the old points
    assert after[LOSS] == pytest.approx(before[LOSS], rel=1e-5)
    restarts = sorted((one.folder / "after two" / "tb").glob("events*"))
    assert len(restarts) == 2
    again = read_events(restarts[1]).Scalars(LOSS)
    assert [event.step for event in again] == [4, 5, 6]
    merged = read_events(one.folder / "after two" / "tb").Scalars(LOSS)
    assert [event.wall_time for event in merged[3:]] == [event.wall_time for event in again]
