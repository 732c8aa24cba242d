"""What TensorBoard's tab "Custom Scalars" shows: a run's health on one page. A line's name is a pattern of tags."""

TOKENS = "tokens"  # the subfolder of curves whose step is the number of tokens

BY_TOKENS = {  # tag -> its name there
    "loss_metrics/global_avg_loss": "by_tokens/loss",
    "loss_metrics/perplexity": "by_tokens/perplexity",
    "validation_metrics/loss": "by_tokens/validation_loss",
    "validation_metrics/perplexity": "by_tokens/validation_perplexity",
}

# TorchTitan's tags -> ours: the custom scalars' charts stay empty where a tag has parentheses.
RENAMED = {
    "mfu(%)": "machine/mfu_percent",
    "memory/max_active(GiB)": "machine/memory_active_gib",
    "memory/max_reserved(GiB)": "machine/memory_reserved_gib",
    "time_metrics/end_to_end(s)": "machine/seconds_per_step",
}


def _lines(*patterns: str):
    return ["Multiline", [f"{pattern}$" for pattern in patterns]]  # TensorBoard matches from the start only


def _by_layer(sign: str):
    return _lines(rf"mixer/layer_\d+/{sign}")


LAYOUT = {
    "Learning": {
        "Loss: training, validation": _lines("loss_metrics/global_avg_loss", "validation_metrics/loss"),
        "Loss by tokens": _lines("by_tokens/loss", "by_tokens/validation_loss"),
        "Perplexity by tokens": _lines("by_tokens/perplexity", "by_tokens/validation_perplexity"),
        "Validation loss": _lines("validation_metrics/loss"),
        "Gradient norm, before clipping": _lines("grad_norm"),
        "Learning rates": _lines(r"lr/\w+"),
        "Rise of the loss, in standard deviations": _lines("loss_metrics/spike"),
        "Loss: mean and worst rank": _lines("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss"),
        "Steps skipped": _lines(r"skipped_steps/\w+"),
    },
    "Machine": {
        "Tokens per second, all ranks": _lines("machine/tokens_per_second"),
        "Model FLOPs utilisation (%)": _lines("machine/mfu_percent"),
        "Memory, peak since the last log (GiB)": _lines(r"machine/memory_\w+_gib"),
        "Waiting for data, slowest rank (% of the time)": _lines("machine/data_wait_percent"),
        "Seconds per step": _lines("machine/seconds_per_step"),
        "Allocation retries, out of memory": _lines("memory/num_alloc_retries", "memory/num_ooms"),
    },
    # One chart each: TensorBoard gives all lines of a run in a chart the same colour.
    "Gradient norm by parameter group": {
        "All": _lines("grad_norm"),
        "Dynamics": _lines("grad_norm/dynamics"),
        "Mixer: projections, convolutions, norms": _lines("grad_norm/mixer"),
        "Feed-forward": _lines("grad_norm/feed_forward"),
        "Embedding and head": _lines("grad_norm/embeddings"),
        "Norms of blocks": _lines("grad_norm/norms"),
    },
    "Mixer by layer": {
        "Longest timescale (tokens)": _by_layer("timescale_tokens_max"),
        "Median timescale (tokens)": _by_layer("timescale_tokens_median"),
        "Smallest 1 - |Lambda|": _by_layer("one_minus_abs_lambda_min"),
        "Median Delta": _by_layer("dt_q50"),
        "Aliased modes (fraction)": _by_layer("aliased_fraction"),
        "Readout RMS": _by_layer("readout_rms"),
    },
}
