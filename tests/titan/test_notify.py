"""Notes: what a server and a command get, and that neither ends the run, holds it up, or shows the URL. test_launch.py and
test_kills.py have those of real runs."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.watch import notify

from .runs import flags


@pytest.fixture
def server(monkeypatch):
    """A server on this machine: its URL in NOTES, and what was posted. It answers /secret, not /none, and /slow never."""
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
        yield f"http://127.0.0.1:{server.server_port}", posted
        over.set()
        server.shutdown()


def send(target, monkeypatch, rank="0"):
    """Seconds that the caller waited. The note is on its way."""
    monkeypatch.setenv("RANK", rank)
    job, began = read_job_config(flags("corpus", "outputs/run", metrics__notify=target)), time.monotonic()
    notify.notify(job, "skipped", 7, "a spike")
    return time.monotonic() - began


def wait():
    for thread in threading.enumerate():
        if thread.name == "notify":
            thread.join()


def test_what_is_sent(server, monkeypatch, tmp_path):
    """By rank 0 alone."""
    url, posted = server
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


def test_one_that_fails_is_a_line_of_the_log_without_the_url(server, monkeypatch, caplog):
    url, posted = server
    monkeypatch.setattr(notify, "SECONDS", 0.2)
    for target in (f"{url}/none", f"{url}/slow", "https://[secret", "http://localhost:secret/", "exit 3 # secret"):
        monkeypatch.setenv("NOTES", target)
        send("env:NOTES", monkeypatch)
    assert send("sleep 60", monkeypatch) < 30
    wait()
    assert len(posted) == 2
    assert sorted(line.partition("failed: ")[2].split()[0] for line in caplog.messages) == sorted(
        ["HTTPError", "TimeoutError", "ValueError", "InvalidURL", "CalledProcessError", "TimeoutExpired"]
    )
    assert "HTTPError Not Found" in caplog.text
    assert not any(word in caplog.text for word in ("secret", url, "sleep"))
