"""Samples at validations: the same on every topology, and a run that is not changed by them."""

import io

import numpy as np
import pytest
from PIL import Image

from interdomain.data import load_tokenizer
from interdomain.titan.data.folders import open_dataset
from interdomain.titan.settings.job_config import read_job_config
from interdomain.tools._curves import curves_of, read_events

from .runs import assert_same_tensors

pytestmark = pytest.mark.e2e


def samples(runs, name):
    """{step: (text, pixels of the maps)}."""
    events = read_events(runs.at(name) / "tb")
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text/text_summary")}
    images = {e.step: np.array(Image.open(io.BytesIO(e.encoded_image_string))) for e in events.Images("samples/maps")}
    assert texts.keys() == images.keys() == curves_of(events)["validation_metrics/loss"].keys()
    return {step: (text, images[step].astype(int)) for step, text in texts.items()}


@pytest.mark.parametrize("name", ["2 context layers", "2 zbv layers", "4 tensor pipeline layers"])
def test_every_topology_has_the_samples_of_one_rank(runs, name):
    reference, seen = samples(runs, "1 layers"), samples(runs, name)
    for step in seen.keys() & reference.keys():
        (text, maps), (expected, pixels) = seen[step], reference[step]
        assert text == expected
        assert maps.shape == pixels.shape
        assert (abs(maps - pixels) > 2).mean() < 0.01  # rounding, where a sign changes
    assert 1 in seen
    assert len({text for text, _ in reference.values()}) == len(reference) == 3  # it learns


def test_the_prompt_is_of_the_validation_text_and_the_weights_are_those_without_samples(runs):
    text, _ = samples(runs, "2 text sampled")[3]
    job = read_job_config(runs.jobs["2 text sampled"]["args"])
    given = load_tokenizer(job.data.corpus).decode(open_dataset(job, "validation")[0][:32].tolist())
    assert "\n".join(f"    {line}" for line in given.splitlines()) in text
    assert_same_tensors(runs.checkpoint("2 text sampled", 3), runs.checkpoint("2 text", 3))
