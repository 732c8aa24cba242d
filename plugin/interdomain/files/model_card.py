"""README.md of an exported folder: a model card as the Hugging Face hub reads it, of what the run recorded."""

from pathlib import Path

from torch import nn

from interdomain.model import ModelConfig, count_parameters, meta_model

CARD = """---
{license}library_name: transformers
pipeline_tag: text-generation
tags:
- interdomain-attention
- {tag}
---

# Interdomain Attention, {size}, {condition}

A decoder of the study in *Interdomain Attention: Beyond Token-Level Key-Value Memory* (2026).

| | |
|---|---|
{facts}

## Use

Needs Python 3.11, torch 2.11 and transformers 4.57 or later, and nothing else. The code is in this folder,
five files of plain PyTorch: read it before you trust it. With the package `interdomain` installed it runs that package's
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

- `AutoModel` and `AutoModelForSequenceClassification` load it as well. The tokenizer runs no code of this folder; with
  `trust_remote_code` left out, transformers 5 asks all the same.
- Padding may stand on either side, also within a later turn of a chat; `generate` needs the mask, as here.
- A text that goes on: `generate(..., return_dict_in_generate=True)` returns `past_key_values`; give it back with the longer
  text, and only what is new is read. `copy.deepcopy` it to continue in several ways.
- A prompt of many thousand tokens takes less memory with `generate(..., prefill_chunk_size=2048)`.
- The tokenizer takes the names of control tokens for text, as in training: an end-of-text token written into a text or a chat
  template is a few ordinary pieces, and a model tuned on them never ends. For chat templates and fine-tuning load it with
  `split_special_tokens=False`.
- Fine-tuning works through `Trainer` and what builds on it, with gradient checkpointing, `torch.compile`, FSDP and added
  tokens. Not supported: assisted generation, attention matrices, packed sequences.
- LoRA by PEFT: `LoraConfig(target_modules=[{linears}])`, or `"all-linear"`.
- lm-evaluation-harness:
  `lm_eval --model hf --model_args pretrained=path/to/this/folder,trust_remote_code=True{evaluated} --tasks lambada_openai`

## Licence

The code in this folder is under Apache-2.0 (`LICENSE`). {weights}

## Limits

A base model of a study: trained to predict text, not to follow instructions and not to be safe. It repeats what its data said,
and is often wrong. Its sequences were {seq_len} tokens long in training; quality beyond that is for you to measure.
"""

NO_TOKENIZER = """
transformers has no exact counterpart of this folder's tokenizer, `{file}`, and `AutoTokenizer` refuses the folder: below,
encode and decode with the library that made the file, or with `interdomain.data.load_tokenizer(folder)`.
"""


def write_card(folder: Path, config: ModelConfig, dtype: str, tokenizer, facts: dict, license: str | None) -> None:
    """README.md. license: of the weights, an identifier of the Hugging Face hub, or None."""
    run, validation, eos = facts["run"], facts["validation"], tokenizer.eos_id is not None
    rows = {
        "parameters": f"{count_parameters(meta_model(config)):,}",
        "stored as": f"{dtype} (parameters of a recurrence: float32)",
        "vocabulary": f"{config.vocab_size:,} ({tokenizer.vocab_size:,} in use)",
        "tokens trained on": "not recorded" if facts["tokens"] is None else f"{facts['tokens']:,}",
        "step": f"{facts['step']} of {run.get('planned_steps', 'an unknown number')}",
        "tokens per sequence": f"{run.get('seq_len', config.max_seq_len):,}",
        "data (fingerprint)": run.get("data_fingerprint", "not recorded"),
        "validation perplexity": f"{validation['perplexity']:.3f}" if validation else "not recorded",
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }
    if not run.get("settings_recorded", True):
        rows["Megatron's settings"] = "not recorded: the run's logits may differ from this folder's"
    linears = {
        name.rpartition(".")[2]
        for name, module in meta_model(config).layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    text = CARD.format(
        license=f"license: {license}\n" if license else "",
        weights=f"The weights are under {license}." if license else "No licence of the weights was given.",
        linears=", ".join(f'"{name}"' for name in sorted(linears)),
        size=facts["size"],
        condition=facts["condition"],
        tag=facts["condition"].partition(",")[0],
        facts="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        tokenizer="" if (folder / "tokenizer.json").is_file() else NO_TOKENIZER.format(file=tokenizer.file),
        dtype=dtype,
        start="# Every text of the training data followed an end-of-text token: begin with one." if eos else "",
        first="[tokenizer.eos_token_id] + " if eos else "",
        evaluated=f",prefix_token_id={tokenizer.eos_id}" if eos else "",
        seq_len=rows["tokens per sequence"],
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
