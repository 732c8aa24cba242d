"""README.md of an exported model: a model card for the Hugging Face hub, from the run's record."""

import json
from pathlib import Path
from typing import Any

import jinja2
from torch import nn

from interdomain.data import Tokenizer
from interdomain.model import ModelConfig, count_parameters, meta_model

TEMPLATE = Path(__file__).parent / "model_card.jinja"
RECIPE_SECTIONS = ("optimizer", "lr_scheduler", "training")  # sections of a run's configuration
# The one setting of the section [data] that changes what the model computes.
RESET_SETTING = "reset_state_at_documents"


def write_card(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    tokenizer: Tokenizer,
    facts: dict[str, Any],
    configuration: dict[str, Any],
    license: str | None,
) -> None:
    """Writes README.md of an exported model.

    Args:
        folder: The exported model. If its tokenizer.json is there, the card shows the tokenizer in
            transformers.
        config: The model's configuration.
        dtype: The name of the weights' data type.
        tokenizer: The model's tokenizer.
        facts: What is known of the run: the member `facts` of config.json, with the model's size and
            condition, its step and tokens, the run's data, versions and validation loss.
        configuration: The run's resolved settings by section; empty if they are not recorded.
        license: The licence of the weights as the Hugging Face hub names it, or None.
    """
    run = facts["run"]
    corpora = _corpora(run)

    # The header that the hub reads. The kinds of mixers are tags: a condition is "softmax +
    # interdomain, n_basis 32", for example.
    tags = ["interdomain-attention", *facts["condition"].partition(",")[0].split(" + ")]
    if len(config.mixers) > 1:
        tags.append("hybrid")
    datasets = [name for corpus in corpora for name in corpus["datasets"]]
    # dict.fromkeys takes each name once, in order.
    header = {
        "license": license,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": list(dict.fromkeys(datasets)),
        "tags": list(dict.fromkeys(tags)),
    }

    # The last part of each linear layer's name, such as wq: so PEFT's LoRA takes them.
    model = meta_model(config)
    linears = set()
    for name, module in model.layers.named_modules():
        if isinstance(module, nn.Linear):
            linears.add(name.rpartition(".")[2])

    # Fill in the template, model_card.jinja. It fails on a name that is not given.
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["json"] = json.dumps  # JSON's values are YAML's and TOML's, too
    environment.filters["commas"] = _with_commas
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        header=header,
        config=config,
        dtype=dtype,
        tokenizer=tokenizer,
        documents=tokenizer.documents,
        start=tokenizer.documents.start,
        facts=facts,
        run=run,
        validation=facts["validation"] or {},
        license=license,
        parameters=count_parameters(model),
        seq_len=run.get("seq_len", config.max_seq_len),
        corpora=corpora,
        origins=_origins(run),
        linears=sorted(linears),
        settings=_settings(config, configuration),
        in_transformers=(folder / "tokenizer.json").is_file(),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _with_commas(number: int | None) -> str:
    if number is None:
        return "not recorded"
    return f"{number:,}"


def _corpora(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the corpora of a run in the order in which it read them.

    Each is a corpus of the record with `begins`, the step after which the run began to read it.

    Args:
        run: The member `run` of the record.
    """
    corpora = []
    begins = 0
    # `earlier_data` has what the run read before its data changed. Each entry has its own corpora,
    # and in `ends` the last step that read them.
    for data in [*run.get("earlier_data", []), run]:
        for corpus in data.get("corpora", ()):
            corpora.append(corpus | {"begins": begins})
        begins = data.get("ends")
    return corpora


def _origins(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the models from which the run comes, the latest first.

    These are the model whose weights the run began with, the one that that model's run began with,
    and so on. Models at step 0, which `convert` made and nobody trained, are left out.

    Args:
        run: The member `run` of the record.

    Returns:
        The facts of each model, such as its size, condition, step and tokens.
    """
    origins = []
    while origin := run.get("started_from"):
        if origin["step"]:
            origins.append(origin)
        run = origin["run"]
    return origins


def _settings(
    config: ModelConfig, configuration: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """Returns the settings of the model and of the run's recipe as tables of a TOML file.

    Each is a pair of the table's heading and its settings. The recipe is the optimizer, the
    learning rates and the training (RECIPE_SECTIONS).

    Args:
        config: The model's configuration.
        configuration: The run's resolved settings by section; empty if they are not recorded.
    """
    # The model, with a table for each mixer of a hybrid's pattern.
    model = config.to_dict()
    mixers = model.pop("mixer")
    tables = [("[model]", model)]
    if isinstance(mixers, list):
        tables += [("[[mixer]]", mixer) for mixer in mixers]
    else:
        tables.append(("[mixer]", mixers))
    # The sections of the recipe that are recorded.
    tables += [
        (f"[{name}]", configuration[name]) for name in RECIPE_SECTIONS if name in configuration
    ]
    # One setting of the section [data] changes what the model computes.
    data = configuration.get("data", {})
    if RESET_SETTING in data:
        tables.append(("[data]", {RESET_SETTING: data[RESET_SETTING]}))
    return tables
