"""What TensorBoard's tab "Custom Scalars" shows: a run's health on one page. A line's name is a pattern of tags."""

TOKENS = "tokens"  # the subfolder of curves whose step is the number of tokens

BY_TOKENS = {  # tag -> its name there
    "loss_metrics/global_avg_loss": "by_tokens/loss",
    "loss_metrics/perplexity": "by_tokens/perplexity",
    "validation_metrics/loss": "by_tokens/validation_loss",
    "validation_metrics/perplexity": "by_tokens/validation_perplexity",
}


def _lines(*patterns: str):
    return ["Multiline", [f"{pattern}$" for pattern in patterns]]  # TensorBoard matches from the start only


def _by_layer(sign: str):
    return _lines(rf"mixer/layer_\d+/{sign}")


LAYOUT = {
    "Learning": {
        "Loss": _lines("loss_metrics/global_avg_loss", "validation_metrics/loss"),
        "Loss by tokens": _lines("by_tokens/loss", "by_tokens/validation_loss"),
        "Perplexity by tokens": _lines("by_tokens/perplexity", "by_tokens/validation_perplexity"),
        "Gradient norm, before clipping": _lines("grad_norm"),
        "Gradient norm by parameter group": _lines(r"grad_norm/\w+"),
        "Learning rate": _lines(r"lr/\w+"),
    },
    "Trouble": {
        "Rise of the loss (standard deviations of its usual change)": _lines("loss_metrics/spike"),
        "Loss: worst rank and mean": _lines("loss_metrics/global_max_loss", "loss_metrics/global_avg_loss"),
        "Steps skipped": _lines("skipped_steps"),
        "Allocation retries, out-of-memory errors": _lines("memory/num_alloc_retries", "memory/num_ooms"),
    },
    "Machine": {
        "Tokens per second, all ranks": _lines(r"throughput/all_ranks\(tps\)"),
        "Model FLOPs utilisation (%)": _lines(r"mfu\(%\)"),
        "Memory, peak since the last log (GiB)": _lines(r"memory/max_active\(GiB\)", r"memory/max_reserved\(GiB\)"),
        "Waiting for data (% of the time)": _lines(r"time_metrics/data_loading\(%\)"),
        "Seconds per step": _lines(r"time_metrics/end_to_end\(s\)"),
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
