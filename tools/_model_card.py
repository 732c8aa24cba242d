"""README.md of an exported folder: a model card as the Hugging Face hub reads it, of what the run recorded."""

import contextlib
import json
from pathlib import Path

from interdomain.model import ModelConfig, count_parameters, meta_model
from interdomain.model.distributed_checkpoint import VALIDATION, finished_steps, step_of

from ._curves import EVENTS, FOLDER, read_curves

PERPLEXITY = "validation_metrics/perplexity"
KINDS = {
    True: "softmax attention, the baseline: its cache grows with every token read",
    False: "a recurrent state of fixed size: a token costs the same after ten tokens and after a million",
}

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags:
- interdomain-attention
- {tag}
- {state}
---

# Interdomain Attention, {size}, {condition}

A decoder of the study in *Interdomain Attention: Beyond Token-Level Key-Value Memory* (2026), with {kind}.

| | |
|---|---|
{facts}

## Use

Needs Python 3.11, torch 2.11 and transformers 4.57 or later, and nothing else. The code is in this folder,
three files of plain PyTorch: read it before you trust it. With the package `interdomain` installed it runs that package's
kernels, which are Triton on an NVIDIA GPU of compute capability 8.0 or higher.
{tokenizer}
```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.{dtype})

{start}
prompts = ["Once upon a time", "import"]
rows = [{first}tokenizer(prompt).input_ids for prompt in prompts]
inputs = tokenizer.pad({{"input_ids": rows}}, return_tensors="pt").to(model.device)
output = model.generate(**inputs, max_new_tokens=100, do_sample=True, temperature=0.8, top_p=0.95)
for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print(text)
```

- `AutoModel` and `AutoModelForSequenceClassification` load it as well. The tokenizer is one of transformers' own and runs no
  code of this folder; with `trust_remote_code` left out, transformers 5 asks all the same.
- Padding may stand on either side, also within a later turn of a chat; `generate` needs the mask, as here.
- A text that goes on: `generate(..., return_dict_in_generate=True)` returns `past_key_values`; give it back with the longer
  text, and only what is new is read. `copy.deepcopy` it to continue in several ways.
- A prompt of many thousand tokens takes less memory with `generate(..., prefill_chunk_size=2048)`.
- Whatever `dtype` is, the parameters of the recurrence stay float32.
- The tokenizer takes the names of control tokens for text, as in training: an end-of-text token written into a text or a chat
  template is a few ordinary pieces, and a model tuned on them never ends. For chat templates and fine-tuning load it with
  `split_special_tokens=False`.
- Fine-tuning works through `Trainer` and what builds on it, with gradient checkpointing, `torch.compile`, FSDP and added
  tokens. Not supported: assisted generation, attention matrices, packed sequences.
- lm-evaluation-harness:
  `lm_eval --model hf --model_args pretrained=path/to/this/folder,trust_remote_code=True{evaluated} --tasks lambada_openai`

With the project's own package (`interdomain`) installed, this folder also works in `python -m interdomain.tools.generate`.

## Limits

A base model of a study: trained to predict text, not to follow instructions and not to be safe. It repeats what its data said,
and is often wrong. Its sequences were {seq_len} tokens long in training; quality beyond that is for you to measure.
"""

NO_TOKENIZER = """
transformers has no exact counterpart of this folder's tokenizer, `{file}`, and `AutoTokenizer` refuses the folder: below,
encode and decode with the library that made the file, or with `interdomain.data.load_tokenizer(folder)`.
"""


def write_card(folder: Path, config: ModelConfig, dtype: str, tokenizer, facts: dict) -> None:
    run = facts["run"]
    rows = {
        "size": facts["size"],
        "condition": facts["condition"],
        "parameters": f"{count_parameters(meta_model(config)):,}",
        "layers x width": f"{config.n_layers} x {config.dim}",
        "stored as": f"{dtype} (the parameters of the recurrence in float32)"
        if config.mixer.kind != "softmax"
        else dtype,
        "vocabulary": f"{config.vocab_size:,} ({tokenizer.vocab_size:,} in use)",
        "tokens trained on": f"{facts['tokens']:,}",
        "step": f"{facts['step']:,}" + (f" of {run['planned_steps']:,}" if "planned_steps" in run else ""),
        "tokens per sequence": f"{run['seq_len']:,}" if "seq_len" in run else None,
        "data (fingerprint)": run.get("data_fingerprint"),
        "seed": run.get("seed"),
        "validation perplexity": "{perplexity:.3f} at step {step:,}".format(**facts["validation"])
        if facts.get("validation")
        else "not recorded",
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }
    softmax = config.mixer.kind == "softmax"
    eos = tokenizer.eos_id is not None
    text = CARD.format(
        size=facts["size"],
        condition=facts["condition"],
        tag=facts["condition"].partition(",")[0],
        kind=KINDS[softmax],
        state="attention" if softmax else "linear-attention",
        facts="\n".join(f"| {name} | {value} |" for name, value in rows.items() if value is not None),
        tokenizer="" if (folder / "tokenizer.json").is_file() else NO_TOKENIZER.format(file=tokenizer.file),
        dtype=dtype,
        start="# Every text of the training data followed an end-of-text token: begin with one." if eos else "",
        first="[tokenizer.eos_token_id] + " if eos else "",
        evaluated=f",prefix_token_id={tokenizer.eos_id}" if eos else "",
        seq_len=f"{run.get('seq_len', config.max_seq_len):,}",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def last_validation(checkpoint: Path, step: int) -> dict | None:
    """The newest validation of the run up to `step`: {"step", "perplexity"}; None where there is none to be read.

    What stands in the checkpoint itself; else what stands in those before it, or in the run's TensorBoard folder. Of a
    checkpoint that was moved or set aside (its name is not step-N), those beside it may be of another course.
    """
    checkpoint = checkpoint.resolve()
    measured = _noted({step: checkpoint})
    if not measured and step_of(checkpoint) == step:
        measured = _drawn(checkpoint.parent.parent / FOLDER) | _noted(finished_steps(checkpoint.parent))
    seen = [at for at in measured if at <= step]
    return {"step": max(seen), "perplexity": measured[max(seen)]} if seen else None


def _drawn(folder: Path) -> dict[int, float]:
    if not any(folder.glob(EVENTS)):
        return {}
    try:
        return read_curves(folder).get(PERPLEXITY, {})
    except ImportError:  # no tensorboard here
        return {}


def _noted(checkpoints: dict[int, Path]) -> dict[int, float]:
    found = {}
    for step, folder in checkpoints.items():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # not there, being removed, or damaged
            found[step] = float(json.loads((folder / VALIDATION).read_text())["perplexity"])
    return found
