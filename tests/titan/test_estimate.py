"""The estimate of a step: bytes between nodes against a count over real groups, the search of topologies, the fitted factor."""

import itertools
import json
import logging

import pytest

from interdomain.model.transformer import mixer_class
from interdomain.titan.plan import search
from interdomain.titan.plan.estimate import Estimate, between_nodes, groups_of
from interdomain.titan.plan.machines import DEVICES, ROOM, Machines
from interdomain.titan.plan.measured import Fit, fit, note, step_times
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.plan.topology import Topology
from interdomain.titan.settings.job_config import read_job_config, set_value

from ..common import REPOSITORY
from ..ranks import launch
from .runs import CONTEXT, PIPELINE, TENSOR, flags, parallel

H100 = Machines("H100", 8)


def papers(size, ranks, *arguments):
    file = str(REPOSITORY / "train_configs" / f"{size}.toml")
    return make_plan(read_job_config(["--job.config_file", file, *arguments]), ranks, on_gpus=True)


@pytest.mark.parametrize("mesh", [Topology(2, 2, 2, 2, 2), Topology(3, 2, 1, 2, 1), Topology(1, 4, 3, 1, 2)])
@pytest.mark.parametrize("per_node", [1, 3, 4, 8])
def test_groups_of_ranks(mesh, per_node):
    """Ranks by their coordinates, the tensor axis fastest: the fewest of a group in one node with one of them."""
    order = "pipeline", "replicas", "shards", "context", "tensor"
    places = list(itertools.product(*(range(getattr(mesh, axis)) for axis in order)))
    varying = {axis: {axis} for axis in ("pipeline", "replicas", "context", "tensor")}
    varying |= {"shards": {"shards", "context"}, "dynamics": set(order) - {"pipeline"}}
    varying["matrices"] = {"shards", "context", "tensor"}
    for axis, group in groups_of(mesh, per_node).items():
        fixed = [i for i, name in enumerate(order) if name not in varying[axis]]
        groups = [
            [rank for rank, other in enumerate(places) if all(other[i] == place[i] for i in fixed)] for place in places
        ]
        here = [sum(a // per_node == b // per_node for a in ranks) for b, ranks in enumerate(groups)]
        assert group == (len(groups[0]), min(here))


COUNT = """
import json, os, sys
import torch.distributed as dist
from interdomain.titan.settings.job_config import read_job_config
from interdomain.titan.trainer import InterdomainTrainer
from tests.traffic import counted

start = dist.init_process_group  # TorchTitan would simulate rank 0
dist.init_process_group = lambda backend, rank, world_size: start(backend, rank=int(sys.argv[2]), world_size=world_size)
os.environ |= {"NGPU": "16", "RANK": sys.argv[2]}
found = []
for arguments in json.loads(sys.argv[3]):
    trainer = InterdomainTrainer(read_job_config(arguments))
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step = 1
    assert trainer.should_continue_training()
    with counted(per_node=4) as received:
        trainer.train_step(batches)
    found.append(sum(received.values()))
    trainer.close()
open(sys.argv[1], "w").write(json.dumps(found))
"""


@pytest.mark.e2e
def test_bytes_between_nodes_are_those_of_the_groups_of_16_ranks(corpus, tmp_path):
    (tmp_path / "count.py").write_text(COUNT)
    settings = {"comm__mode": "fake_backend", "metrics__log_freq": 100, "training__global_batch_size": 64}
    meshes = [
        {"replicas": 4},
        {"tensor": 2, "context": 4},
        {"pipeline": 2, "tensor": 2},
    ]
    jobs = []
    for i, degrees in enumerate(meshes):
        own = parallel(**degrees) | {"parallelism__data_parallel_shard_degree": -1, "training__local_batch_size": 1}
        job = flags(corpus, tmp_path / str(i), **settings | own | {"validation__local_batch_size": 1})
        jobs.append([str(word) for word in job])
    for rank in ("0", "15"):  # of the first stage, and of the last
        out = tmp_path / f"{rank}.json"
        launch(tmp_path / "log.txt", 1, tmp_path / "count.py", out, rank, json.dumps(jobs))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in ("0", "15")]
    for job, *counts in zip(jobs, *found, strict=True):
        plan = make_plan(read_job_config(job), 16)
        between = sum(between_nodes(plan.traffic, groups_of(plan.topology, 4)).values())
        assert 0 < between < sum(plan.traffic.values())
        few = 256  # sums of a few numbers, such as the loss and the gradients' norm
        if plan.topology.context > 1:  # the convolutions' inputs come from one rank, not from every other
            tails = [mixer_class(layer.mixer).received(layer, 2, 1)["tail"] for layer in plan.config.layers]
            few += 2 * 4 * plan.accumulation * sum(tails)
        assert abs(max(counts) - between) < few, plan.topology


def test_replicas_of_a_node_are_proposed_where_they_spare_the_network():
    """1.3B on 64 GPUs, 8 in a node: 8.7 GiB come from other nodes in a step, or 1.1; on one node there is nothing to spare."""
    own = ["--training.local_batch_size", "2"]
    full = Estimate(papers("1.3B", 64, *own), H100, Fit())
    words = full.describe().partition("HSDP")[2].partition("\n")[0].split()
    replicas = Estimate(papers("1.3B", 64, *own, *words[words.index("with") + 1 :]), H100, Fit())
    assert full.between["shards"] / 2**30 == pytest.approx(8.7, abs=0.05)
    assert replicas.between["replicas"] / 2**30 == pytest.approx(1.1, abs=0.05)
    assert replicas.between["shards"] == 0
    assert "HSDP" not in replicas.describe() + Estimate(papers("1.3B", 8), H100, Fit()).describe()


@pytest.mark.parametrize(
    ("axis", "per_node", "leaves"), [(TENSOR, 1, True), (CONTEXT, 1, True), (CONTEXT, 2, False), (PIPELINE, 1, False)]
)
def test_groups_that_leave_a_node_are_warned_of(axis, per_node, leaves):
    plan = make_plan(read_job_config(flags("corpus", "folder", training__local_batch_size=4, **axis)), 2)
    assert ("warning  groups leave a node" in Estimate(plan, Machines("H100", per_node), Fit()).describe()) == leaves


def test_terms_of_a_step():
    """1.3B on 8 GPUs: products at 40 % of 989 TFLOP/s, 40 bytes a parameter of the optimizer, and a tenth of the
    exchange of shards."""
    plan = papers("1.3B", 8)
    terms, hidden = Estimate(plan, H100, Fit()).parts
    assert terms["computation"] == pytest.approx(plan.flops_per_token * plan.tokens_per_step / 8 / (0.4 * 989e12))
    dynamics = plan.costs.held[0].dynamics
    assert terms["optimizer"] == pytest.approx(40 * (dynamics + (plan.n_params - dynamics) / 8) / 3.35e12)
    assert {term for term, x in terms.items() if x} == {"computation", "shards", "dynamics", "optimizer"}
    assert hidden["shards"] == pytest.approx(9 * terms["shards"])
    assert hidden["shards"] + terms["shards"] > plan.traffic["shards"] / 450e9
    full = papers("1.3B", 8, "--activation_checkpoint.mode", "full")
    head = 2 * full.config.dim * full.config.vocab_size * 3 / full.flops_per_token
    again = Estimate(full, H100, Fit()).parts[0]["recomputation"] / terms["computation"]
    assert again == pytest.approx((1 - head) / 3)
    waits = Estimate(papers("7B", 64), H100, Fit()).parts[0]
    working = sum(waits[term] for term in ("computation", "recomputation", "launches", "tensor", "context", "pipeline"))
    assert waits["waiting for stages"] == pytest.approx(working * 3 / 128)  # two stages a rank


def test_the_fastest_topology_is_the_fastest_of_all_that_fit(monkeypatch):
    """Against every product of degrees, batches and ways of recomputation, each through the plan; its flags make its plan."""
    arguments = flags("corpus", "folder", validation__enable=True, training__seq_len=256, validation__seq_len=256)
    job, seconds = read_job_config(arguments), []
    logging.disable(logging.WARNING)
    names = *search.DEGREES.values(), "training.local_batch_size", "validation.local_batch_size"
    for *degrees, local in itertools.product(*[(1, 2, 4)] * 5, range(1, 9)):
        for computed in itertools.product(("none", "selective", "full"), (True, False)):
            values = zip(
                (*names, "activation_checkpoint.mode", "mixer.recompute"),
                (*degrees, local, local, *computed),
                strict=True,
            )
            for name, value in values:
                set_value(job, name, value)
            try:
                plan = make_plan(job, 4, on_gpus=True)
            except ValueError:
                break
            seconds.append((Estimate(plan, H100, Fit()).unfitted, sum(plan.memory.values())))
    logging.disable(logging.NOTSET)
    room = sorted(memory for _, memory in seconds)[len(seconds) // 8]
    monkeypatch.setitem(DEVICES, "H100", DEVICES["H100"]._replace(memory=room / ROOM))
    job = read_job_config(arguments)
    first, *others = search.fastest(job, 4, H100, Fit())
    assert min(seconds)[0] < min(x for x, memory in seconds if memory <= room) == first.estimate.unfitted
    assert job == read_job_config(arguments)
    assert [one.estimate.step for one in others] == sorted(one.estimate.step for one in others)
    for one in (first, *others):
        again = make_plan(read_job_config([*arguments, *one.flags]), 4, on_gpus=True)
        assert again.describe() == one.estimate.plan.describe()
        assert sum(again.memory.values()) <= room
    assert len({one.estimate.plan.topology for one in (first, *others)}) == len([first, *others])


def test_where_nothing_fits():
    job = read_job_config(flags("corpus", "folder", model__flavor="70B", model__n_layers=80))
    with pytest.raises(ValueError, match="no topology of 2 H100 fits"):
        search.fastest(job, 2, H100, Fit())


def test_the_factor_is_the_median_of_what_runs_measured(tmp_path):
    file = step_times(str(tmp_path / "runs" / "one"))
    assert file == step_times(str(tmp_path / "runs" / "two"))
    assert fit(file, "H100") == Fit(1.0, 0)
    file.parent.mkdir()
    for device, seconds, estimate in (("H100", 3, 2), ("H100", 2, 2), ("H100", 8, 4), ("A100", 9, 1), ("CPU", 5, None)):
        note(file, {"device": device, "seconds": seconds, "estimate": estimate})
    assert fit(file, "H100") == Fit(1.5, 3)
    assert fit(file, "A100") == Fit(9, 1)
    assert fit(file, "CPU") == fit(file, "H200") == Fit()
    with open(file, "a") as f:
        f.write('{"device"')
    with pytest.raises(ValueError, match=r"line \d+, is no record of a step time .* Remove the line"):
        fit(file, "H100")
    plan = papers("125M", 8)
    never, fitted = (Estimate(plan, H100, each) for each in (Fit(), Fit(1.5, 3)))
    assert fitted.step == 1.5 * never.step
    assert fitted.gpu_hours == pytest.approx(1.5 * never.gpu_hours)
    assert ("never fitted" in never.describe(), "fitted to 3 run(s)" in fitted.describe()) == (True, True)
