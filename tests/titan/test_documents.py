"""Losses of packed documents and of answers on one rank are those of the model for each by itself."""

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer
from interdomain.titan.data.dataloader import PackedLoader
from interdomain.titan.data.folders import open_dataset
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

pytestmark = pytest.mark.e2e


def at_the_start(runs, name):
    """Returns the model at its initial values, and the data of a run."""
    job = read_job_config(runs.jobs[name]["args"])
    plan = make_plan(job, 1)
    model = Transformer(plan.config)
    model.init_weights(plan.seed)
    return model, open_dataset(job, "train")


@torch.no_grad()
def test_the_loss_is_what_every_document_gives_by_itself(runs):
    """It is not what it would be if states went through from one document to the next."""
    model, dataset = at_the_start(runs, "1 layers")
    apart = []
    through = []
    labels = []
    for index in range(8):
        window = torch.from_numpy(dataset[index])
        begins = (dataset.positions(index) == 0).nonzero()[0]
        documents = window[:-1].tensor_split(begins[begins > 0].tolist())
        apart += [model(document[None])[0] for document in documents]
        through += model(window[None, :-1])
        labels.append(window[1:])
    labels = torch.cat(labels)
    expected = F.cross_entropy(torch.cat(apart), labels).item()
    assert runs.log("1 layers")[1]["loss"] == pytest.approx(expected, rel=2e-6)
    assert F.cross_entropy(torch.cat(through), labels).item() != pytest.approx(expected, rel=2e-5)


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_answers(runs):
    model, dataset = at_the_start(runs, "1 answers")
    inputs, labels = next(iter(PackedLoader(dataset, 8, rank=0, ranks=1)))
    logits = model(inputs["input"])  # [B, T, V]
    expected = F.cross_entropy(logits.mT, labels, ignore_index=-100).item()
    assert runs.log("1 answers")[1]["loss"] == pytest.approx(expected, rel=2e-6)
