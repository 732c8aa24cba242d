"""Removed features of earlier versions, and what to do instead. Standard library only.

No other file has a removed name. A name is that of a command, of an option of `./launch.sh` (with
its dashes), of an option of another command (after the command's name), of a setting or module
(with a dot), or of a value (SETTING = VALUE). CHANGELOG.md has the same sentences.
"""

NO_SPIKES = (
    "A step that is not finite is skipped as before. To leave a stretch of data, go back with `--checkpoint.load_step` and "
    "another `--debug.seed`."
)
NO_STORES = (
    "Copy checkpoints with `aws s3 sync` or `rclone` after each save, as docs/clusters.md shows."
)
NO_ESTIMATES = "Nothing takes its place: speed was computed from datasheets, and never measured."
NO_ASYNC_TENSOR_PARALLEL = (
    "Leave it out: it was never run, because it needs GPUs that read each other's memory."
)
NO_ZERO_BUBBLE = "Choose 1F1B, GPipe or Interleaved1F1B."
REMOVED = {
    "--best": NO_ESTIMATES,
    "--device": NO_ESTIMATES,
    "--gpus-per-node": NO_ESTIMATES,
    "--network": NO_ESTIMATES,
    "--rewind": NO_SPIKES,
    "bench-kernels --mixers sdpa-default": "Use `sdpa-cudnn` and `sdpa-flash`, which PyTorch chooses from.",
    "bench-kernels --rounds": "Leave it out: calls are timed for a second, and at most 20 of them.",
    "bench-serving": "Use `vllm bench serve`, which measures any server.",
    "bench-training --device": "Set CUDA_VISIBLE_DEVICES to choose a GPU.",
    "bench-training --trace": "Start a short run with `--profiling.enable_profiling`, TorchTitan's own profiler.",
    "checkpoint.copy_to": NO_STORES,
    "checkpoint.copy_wait_seconds": NO_STORES,
    "compare-runs --save-curve": "Keep the run's folder of TensorBoard events, which `compare-runs` reads.",
    "data.leave_out": NO_SPIKES,
    "data.stages": (
        "Resume with another `data.corpus` or `data.weights`. For another length or batch, start a second run with "
        "`checkpoint.initial_load_path`."
    ),
    "generate --no-graph": "Leave it out: on a GPU a CUDA graph decodes the same tokens.",
    "generate --prefill-chunk": "Leave it out: prompts are read 2,048 tokens at a time.",
    "inspect-model --text-file": 'Use `--text "$(cat FILE)"`.',
    "interdomain.megatron.train": (
        "Start Megatron-LM's own script by `python -m interdomain.megatron.run`, or write a loop as docs/megatron.md describes."
    ),
    "lr_scheduler.allow_jump": (
        "Leave it out: a resume takes the learning rate of its own schedule, and a warning names the settings that changed."
    ),
    "metrics.notify": "Let the scheduler write to you: `#SBATCH --mail-type=END,FAIL,REQUEUE`.",
    "metrics.samples": "Convert a checkpoint of the run, and use `interdomain generate` and `interdomain inspect-model`.",
    "parallelism.enable_async_tensor_parallel": NO_ASYNC_TENSOR_PARALLEL,
    "parallelism.pipeline_parallel_schedule = InterleavedZeroBubble": NO_ZERO_BUBBLE,
    "parallelism.pipeline_parallel_schedule = ZBVZeroBubble": NO_ZERO_BUBBLE,
    "prepare-data --skip-bad": "Use `--leave-out-bad`: it has no limit, and names each document on standard error.",
    "prepare-data --synthetic phonebook": (
        "Use `--synthetic mqar`. `interdomain evaluate --tasks phonebook_16` has the paper's own phone book."
    ),
    "release": "Convert each run with `interdomain convert`, and publish the exported models with `hf upload`.",
    "tokens_per_parameter": "Give each size of a study its `training.tokens`.",
    "training.max_spikes": NO_SPIKES,
    "training.spike_deviations": NO_SPIKES,
    "training.reduce_gradients = auto": "Leave it out for `step`, the default; or set `micro-batch`, which needs less memory "
    "and more network.",
    "watch --exports": "Convert the milestone with `interdomain convert`.",
    "watch --name": "For other options convert a milestone, and give `interdomain evaluate` the folder.",
}


def removal_of(name: str) -> str | None:
    """Returns the error message for a removed name.

    Args:
        name: A key of REMOVED; a setting may be written as a flag.
    Returns:
        The message, or None if the name was not removed.
    """
    if "." in name:
        name = name.removeprefix("--").replace("-", "_")
    if name not in REMOVED:
        return None
    return f"{name} was removed. {REMOVED[name]}"
