"""States on disk: the same future, with the model they belong to and no other."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from interdomain.model.generation import Sampling, continuation, read
from interdomain.model.saved_state import load_state, save_state

from .common import lively, small_config, variant

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]


def texts(model, logits, state):
    return list(continuation(model, logits, state, max_tokens=12, sampling=Sampling(temperature=0)))


@pytest.mark.parametrize(("condition", "option"), [("interdomain", "all"), ("s4d", "plain"), ("softmax", "plain")])
def test_the_same_future(tmp_path, condition, option):
    model = variant(condition, option)
    logits, state = read(model, PROMPTS, chunk=3)
    size = save_state(tmp_path / "state", model, state, logits, PROMPTS)
    assert size == (tmp_path / "state").stat().st_size
    saved = load_state(tmp_path / "state", model)
    assert saved.tokens == PROMPTS
    assert torch.equal(saved.logits, logits)
    assert texts(model, saved.logits, saved.state) == texts(model, logits, state)


def test_in_another_precision(tmp_path):
    """The same model goes on, where one of the two is not rounded; between two roundings nothing can be told."""
    bf16, fp16, full = torch.bfloat16, torch.float16, torch.float32
    models = {dtype: lively(small_config("softmax"), full).to(dtype) for dtype in (bf16, fp16, full)}
    for first, second in ((full, bf16), (fp16, full)):
        logits, state = read(models[first], PROMPTS)
        save_state(tmp_path / "state", models[first], state, logits, PROMPTS)
        saved = load_state(tmp_path / "state", models[second])
        assert saved.state.layers[0].k.dtype == second
        assert len(texts(models[second], saved.logits, saved.state)) == 12
        (tmp_path / "state").rename(tmp_path / "last")
    with pytest.raises(ValueError, match="the same in another half precision"):
        load_state(tmp_path / "last", models[bf16])


def test_another_model_is_refused(tmp_path):
    model = variant("interdomain")
    logits, state = read(model, PROMPTS)
    save_state(tmp_path / "state", model, state, logits, PROMPTS)
    changed = variant("interdomain")
    with torch.no_grad():
        changed.layers["1"].attention.ssm.log_dt[0] += 0.1
    for other in (changed, lively(small_config("interdomain"), seed=1), variant("s4d"), variant("interdomain", "real")):
        with pytest.raises(ValueError, match="saved by another model"):
            load_state(tmp_path / "state", other)
    with pytest.raises(ValueError, match=r"has seen \[8, 3\] tokens, but \[8, 2\] are given"):
        save_state(tmp_path / "other", model, state, logits, [PROMPTS[0], PROMPTS[1][:2]])
    with pytest.raises(ValueError, match="is not UTF-8: safetensors cannot open it"):
        save_state(tmp_path / "\udce9", model, state, logits, PROMPTS)
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def rewrite(path, tensors=None, **changes):
    """The file with other metadata, or other tensors."""
    with safe_open(path, framework="pt") as f:
        metadata = f.metadata()
    save_file(load_file(path) | (tensors or {}), path, metadata | changes)


DAMAGE = {
    "missing": (lambda p: p.unlink(), "no state"),
    "no state": (lambda p: save_file({"x": torch.zeros(1)}, p), "not a saved state"),
    "no safetensors": (lambda p: p.write_bytes(b"PK\x03\x04 a pickle"), "truncated or damaged"),
    "newer": (lambda p: rewrite(p, version="3"), "format version 3"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "truncated or damaged"),
    "other tensors": (lambda p: rewrite(p, dict(logits=torch.zeros(3))), "truncated or damaged"),
    "a list": (lambda p: rewrite(p, about="[1]"), "truncated or damaged"),
}


def test_a_damaged_state_is_refused(tmp_path):
    model = variant("softmax")
    logits, state = read(model, PROMPTS[:1])
    for name, (break_it, words) in DAMAGE.items():
        save_state(tmp_path / name, model, state, logits, PROMPTS[:1])
        break_it(tmp_path / name)
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            load_state(tmp_path / name, model)
