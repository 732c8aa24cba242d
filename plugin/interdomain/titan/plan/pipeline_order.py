"""The order in which a pipeline's ranks go forward and backward: PyTorch's own, and what it costs in memory and waiting."""

import functools
from collections import deque
from types import SimpleNamespace
from typing import Any

MULTI_STAGE = ("Interleaved1F1B",)  # under which a rank has several stages


def stages_of(schedule: str, rank: int, ranks: int, stages: int) -> tuple[int, ...]:
    """The stages of a rank of the pipeline, of `stages` in all."""
    return tuple(range(rank, stages, ranks))


@functools.cache
def actions(schedule: str, ranks: int, stages: int, micro_batches: int) -> list[list[Any]]:
    """Each rank's passes in order, by PyTorch's class of a schedule in MULTI_STAGE. stages: of a rank."""
    # Slow to import, and only a pipeline needs it.
    from torch.distributed.pipelining.schedules import get_schedule_class

    facts = {"group_rank": 0, "group_size": ranks, "num_stages": ranks * stages, "submod": None}
    own = [SimpleNamespace(stage_index=i, **facts) for i in stages_of(schedule, 0, ranks, ranks * stages)]
    kind: Any = get_schedule_class(schedule)
    order = kind(own, micro_batches).pipeline_order
    return [[action for action in order[rank] if action is not None] for rank in range(ranks)]


def in_flight(schedule: str, rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[int, ...]:
    """The most micro-batches whose activations a pipeline's rank holds at a time, for each of its `stages`.

    They are held up to the backward pass; where that is in two halves, up to the second.
    """
    if schedule == "GPipe":
        return (micro_batches,)
    if schedule == "1F1B":
        return (min(micro_batches, ranks - rank),)
    held = dict.fromkeys(stages_of(schedule, rank, ranks, ranks * stages), 0)
    most = tuple(held.values())
    for action in actions(schedule, ranks, stages, micro_batches)[rank]:
        held[action.stage_index] += {"FORWARD": 1, "BACKWARD_INPUT": 0}.get(action.computation_type.name, -1)
        most = max(most, tuple(held.values()), key=sum)
    return most


def idle(schedule: str, ranks: int, stages: int, micro_batches: int) -> float:
    """Share of a step that the ranks of a pipeline wait. stages: of a rank.

    Computed for stages that all take the same time: one unit forward, one backward by activations, one by weights. The first
    stage has no gradient by its tokens, and goes backward at once.
    """
    if schedule not in MULTI_STAGE:
        return (ranks - 1) / (micro_batches + ranks - 1)
    orders = [deque(order) for order in actions(schedule, ranks, stages, micro_batches)]
    last, clocks = ranks * stages - 1, [0] * ranks
    done: dict[tuple[int, bool, int], int] = {}  # when a stage has gone forward (True) or backward by activations
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                stage, kind, micro_batch, _ = order[0]
                before = (stage - 1, True) if kind.name == "FORWARD" else (stage + 1, False)
                waits = kind.name != "BACKWARD_WEIGHT" and 0 <= before[0] <= last
                if waits and (*before, micro_batch) not in done:
                    break
                begin = max(clocks[rank], done[*before, micro_batch] if waits else 0)
                halves = {"FULL_BACKWARD": 2, "BACKWARD_INPUT": stage > 0, "BACKWARD_WEIGHT": 1 + (stage == 0)}
                clocks[rank] = begin + halves.get(kind.name, 1)
                if kind.name != "BACKWARD_WEIGHT":
                    done[stage, kind.name == "FORWARD", micro_batch] = clocks[rank]
                order.popleft()
    return 1 - 3 * stages * micro_batches / max(clocks)
