"""Fine-tuning: the loss and its gradients are the model's, by hand and through Trainer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .common import CASES, KINDS, random_texts


@pytest.mark.parametrize("case", CASES)
def test_gradients(loaded, case):
    model, there = loaded(case)
    model, there = copy.deepcopy(model), copy.deepcopy(there).train()
    tokens = random_texts(2, 17)
    labels = tokens.clone()
    labels[0, :5] = -100
    out = there(tokens, labels=labels)
    out.loss.backward()
    assert out.past_key_values is None
    wanted = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    wanted.backward()
    torch.testing.assert_close(out.loss, wanted)
    found = dict(there.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            found[name].grad, p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("case", KINDS)
def test_gradients_behind_padding(loaded, case):
    """Rows of unequal length, on the left or on the right, give the gradients of the rows by themselves: what the last token of
    padding predicts is no part of the loss.

    In float64, but for the loss, which transformers computes in float32.
    """
    model, there = loaded(case)
    rows = [random_texts(1, n, seed=n) for n in (5, 12)]
    model = copy.deepcopy(model).double()
    losses = [F.cross_entropy(model(row)[0, :-1], row[0, 1:], reduction="sum") for row in rows]
    (sum(losses) / 15).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for pad in ((7, 0), (0, 7)):
        tuned = copy.deepcopy(there).double().train()
        tokens = torch.cat([F.pad(rows[0], pad, value=9), rows[1]])
        mask = torch.cat([F.pad(torch.ones(1, 5), pad), torch.ones(1, 12)]).long()
        labels = tokens.masked_fill(mask == 0, -100)
        out = tuned(tokens, attention_mask=mask, labels=labels)
        out.loss.backward()
        for name, p in tuned.named_parameters():
            torch.testing.assert_close(
                p.grad, wanted[name], rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
def test_torch_compile(loaded, case):
    """Trainer(torch_compile=True) on a batch that the folder's tokenizer pads on the left."""
    torch._dynamo.reset()
    _, there = loaded(case)
    plain = copy.deepcopy(there).double().train()
    tokens = random_texts(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[5], [0]])).long()
    gradients = []
    for model in (plain, torch.compile(plain, backend="aot_eager")):
        plain.zero_grad()
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in plain.named_parameters()})
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], wanted, rtol=1e-6, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_the_base_model_has_no_head(loaded):
    """TRL's trainers ask it for hidden states, and apply the head themselves, with labels of a few tokens."""
    _, there = loaded("interdomain")
    there = copy.deepcopy(there).train()
    there.gradient_checkpointing_enable()
    tokens = random_texts(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[5], [0]])).long()
    there.register_forward_pre_hook(lambda *_: pytest.fail("a hook of the whole model"))
    there.forward = None  # as somebody's wrapper, which calls the base model
    base = there.get_decoder()
    out = base(tokens, attention_mask=mask, use_cache=False)
    assert out.last_hidden_state.shape == (2, 12, there.config.hidden_size)
    assert torch.equal(base(tokens, attention_mask=mask, return_dict=False)[0], out.last_hidden_state)
    wanted = type(there).forward(there, tokens, attention_mask=mask).logits
    assert torch.equal(there.output(out.last_hidden_state), wanted)
    out.last_hidden_state.sum().backward()
    assert {name for name, p in there.named_parameters() if p.grad is None} == {"output.weight"}
    assert set(dict(base.named_parameters())) == set(dict(there.named_parameters())) - {"output.weight"}
    there.layers["0"].attention.wo = nn.Sequential(there.layers["0"].attention.wo, nn.Dropout(1.0))
    assert not torch.equal(there.base_model(tokens).last_hidden_state, out.last_hidden_state)


def test_replicas_compute_with_their_own_modules(loaded):
    """nn.DataParallel's, whose modules lie on other devices."""
    _, there = loaded("interdomain")
    replica = there._replicate_for_data_parallel()
    replica._modules["output"] = nn.Identity()
    assert replica(random_texts(1, 5)).logits.shape[-1] == there.config.hidden_size
    assert there(random_texts(1, 5)).logits.shape[-1] == there.config.vocab_size


def test_trainer(tmp_path, loaded, exported):
    """A few steps: the loss falls, and what it saves is a folder that loads, with other weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, of the extra `eval`")
    pytest.importorskip("datasets", reason="Trainer needs a datasets of its own age, or none", exc_type=ImportError)
    _, there = loaded("interdomain")
    tuned = copy.deepcopy(there)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in random_texts(8, 16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=12,
        logging_steps=1,
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
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoint-12", trust_remote_code=True
    )
    assert not torch.equal(saved.output.weight, there.output.weight)
    assert all(torch.equal(saved.state_dict()[name], tensor) for name, tensor in tuned.state_dict().items())


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_(enable|disable). is deprecated")
@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("options", [None, dict(use_reentrant=True)], ids=str)
def test_gradient_checkpointing(loaded, case, options):
    """Layers are computed twice, with the same gradients, also behind padding, and of the dynamics."""
    _, there = loaded(case)
    there = copy.deepcopy(there).double().train()
    tokens = random_texts(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[5], [0]])).long()
    calls = []
    there.layers["1"].feed_forward.w1.register_forward_pre_hook(lambda *_: calls.append(1))
    found = []
    for again in (False, True):
        if again:
            there.gradient_checkpointing_enable(options)
        there.zero_grad()
        out = there(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
        out.loss.backward()
        found.append({name: p.grad for name, p in there.named_parameters()})
    assert len(calls) == 1 + 2
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, msg=lambda m, name=name: f"{name}: {m}")
    with pytest.raises(ValueError, match="computes layers again, from no state: leave out use_cache"):
        there(tokens, use_cache=True)
    assert not any("forward" in vars(layer) for layer in there.layers.values())
    there.generate(tokens, max_new_tokens=2, do_sample=False)  # as Trainer's evaluation does
    there.gradient_checkpointing_disable()
    there(tokens).logits.sum().backward()
    assert len(calls) == 3 + 2 + 1
