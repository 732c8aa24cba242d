"""Notes to a user who does not look: `metrics.notify` is run, or posted to, when a run starts, skips steps, fails or ends.

A note never ends the run nor holds it up: a thread sends it, within SECONDS, and what fails is one line of the log.
"""

import atexit
import http.client
import json
import os
import subprocess
import threading
import urllib.request
from typing import Any

from ..host import logger
from ..settings.job_config import target_of

SECONDS = 10.0


def notify(job_config: Any, event: str, step: int, message: str) -> None:
    """Send a note, on rank 0 and in the launcher. event: start, restart, skipped, failure or end."""
    if not (target := target_of(job_config.metrics.notify)) or os.environ.get("RANK", "0") != "0":
        return
    run = job_config.job.dump_folder
    contents = {"event": event, "run": run, "step": step, "message": message}
    thread = threading.Thread(target=_send, args=(target, contents), name="notify", daemon=True)
    thread.start()
    atexit.register(thread.join, SECONDS)  # the last note of a run


def _send(target: str, contents: dict[str, Any]) -> None:
    try:
        if target.startswith(("https://", "http://")):
            text = "{run}: {event} at step {step}: {message}".format_map(contents)
            body = json.dumps(contents | {"text": text}).encode()  # chat services show the last
            request = urllib.request.Request(target, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=SECONDS).close()
        else:
            variables = {f"INTERDOMAIN_{name.upper()}": str(value) for name, value in contents.items()}
            options: Any = {"shell": True, "check": True, "timeout": SECONDS, "stdin": subprocess.DEVNULL}
            subprocess.run(target, env=os.environ | variables, **options)
    except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as e:
        # Not the error's own text, which may hold the URL or the command.
        reason = getattr(e, "reason", getattr(e, "returncode", ""))
        logger.warning("metrics.notify: the note %r failed: %s %s", contents["event"], type(e).__name__, reason)
