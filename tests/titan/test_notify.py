"""Notes: what a server and a command get, and that neither ends the run, holds it up, or shows the URL. test_launch.py and
test_kills.py have those of real runs."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.watch import notify

from .runs import flags


@pytest.fixture
def server(monkeypatch):
    """A server on this machine: its URL, what was posted, and the event that lets it answer /slow. It has no /none."""
    posted, over = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(
                (self.headers["Content-Type"], json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )
            if self.path == "/slow":
                over.wait()
            self.send_response(404 if self.path == "/none" else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "*")
        yield f"http://127.0.0.1:{server.server_port}", posted, over
        over.set()
        server.shutdown()


def send(target, monkeypatch, rank="0"):
    monkeypatch.setenv("RANK", rank)
    job = read_job_config(flags("corpus", "outputs/run", metrics__notify=target))
    notify.notify(job, "skipped", 7, "a spike")


def under_way():
    return [thread for thread in threading.enumerate() if thread.name == "notify"]


def wait():
    for thread in under_way():
        thread.join()


def test_what_is_sent(server, monkeypatch, tmp_path):
    """By rank 0 alone, which does not wait for an answer."""
    url, posted, over = server
    monkeypatch.setenv("NOTES", f"{url}/secret")
    for rank in "01":
        send("env:NOTES", monkeypatch, rank)
    send(
        f'echo "$INTERDOMAIN_EVENT|$INTERDOMAIN_RUN|$INTERDOMAIN_STEP|$INTERDOMAIN_MESSAGE" > {tmp_path}/note',
        monkeypatch,
    )
    wait()
    note = {"event": "skipped", "run": "outputs/run", "step": 7, "message": "a spike"}
    assert posted == [("application/json", note | {"text": "outputs/run: skipped at step 7: a spike"})]
    assert (tmp_path / "note").read_text() == "skipped|outputs/run|7|a spike\n"
    monkeypatch.setattr(notify, "SECONDS", 600)
    monkeypatch.setenv("NOTES", f"{url}/slow")
    send("env:NOTES", monkeypatch)
    assert under_way()
    over.set()
    wait()


def test_one_that_fails_is_a_line_of_the_log_without_the_url(server, monkeypatch, caplog):
    url, posted, _ = server
    monkeypatch.setattr(notify, "SECONDS", 0.2)
    for target in (f"{url}/none", f"{url}/slow", "https://[secret", "http://localhost:secret/", "exit 3 # secret"):
        monkeypatch.setenv("NOTES", target)
        send("env:NOTES", monkeypatch)
    send("sleep 60", monkeypatch)
    wait()
    assert len(posted) == 2
    assert sorted(line.partition("failed: ")[2].split()[0] for line in caplog.messages) == sorted(
        ["HTTPError", "TimeoutError", "ValueError", "InvalidURL", "CalledProcessError", "TimeoutExpired"]
    )
    assert "HTTPError Not Found" in caplog.text
    assert not any(word in caplog.text for word in ("secret", url, "sleep"))
