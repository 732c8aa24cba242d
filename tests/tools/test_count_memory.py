"""count_memory: what it adds up, the project's targets by its count, and, on a GPU, the allocator's own figure beside it."""

import sys

import pytest
import torch

from interdomain.model import Transformer, build_config, count_parameters, meta_model
from interdomain.model.flops import memory_estimate
from interdomain.scan import interdomain_scan
from interdomain.tools import count_memory
from interdomain.tools.bench_inference import model_bytes, prefill_figures, random_model
from interdomain.tools.count_memory import META, LiveBytes, prefill_bytes, training_bytes, without_gpu

pytest.importorskip("triton", reason="the kernels' launch code")
CHUNK = 2048


def bytes_of(size, condition, batch, length, chunk=CHUNK):
    return prefill_bytes(build_config(size, condition), batch, length, chunk)


def test_what_lives_is_added_up_and_what_does_not_is_taken_off():
    weight = torch.empty(1000, device=META)
    with LiveBytes() as count:
        x = torch.empty(1000, device=META)  # 4,000 bytes in blocks of 512
        assert (count.live, count.peak) == (4096, 4096)
        part = x[10:].view(3, -1).mT
        x.mul_(2)
        weight.view(2, 500)
        torch.empty(1000, device="cpu")
        assert (count.live, count.peak) == (4096, 4096)
        y = x + weight
        assert (count.live, count.peak) == (8192, 8192)
        del x, y
        assert count.live == 4096  # `part` keeps all of x
        del part
        again = torch.empty(1, device=META)
    assert (count.live, count.peak) == (512, 8192)
    del again
    assert count.live == 0


def test_what_an_op_allocates_inside_is_counted():
    B, T, H, D, M = 1, 64, 2, 32, 16
    q, k, v = (torch.empty(B, T, H, D, dtype=torch.bfloat16, device=META) for _ in "qkv")
    log_decay, mixing = torch.empty(H, M, 2, device=META), torch.empty(H, 2 * M, 2 * M, device=META)
    with without_gpu(), LiveBytes() as count:
        assert q.device.type == "cuda"
        out = interdomain_scan(q, k, v, log_decay, mixing)
    assert count.live == sum(x.untyped_storage().nbytes() for x in out)
    scores = 2 * B * H * T * 2 * M  # a, in bf16
    assert count.peak >= count.live + scores
    assert q.device == META


@pytest.mark.parametrize(("batch", "length"), [(8, 4096), (64, 512)])
def test_reading_a_prompt_takes_no_more_than_softmax_takes(batch, length):
    ours, softmax = (bytes_of("1.3B", condition, batch, length) for condition in ("interdomain", "softmax"))
    assert ours <= softmax


def test_a_longer_prompt_takes_no_more():
    short, long = (bytes_of("1.3B", "interdomain", 1, length) for length in (2 * CHUNK, 5 * CHUNK + 7))
    assert short == long <= 5 * 2**30


def test_at_the_peak_nothing_lives_that_is_not_needed():
    """Weights, state and its tables, and of one piece three activations of the model's width, three of the feed-forward's."""
    config = build_config("1.3B")
    B, heads, N = 8, config.n_layers * config.n_kv_heads, 2 * config.mixer.n_basis
    model = meta_model(config).to(torch.bfloat16)
    with without_gpu():
        state = model.init_state(B).nbytes()
    tables = 4 * heads * (N * N + N // 2 * N)  # W, and the half of it that a step reads
    angles = 2 * 4 * config.head_dim // 2
    piece = B * CHUNK * (2 * 3 * (config.dim + config.ffn_hidden) + angles)
    wanted = model_bytes(model) + state + tables + piece
    assert wanted <= bytes_of("1.3B", "interdomain", B, 2 * CHUNK) <= 1.002 * wanted


@pytest.mark.parametrize("condition", ["interdomain", "softmax", "s4d"])
@pytest.mark.parametrize(
    ("checkpointing", "size", "batch", "length", "precision"),
    [
        ("none", "1.3B", 2, 2048, "bf16-products"),
        ("selective", "125M", 8, 4096, "bf16"),
        ("full", "debug", 8, 256, "float32"),
    ],
)
def test_the_dry_run_estimates_what_a_training_step_takes(condition, checkpointing, size, batch, length, precision):
    config, settings = build_config(size, condition), dict(checkpointing=checkpointing, precision=precision)
    counted = training_bytes(config, batch, length, **settings)
    n_params = count_parameters(meta_model(config))
    parts = memory_estimate(config, n_params, shards=1, local_batch=batch, seq_len=length, **settings)
    assert parts["activations"] + parts["loss"] == pytest.approx(counted, rel=0.05)


def test_the_tables(capsys, monkeypatch):
    monkeypatch.setattr(count_memory, "PREFILL_CHUNK", 32)
    assert count_memory.main(["--size", "debug", "--conditions", "s4d", "--prompts", "2x64", "1x96"]) == 0
    figures = [f"{bytes_of('debug', 's4d', 2, 64, chunk) / 2**30:.2f}" for chunk in (64, 32)]
    assert capsys.readouterr().out.splitlines()[-2] == f"| 2x64 | {' | '.join(figures)} |"
    assert count_memory.main(["--training", "--size", "debug", "--conditions", "s4d", "--prompts", "2x64"]) == 0
    counted = training_bytes(build_config("debug", "s4d"), 2, 64, "none") / 2**30
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"| 2x64 | {counted:.2f} (")
    assert count_memory.main(["--prompts", "0x4"]) == 2
    assert "'0x4' is no BxT" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "interdomain.scan.triton_launch", None)
    assert count_memory.main([]) == 2
    assert "Triton is not installed" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_as_measured_on_a_gpu(condition):
    config, device = build_config("125M", condition), torch.device("cuda", 0)
    model: Transformer = random_model(config, device, torch.bfloat16)
    measured = prefill_figures(model, 8, 2 * CHUNK, CHUNK, device)["GiB"]
    assert prefill_bytes(config, 8, 2 * CHUNK, CHUNK) / 2**30 == pytest.approx(measured, rel=0.05)
