"""README.md of an exported folder: a model card as the Hugging Face hub reads it, of what the run recorded."""

import json
from pathlib import Path
from typing import Any

from torch import nn

from interdomain.data import Tokenizer
from interdomain.markdown import markdown_rows
from interdomain.model import ModelConfig, count_parameters, meta_model

RECIPE = ("optimizer", "lr_scheduler", "training")  # sections of a run's configuration
RESET = "reset_state_at_documents"  # the one setting of [data] that changes what the model computes

CARD = """---
{header}
---

# Interdomain Attention, {size}, {condition}

A decoder of the study in
[*Interdomain Attention: Beyond Token-Level Key-Value Memory*](https://arxiv.org/abs/2605.24330) (2026).

| | |
|---|---|
{facts}

## Data

{corpora}

## Settings

As the run resolved them. A setting that is not named is not set.

<details>
<summary>All settings</summary>

```toml
{settings}
```

</details>

## Use

### transformers

Needs Python 3.11, torch 2.11 and transformers 4.57 or later, and nothing else. The code is in this folder,
four files of plain PyTorch: read it before you trust it. With the package `interdomain` installed it runs that package's
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

### The package `interdomain`

```bash
interdomain generate path/to/this/folder --prompt "Once upon a time"
```

`interdomain.files.pretrained.load_pretrained(folder)` returns the model and the tokenizer, for Python without transformers.
{vllm}
## Citation

Cite the paper; the code by `CITATION.cff` in its repository.

```bibtex
{bibtex}
```

## Licence

The code in this folder is under Apache-2.0 (`LICENSE`). {weights}

## Limits

A base model of a study: trained to predict text, not to follow instructions and not to be safe. It repeats what its data said,
and is often wrong. Its sequences were {seq_len} tokens long in training; quality beyond that is for you to measure.
"""

BIBTEX = """\
@article{kiyohara2026interdomain,
  title   = {Interdomain Attention: Beyond Token-Level Key-Value Memory},
  author  = {Kiyohara, Naoki and Zhu, Harrison Bo Hua and El Hassanin, Riccardo and Sun, Zhuo and
             Chen, Wenlong and Bhatt, Samir and Li, Yingzhen},
  journal = {arXiv preprint arXiv:2605.24330},
  year    = {2026}
}"""

VLLM = """
### vLLM

With `interdomain` installed beside vLLM (its extra `vllm` has the versions): `vllm serve path/to/this/folder`.
"""

NO_TOKENIZER = """
transformers has no exact counterpart of this folder's tokenizer, `{file}`, and `AutoTokenizer` refuses the folder: below,
encode and decode with the library that made the file, or with `interdomain.data.load_tokenizer(folder)`.
"""


def write_card(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    tokenizer: Tokenizer,
    facts: dict[str, Any],
    configuration: dict[str, Any],
    license: str | None,
) -> None:
    """Write README.md.

    facts: of the run, as config.json has them. configuration: of the run, empty where it is not recorded.
    license: of the weights, an identifier of the Hugging Face hub, or None.
    """
    run, validation = facts["run"], facts["validation"] or {}
    start = tokenizer.documents.start
    corpora, conditions = _corpora(run), facts["condition"].partition(",")[0].split(" + ")
    header = {
        "license": license,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": [*dict.fromkeys(name for corpus in corpora for name in corpus["datasets"])],
        "tags": ["interdomain-attention", *dict.fromkeys(conditions), *["hybrid"] * (len(config.mixers) > 1)],
    }
    in_transformers = (folder / "tokenizer.json").is_file()
    rows = {
        "parameters": f"{count_parameters(meta_model(config)):,}",
        "stored as": f"{dtype} (parameters of a recurrence: float32)",
        "vocabulary": f"{config.vocab_size:,} ({tokenizer.vocab_size:,} in use)",
        "tokens trained on": _tokens(facts),
        "step": f"{facts['step']} of {run.get('planned_steps', 'an unknown number')}",
        "tokens per sequence": f"{run.get('seq_len', config.max_seq_len):,}",
        "documents in training": _documents(tokenizer),
        "data (fingerprint)": _data(run),
        "validation loss": f"{validation['loss']:.4f} nats per token" if validation else "not recorded",
        "validation perplexity": f"{validation['perplexity']:.3f}" if validation else "not recorded",
        "versions": ", ".join(f"{name} {x}" for name, x in facts["versions"].items()) or "not recorded",
    }
    if "accuracy" in validation:
        rows["validation accuracy of answers"] = f"{validation['accuracy']:.4f}"
    if origin := _origins(run):
        rows["started from"] = origin
    linears = {
        name.rpartition(".")[2]
        for name, module in meta_model(config).layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    text = CARD.format(
        # JSON is YAML.
        header="\n".join(f"{name}: {json.dumps(value)}" for name, value in header.items() if value),
        weights=f"The weights are under {license}." if license else "No licence of the weights was given.",
        linears=", ".join(f'"{name}"' for name in sorted(linears)),
        size=facts["size"],
        condition=facts["condition"],
        facts="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        corpora=_table(corpora) if corpora else "The checkpoint does not record its corpus.",
        settings=_settings(config, configuration),
        vllm=VLLM if in_transformers else "",
        bibtex=BIBTEX,
        tokenizer="" if in_transformers else NO_TOKENIZER.format(file=tokenizer.file),
        dtype=dtype,
        start=_start(tokenizer),
        first=f"{start} + " if start else "",
        evaluated=f",prefix_token_id={start[-1]}" if start else "",
        seq_len=rows["tokens per sequence"],
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _data(run: dict[str, Any]) -> str:
    """The data's fingerprint. TorchTitan's own data sets have none: their names."""
    if fingerprint := run.get("data_fingerprint"):
        return fingerprint
    names = [corpus["name"] for corpus in run.get("corpora", ())]
    return f"{', '.join(names)} (no fingerprint)" if names else "not recorded"


def _documents(tokenizer: Tokenizer) -> str:
    """What stood around the text of a document in training."""
    documents = tokenizer.documents
    if not documents.recorded:
        return "not recorded"
    names = {tokenizer.bos_id: "BOS", tokenizer.eos_id: "EOS"}
    words = []
    for verb, tokens in (("begin", documents.begin), ("end", documents.end)):
        named = [f"{names.get(token, 'token')} ({token})" for token in tokens]
        words.append(f"{verb} with {', '.join(named) or 'their text'}")
    return ", ".join(words)


def _start(tokenizer: Tokenizer) -> str:
    """A comment on the tokens that the example puts before a text."""
    documents = tokenizer.documents
    if not documents.start:
        return ""
    if documents.recorded:
        return f"# In training {documents.start} stood before the text of a document: begin with it."
    return (
        f"# How documents began in training is not recorded. {documents.start} is what prepare-data puts between them."
    )


def _corpora(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The corpora of a run in the order in which it read them, each with `begins`, the step after which it was read."""
    corpora, begins = [], 0
    for data in [*run.get("earlier_data", []), run]:
        corpora += [corpus | {"begins": begins} for corpus in data.get("corpora", ())]
        begins = data.get("ends")
    return corpora


def _table(corpora: list[dict[str, Any]]) -> str:
    rows: list[list[Any]] = [["corpus", "from step", "share of the samples", "its training tokens", "made of"]]
    for corpus in corpora:
        made_of = "; ".join(corpus["sources"]) or "not recorded"
        rows.append([corpus["name"], corpus["begins"], corpus["share"], _tokens(corpus), made_of])
    return "\n".join(markdown_rows(rows))


def _tokens(facts: dict[str, Any]) -> str:
    return "not recorded" if facts["tokens"] is None else f"{facts['tokens']:,}"


def _origins(run: dict[str, Any]) -> str:
    """Models whose weights the run began with, the latest first; not those that `convert` made and nobody trained."""
    words = []
    while origin := run.get("started_from"):
        if origin["step"]:
            name = f"{origin['size']}, {origin['condition']}"
            words.append(f"{name}: step {origin['step']}, tokens: {_tokens(origin)}")
        run = origin["run"]
    return "; before that ".join(words)


def _settings(config: ModelConfig, configuration: dict[str, Any]) -> str:
    """TOML of the model's settings and of the run's recipe."""
    model = config.to_dict()
    mixers = model.pop("mixer")
    tables = [("[model]", model)]
    tables += [("[[mixer]]", mixer) for mixer in mixers] if isinstance(mixers, list) else [("[mixer]", mixers)]
    tables += [(f"[{name}]", configuration[name]) for name in RECIPE if name in configuration]
    if RESET in configuration.get("data", {}):
        tables.append(("[data]", {RESET: configuration["data"][RESET]}))
    texts = []
    for head, table in tables:
        named = {name: x for name, x in table.items() if x is not None and not name.endswith("path")}
        texts.append("\n".join([head, *(f"{name} = {json.dumps(x)}" for name, x in named.items())]))
    return "\n\n".join(texts)
