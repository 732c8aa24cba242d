"""One TensorBoard folder per run: what TensorBoard's own readers make of restarts, and what a folder says about its run."""

import itertools
import json
import re
import resource
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from tensorboard.context import RequestContext
from tensorboard.data import server_ingester
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer import event_file_writer
from tensorboard.util.grpc_util import ChannelCredsType

from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.rules import check_combinations
from interdomain.titan.watch.run_log import CHARTS, RunLog, WandbLog
from interdomain.tools._curves import facts_of, read_curves, read_events

from .runs import parse

LOSS, RARE = "loss_metrics/global_avg_loss", "validation_metrics/loss"


@pytest.fixture(scope="module")
def job():
    return parse("--optimizer.lr 5e-4 --mixer.c_scale 1")


@pytest.fixture
def start(tmp_path, job, monkeypatch):
    """start(first, last, value): a start of the run that logs `value` as the loss of each step, and is killed."""
    # SummaryWriter names its file by the second; TensorBoard reads a folder's files in the order of their names. These are the
    # clocks of the nodes that a run was started on: some are behind that of an earlier start, or as late.
    clock = itertools.cycle([1_700_000_000, 1_700_000_000, 1_600_000_000, 1_600_000_500])

    def start(first, last, value):
        now = next(clock)
        monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: now))
        log = RunLog(tmp_path / "tb", make_plan(job, 1), job, first, {"train": "text"})
        for step in range(first, last + 1):
            log.log({LOSS: value, **({RARE: value} if step in (1, 6) else {})}, step)

    return start


def drawn_by_tensorboard(folder):
    """{tag: {step: value}} of a run, from TensorBoard's own process, which it asks over gRPC."""
    try:
        binary = server_ingester.get_server_binary()
    except server_ingester.NoDataServerError:
        pytest.skip("no tensorboard-data-server for this machine")
    channel = {"channel_creds_type": ChannelCredsType.LOCAL, "reload_interval": 0}
    server = server_ingester.SubprocessServerDataIngester(
        server_binary=binary, logdir=str(folder.parent), **channel
    )
    server.start()
    scalars = {"experiment_id": "", "plugin_name": "scalars", "downsample": 1000}
    tags = server.data_provider.read_scalars(RequestContext(), **scalars)[folder.name]
    server._stdin_handle.close()
    return {tag: {point.step: point.value for point in points} for tag, points in tags.items()}


@pytest.mark.parametrize("read", [read_curves, drawn_by_tensorboard])
def test_steps_run_again_replace_the_old_ones(start, tmp_path, read):
    """A run from the beginning in a used folder replaces all. TensorBoard's two readers treat such steps differently."""
    start(1, 9, 0.0)
    start(1, 6, 1.0)
    start(4, 8, 2.0)
    start(6, 7, 3.0)
    losses = {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 3.0, 7: 3.0}
    assert read(tmp_path / "tb") == {LOSS: losses, RARE: {1: 1.0, 6: 3.0}}


def test_the_folder_says_what_the_run_is(start, job, tmp_path):
    start(1, 2, 1.0)
    start(2, 3, 1.0)
    events = read_events(tmp_path / "tb")
    assert facts_of(events, "configuration") == json.loads(json.dumps(job.to_dict(), default=str))
    assert "PyTorch" in facts_of(events, "environment")
    expected = {
        "model": "debug with n_layers 2, vocab_size 512, max_seq_len 64",
        "condition": "interdomain, c_scale 1",
    }
    expected |= {
        "lr": 5e-4,
        "ssm_lr": 5e-4,
        "seed": 42,
        "tokens": 6 * 512,
        "fingerprints": {"train": "text"},
    }
    expected |= {"n_basis": 32, "dt_min": 1e-3, "a_init": "s4d-inv"}
    assert facts_of(events, "hyperparameters").items() >= expected.items()
    layout = Layout.FromString(
        events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    )
    assert [category.title for category in layout.category] == list(CHARTS)


def test_every_chart_of_the_layout_finds_its_curves(runs):
    """In real runs, one of them on answers; and TensorBoard draws nothing where a tag has parentheses."""
    curves = read_curves(runs.at("2 text") / "tb")
    tags = [*curves, *read_curves(runs.at("2 shards answers") / "tb")]
    for charts in CHARTS.values():
        for pattern in itertools.chain(*charts.values()):
            found = [tag for tag in tags if re.fullmatch(pattern, tag)]
            assert found, f"no tag matches {pattern}"
            assert "(" not in "".join(found)
    all_ranks = {
        step: pytest.approx(2 * of_one, rel=1e-5)
        for step, of_one in curves["throughput(tps)"].items()
    }
    assert curves["machine/tokens_per_second"] == all_ranks


def test_a_full_disk_ends_the_curve_and_not_the_run(tmp_path, job, caplog):
    log = RunLog(tmp_path / "tb", make_plan(job, 1), job, 1, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (events,) = (tmp_path / "tb").glob("events*")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size, before[1]))
        for step in range(1, 4):
            log.log({LOSS: 1.0}, step)
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.text.count("the curve ends here, the run goes on") == 1


def test_weights_and_biases_has_one_run_over_restarts(tmp_path, job, monkeypatch):
    """On a stand-in for the package, which is not in the tests' environment."""
    wandb = mock.Mock(Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mixers")
    for step in (1, 2):
        WandbLog(tmp_path / "run", make_plan(job, 1), job, {"train": "text"}).log(
            {"mfu(%)": 40.0}, step
        )
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first == second
    config = first.pop("config")
    identity = (tmp_path / "run" / "wandb_id").read_text()
    assert first == dict(
        id=identity, resume="allow", dir=tmp_path / "run", project="mixers", name="run"
    )
    assert config["configuration"] == job.to_dict()
    assert config["hyperparameters"]["fingerprints"] == {"train": "text"}
    records = [call.args[0] for call in wandb.init().log.call_args_list]
    assert records == [
        {"step": step, "mfu(%)": 40.0, "machine/mfu_percent": 40.0} for step in (1, 2)
    ]


def test_weights_and_biases_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_combinations(parse("--metrics.enable_wandb"))
