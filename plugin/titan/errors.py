"""A user's mistake ends a run with one paragraph from one rank, not with a traceback from each."""

import functools

import torch.distributed as dist


def stop(message: str):
    """End this process; rank 0 says why."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    raise SystemExit(f"\nerror: {message}\n" if first else 1)


def one_paragraph(check):
    """For hooks whose ValueError and FileNotFoundError are refusals of what the user gave."""

    @functools.wraps(check)
    def checked(*args, **kwargs):
        try:
            return check(*args, **kwargs)
        except (ValueError, FileNotFoundError) as e:
            stop(str(e))

    return checked
