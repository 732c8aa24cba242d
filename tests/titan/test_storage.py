# ruff: noqa: F811 (fixtures are imported)
"""Checkpoints, corpora and exported folders in an object store: a server on this machine that speaks S3."""

import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from interdomain import storage
from interdomain.data import local_corpus
from interdomain.files.distributed_checkpoint import METADATA
from interdomain.files.pretrained import load_pretrained
from interdomain.files.remote_checkpoint import COPIED, LATEST, remote_steps
from interdomain.folders import new_folder
from interdomain.storage import RemoteFolder
from interdomain.titan.resume import copies
from interdomain.titan.settings.job_config import job_config_of
from interdomain.tools import convert

from ..common import TIMEOUT
from ..tools.checkpoints import small_model, write_checkpoint
from .conftest import refusal
from .runs import assert_same_tensors, flags
from .small_run import alter, names, new, record  # noqa: F401

for package in ("moto", "flask", "flask_cors", "s3fs"):
    pytest.importorskip(package, reason=f"{package} (of the extra `dev`) is not installed")

PUT, GET = RemoteFolder.put, RemoteFolder.get


class Server:
    """moto's server, which forgets everything when it ends."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            assert self.process.poll() is None
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT")).close()
                return
            except urllib.error.URLError:
                time.sleep(0.02)

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server()
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    server.environment = keys | {"AWS_ENDPOINT_URL": server.url, "AWS_MAX_ATTEMPTS": "1"}
    server.environment[storage.CACHE] = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.start()
        yield server
        server.end()


@pytest.fixture
def address(server, request, monkeypatch):
    """An address for a run's copies, which no other test has."""
    monkeypatch.setattr(copies, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    return f"s3://bucket/{request.node.name}/run"


@pytest.fixture
def start(new, address):
    """A start of the run that copies its checkpoints: it loads what it finds, and saves these steps."""

    def start(*steps, load=-1, **settings):
        run = new(**{"copy_to": address, **settings})
        run.manager.load(load)
        begun = run.trainer.step
        run.save(*steps)
        run.manager.finish_copies()
        return begun

    return start


def kept(address):
    """Names of the folders in a run's copies."""
    return sorted(RemoteFolder(address).folders())


def test_a_start_without_checkpoints_continues_from_the_store(start, address, tmp_path, caplog):
    folder = tmp_path / "run" / "checkpoint"
    assert start(1, 2, 3) == 0
    before = {path.name: path.read_bytes() for path in (folder / "step-3").iterdir()}
    (folder / "step-3" / "validation.json").write_text("{}")  # after the copy
    assert start() == 3
    assert "validation.json" in RemoteFolder(f"{address}/step-3").sizes()
    shutil.rmtree(folder)
    RemoteFolder(f"{address}/step-9").write("__0_0.distcp", b"half an upload")
    assert start() == 3
    after = {path.name: path.read_bytes() for path in (folder / "step-3").iterdir()}
    assert (after.pop("validation.json"), after.pop(COPIED)) != before.pop(COPIED)
    assert (after, names(folder)) == (before, ["step-3"])

    # The run goes back to step 2, which is in the store alone; and once more without its folder.
    assert start(3, load=2) == 2
    assert names(folder) == ["step-2", "step-3", "step-3.superseded"]
    assert kept(address) == ["step-1", "step-2", "step-3", "step-3.superseded", "step-9"]
    assert start(4, 5) == 3
    assert start(3, load=2, keep_latest_k=2) == 5  # it has gone back before: saved since is 5
    shutil.rmtree(folder)
    assert (start(load=2), record(folder, 5)["branched_from"]) == (5, 2)


def test_a_later_step_of_a_run_that_went_back_is_not_continued(new, start, address, tmp_path):
    start(1, 2, 3)
    assert start(2, load=1) == 1
    assert kept(address) == ["step-1", "step-2", "step-2.superseded", "step-3"]
    assert [step for step, _ in remote_steps(address)] == [2, 1]
    shutil.rmtree(tmp_path / "run")
    assert start() == 2
    # Another run starts from there.
    shutil.rmtree(tmp_path / "run")
    other = new(initial_load_path=address)
    assert other.manager.load()
    assert (other.model.weight.unique().item(), other.trainer.step) == (2, 0)
    assert new(initial_load_path=address).manager.load()  # killed before its first save, and started again


def test_another_address_and_what_lies_beside_the_files(start, address, tmp_path):
    start(1)
    (tmp_path / "run" / "checkpoint" / "step-1" / ".ipynb_checkpoints").mkdir()
    assert start(2, copy_to=f"{address}/other") == 1
    assert kept(f"{address}/other") == ["step-1", "step-2"]
    RemoteFolder(f"{address}/step-2.superseded-2").write("file", b"kept")
    for _ in range(3):
        start(2, load=1)
        shutil.rmtree(tmp_path / "run")
        start()
    assert RemoteFolder(f"{address}/step-2.superseded-2").read("file") == b"kept"


def test_the_newest_is_named_whatever_fails(start, address, tmp_path, monkeypatch, capsys):
    write, failed = RemoteFolder.write, []

    def fail(remote, name, data):
        if name == LATEST and data == b"step-2\n" and not failed:
            failed.append(1)
            raise OSError("away")
        write(remote, name, data)

    monkeypatch.setattr(RemoteFolder, "write", fail)
    start(1, 2)
    assert failed
    assert RemoteFolder(address).read(LATEST) == b"step-2\n"
    for step in (1, 2):
        RemoteFolder(f"{address}/step-{step}").remove()
    shutil.rmtree(tmp_path / "run")
    assert f"{address}/latest names a checkpoint, and none there is complete" in refusal(capsys, start)


def test_a_damaged_copy_is_passed_over(start, address, tmp_path, caplog, capsys):
    folder = tmp_path / "run" / "checkpoint"
    start(1, 2, 3)
    for step, damage in ((3, lambda path: alter(path, 0.5)), (2, lambda path: path.write_bytes(b"short"))):
        damage(folder / f"step-{step}" / "__0_0.distcp")
        RemoteFolder(f"{address}/step-{step}").put(folder / f"step-{step}", ["__0_0.distcp"])
    shutil.rmtree(folder)
    assert start() == 1
    assert "do not match their checksum" in caplog.text
    assert "step-2 is damaged: its shard" in caplog.text.replace(".partial", "")
    assert names(folder) == ["step-1", "step-3.damaged"]
    shutil.rmtree(folder)
    RemoteFolder(f"{address}/step-1").write(METADATA, b"of another kind")
    RemoteFolder(f"{address}/step-3").remove()
    assert f"no checkpoint at {address} can be loaded" in refusal(capsys, start)


def test_the_store_dies_and_comes_back(start, server, address, tmp_path, monkeypatch, caplog, capsys):
    """Between a checkpoint's shards and its index, and with all that it had."""
    monkeypatch.setattr(copies, "LONGEST_WAIT", 0.2)

    def put(remote, folder, files):
        if METADATA in files and remote.address.endswith("step-2") and server.process.poll() is None:
            server.end()
        PUT(remote, folder, files)

    monkeypatch.setattr(RemoteFolder, "put", put)
    assert start(1) == 0
    assert start(2, copy_wait_seconds=0) == 1  # the run goes on, and ends without its copies
    assert "copying a checkpoint failed, and is tried again" in caplog.text
    assert "not at s3://bucket" in caplog.text
    assert start(copy_wait_seconds=0) == 2
    monkeypatch.setattr(RemoteFolder, "put", PUT)
    back = threading.Timer(0.5, server.start)
    back.start()
    start(3, copy_wait_seconds=60)
    back.join()
    assert {METADATA, "__0_0.distcp", "interdomain.json"} <= RemoteFolder(f"{address}/step-2").sizes().keys()
    assert kept(address) == ["step-2", "step-3"]  # of step 1 the server was told before it died
    shutil.rmtree(tmp_path / "run")
    server.end()
    error = refusal(capsys, start)  # without an answer no run starts over
    assert f"{address} failed: Could not connect to the endpoint" in error
    server.start()
    assert start() == 0
    wrong = address.replace("bucket", "no-such-bucket")
    assert "writing copied-from.txt" in refusal(capsys, start, copy_to=wrong)
    assert "Protocol not known: s4" in refusal(capsys, start, copy_to="s4://bucket")


def test_retention_spares_what_is_being_sent_and_waits_for_nothing(new, address, tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def put(remote, folder, files):
        begun.set()
        assert go_on.wait(TIMEOUT)
        PUT(remote, folder, files)

    monkeypatch.setattr(RemoteFolder, "put", put)
    run = new(copy_to=address, keep_latest_k=2)
    run.manager.load()
    run.manager.save(1)
    assert begun.wait(TIMEOUT)
    for step in (2, 3, 4):
        run.trainer.step = step
        run.manager.save(step)
    assert METADATA in names(tmp_path / "run" / "checkpoint" / "step-1")
    assert not (tmp_path / "run" / "checkpoint" / "step-2" / METADATA).exists()
    go_on.set()
    while run.manager.copies.sending or run.manager.copies._left():
        time.sleep(0.02)
    run.save(5)
    run.manager.finish_copies()
    assert {"step-1", "step-5"} <= {*kept(address)}
    assert names(tmp_path / "run" / "checkpoint") == ["step-4", "step-5"]


def test_a_run_of_two_ranks_by_way_of_the_store(server, address, corpus, runs, tmp_path):
    """Corpus and checkpoints: it loses its folder, and ends with the bits of a run that lost nothing."""
    place = f"s3://bucket/{corpus.name}"
    RemoteFolder(place).put(corpus, [path.name for path in corpus.iterdir()])
    settings = {"training__local_batch_size": 4, "checkpoint__enable": True, "checkpoint__copy_to": address}
    for steps in (3, 6):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        job = {
            "args": flags(place, tmp_path / "run", training__steps=steps, **settings),
            "output": str(tmp_path / "out"),
        }
        said = runs.ranks(2).run(job | {"environment": server.environment})
    assert (
        torch.load(tmp_path / "out.rank1.pt", weights_only=False)["drawn"] == []
    )  # no initial values for a fetched model
    shutil.rmtree(tmp_path / "run")
    rate = {"lr_scheduler__total_steps": 600, "training__local_batch_size": 8, "training__steps": 7}
    job["args"] = flags(place, tmp_path / "run", **settings | rate)
    jumped = runs.ranks(1).run(job | {"environment": server.environment, "stops": True})
    assert "the learning rate would jump" in jumped
    assert f"fetching {address}/step-3" in said
    assert kept(address) == ["step-3", "step-6"]
    assert_same_tensors(tmp_path / "run" / "checkpoint" / "step-6", runs.checkpoint("2 text", 6))


def test_a_corpus_is_fetched_once_and_checked(server, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv(storage.CACHE, str(tmp_path / "cache"))
    good, bad = RemoteFolder("s3://bucket/good"), RemoteFolder("s3://bucket/bad")
    for remote in (good, bad):
        remote.put(corpus, [path.name for path in corpus.iterdir()])
    bad.write("train-00000.bin", bytes(bad.sizes()["train-00000.bin"]))
    with pytest.raises(ValueError, match="differs from the manifest"):
        local_corpus("s3://bucket/bad")
    assert not [*tmp_path.rglob("manifest.json")]
    fetched, found = [], []
    monkeypatch.setattr(RemoteFolder, "get", lambda remote, folder: fetched.append(GET(remote, folder)))
    act = lambda: found.append(local_corpus.__wrapped__("s3://bucket/good"))  # noqa: E731
    waiting = [threading.Thread(target=act) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert (len(fetched), len(found), len({*found})) == (1, 3, 1)
    folder = Path(local_corpus("s3://bucket/good"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in corpus.iterdir()
    }
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/none has no manifest\.json"):
        local_corpus("s3://bucket/none")


def test_names_in_a_listing_stay_in_the_folder(server, tmp_path):
    remote = RemoteFolder("s3://bucket/names")
    for name in ("good", "../outside", "..", "a/../../outside", "/etc/passwd"):
        remote.files.call_s3("put_object", Bucket="bucket", Key=f"names/{name}", Body=b"x")
    remote.get(tmp_path)
    assert (names(tmp_path), remote.sizes()) == (["good"], {"good": 1})


def test_convert_from_and_to_the_store(server, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(storage.CACHE, str(tmp_path / "cache"))
    checkpoint = write_checkpoint(tmp_path, small_model("interdomain"), tokenizer)
    RemoteFolder("s3://bucket/runs/one/step-100").put(checkpoint, names(checkpoint))
    sent = []
    monkeypatch.setattr(RemoteFolder, "put", lambda r, f, files: sent.extend(files) or PUT(r, f, files))
    there = "s3://bucket/exports/one"
    assert convert.main(["s3://bucket/runs/one", "--output", there]) == 0
    assert sent.index("config.json") == len(sent) - 1
    assert f"wrote {there} (" in capsys.readouterr().out
    assert convert.main([str(checkpoint), "--output", str(tmp_path / "here")]) == 0
    model, _ = load_pretrained(there)
    same = load_pretrained(tmp_path / "here")[0].state_dict()
    assert all(tensor.equal(same[name]) for name, tensor in model.state_dict().items())
    assert convert.main([there, "--to-checkpoint", "--output", str(tmp_path / "back")]) == 0
    capsys.readouterr()
    for arguments, said in (
        (["s3://bucket/runs/one", "--output", there], "exists and is not empty"),
        (["s3://bucket/runs/none", "--output", str(tmp_path / "none")], "holds no complete checkpoint"),
        ([there, "--to-checkpoint", "--output", "s3://bucket/x"], "only a standalone folder can be sent"),
    ):
        assert convert.main(arguments) == 2
        assert said in capsys.readouterr().err


def test_what_cannot_be_at_an_address_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for section, name in (("job", "dump_folder"), ("checkpoint", "folder")):
        with pytest.raises(ValueError, match=rf"{section}\.{name} must be a folder, not an address"):
            job_config_of({section: {name: "s3://bucket/run"}})
    with pytest.raises(ValueError, match=r"checkpoint\.copy_to must be an address"):
        job_config_of({"checkpoint": {"copy_to": "backup"}})
    with pytest.raises(ValueError, match="is an address: write to a folder here"), new_folder(Path("s3://bucket/run")):
        pass
    assert not [*tmp_path.iterdir()]
