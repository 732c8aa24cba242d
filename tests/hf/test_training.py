"""Fine-tuning: by hand, compiled, with checkpointing, sharded layer by layer, and through Trainer."""

import copy
import importlib
import socket

import pytest
import torch
from torch.nn import functional as F

from .common import CASES, KINDS, code_of, padded, random_texts


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_behind_padding(loaded, case, side):
    """Rows of unequal length give the gradients of single rows: padding and what it predicts have no part in the loss.

    In float64, but for the loss, which transformers computes in float32.
    """
    native, there = (copy.deepcopy(model).double() for model in loaded(case))
    rows = [random_texts(1, n, seed=n) for n in (5, 12)]
    losses = [F.cross_entropy(native(row)[0, :-1], row[0, 1:], reduction="sum") for row in rows]
    (sum(losses) / 15).backward()
    tokens, mask = padded(rows, side)
    out = there.train()(tokens, attention_mask=mask, labels=tokens)
    torch.testing.assert_close(out.loss.double(), sum(losses) / 15, rtol=1e-6, atol=1e-6)
    assert out.past_key_values is None
    labels = tokens.masked_fill(mask == 0, -100)  # as a collator makes them, and counted as Trainer does
    counted = there(tokens, attention_mask=mask, labels=labels, num_items_in_batch=(labels[:, 1:] != -100).sum())
    torch.testing.assert_close(counted.loss, out.loss)
    out.loss.backward()
    wanted = {name: p.grad for name, p in native.named_parameters()}
    for name, p in there.named_parameters():
        found = wanted[name.removeprefix("model.")]
        torch.testing.assert_close(p.grad, found, rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def backward(model, forward, **inputs):
    model.zero_grad()
    out = forward(**inputs)
    out.loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def batch(longest=12):
    tokens, mask = padded([random_texts(1, 7), random_texts(1, longest, seed=2)], "left")
    return dict(input_ids=tokens, attention_mask=mask, labels=tokens)


def test_torch_compile(loaded, monkeypatch):
    """One graph, with gradients on a left-padded batch of two chunks, in plain PyTorch; in evaluation, for there is then a
    cache, too."""
    torch._dynamo.reset()
    there = copy.deepcopy(loaded("interdomain")[1]).double()
    del there.model.layers[1:]
    monkeypatch.setattr(code_of(there, "scan"), "input_features", None)
    wanted = backward(there, there, **batch(70))
    found = backward(there, torch.compile(there, backend="aot_eager", fullgraph=True), **batch(70))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-10, msg=name)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(enable|disable). is deprecated")
@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("options", [None, dict(use_reentrant=True)], ids=str)
@pytest.mark.parametrize("case", KINDS)
def test_gradient_checkpointing(loaded, case, options):
    """Layers are computed twice, with the same gradients, also behind padding, and of the dynamics."""
    there = copy.deepcopy(loaded(case)[1]).double().train()
    calls = []
    there.model.layers[1].feed_forward.w1.register_forward_hook(lambda *_: calls.append(1))
    wanted = backward(there, there, **batch())
    there.gradient_checkpointing_enable(options)
    found = backward(there, there, **batch())
    assert len(calls) == 1 + 2
    with pytest.raises(ValueError, match="gradient checkpointing reads"):
        there(random_texts(2, 9), past_key_values=copy.deepcopy(there).eval()(random_texts(2, 9)).past_key_values)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    text = there.eval().generate(random_texts(2, 9), max_new_tokens=2, do_sample=False)  # as Trainer evaluates
    assert text.shape == (2, 11)


@pytest.mark.parametrize("case", ["interdomain", "s4d", "softmax"])
def test_fsdp2_layer_by_layer(loaded, case):
    """A layer's parameters, the dynamics too, are used in that layer's forward pass alone; a wrapper finds layers by name."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    there = copy.deepcopy(loaded(case)[1]).train()
    wanted = backward(there, there, **batch())
    there.zero_grad()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        layers = [m for m in there.modules() if type(m).__name__ in there._no_split_modules]
        assert len(layers) == there.config.num_hidden_layers
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(there, mesh=mesh)
        for name, gradient in backward(there, there, **batch()).items():
            torch.testing.assert_close(gradient.full_tensor(), wanted[name], msg=name)
    finally:
        dist.destroy_process_group()


def test_classification(exported):
    """The head reads each row's last token, on whichever side the padding is."""
    transformers = pytest.importorskip("transformers")
    native, folder = exported("interdomain")
    torch.manual_seed(0)
    there = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, num_labels=3
    )
    rows = [random_texts(1, 5), random_texts(1, 12, seed=2)]
    single = torch.cat([there(row).logits for row in rows])
    for side in ("left", "right"):
        tokens, kept = padded(rows, side, value=there.config.pad_token_id)
        out = there(tokens, attention_mask=kept, labels=torch.tensor([0, 2]))
        torch.testing.assert_close(out.logits, single, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.loss, F.cross_entropy(single, torch.tensor([0, 2])))
    assert torch.equal(there.model.norm.weight, native.norm.weight)


def test_trainer(tmp_path, loaded):
    """A few steps: the loss falls, and what it saves is a folder that loads, with other weights."""
    transformers = importlib.import_module("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, of the extra `eval`")
    pytest.importorskip("datasets", reason="Trainer needs a datasets of its own age, or none", exc_type=ImportError)
    _, there = loaded("interdomain")
    tuned = copy.deepcopy(there)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in random_texts(8, 16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        save_steps=12,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        eval_strategy="steps",
        eval_steps=6,
    )
    trainer = transformers.Trainer(model=tuned, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 6
    arguments.label_smoothing_factor = 1e-9  # nearly none: the loss of the same labels
    given = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    smoothed = transformers.Trainer(model=tuned, args=arguments, eval_dataset=rows).compute_loss(tuned, dict(given))
    torch.testing.assert_close(smoothed, tuned(**given).loss)
    folder = tmp_path / "run" / "checkpoint-12"
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not torch.equal(saved.output.weight, there.output.weight)
    assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in tuned.state_dict().items())
