"""README.md of an exported model: a model card as the Hugging Face hub reads it, of what the run recorded."""

import json
from pathlib import Path
from typing import Any

import jinja2
from torch import nn

from interdomain.data import Tokenizer
from interdomain.model import ModelConfig, count_parameters, meta_model

TEMPLATE = Path(__file__).parent / "model_card.jinja"
RECIPE = ("optimizer", "lr_scheduler", "training")  # sections of a run's configuration
RESET = "reset_state_at_documents"  # the one setting of [data] that changes what the model computes


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

    Args:
        facts: of the run, as config.json has them.
        configuration: of the run, empty where it is not recorded.
        license: of the weights, an identifier of the Hugging Face hub, or None.
    """
    run = facts["run"]
    corpora = _corpora(run)
    conditions = facts["condition"].partition(",")[0].split(" + ")
    header = {
        "license": license,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": [*dict.fromkeys(name for corpus in corpora for name in corpus["datasets"])],
        "tags": [
            "interdomain-attention",
            *dict.fromkeys(conditions),
            *["hybrid"] * (len(config.mixers) > 1),
        ],
    }
    modules = meta_model(config).layers.named_modules()
    linears = {name.rpartition(".")[2] for name, module in modules if isinstance(module, nn.Linear)}
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["json"] = json.dumps  # JSON is YAML, and TOML's values
    environment.filters["cell"] = lambda text: text.replace("|", "\\|")
    environment.filters["commas"] = lambda number: (
        "not recorded" if number is None else f"{number:,}"
    )
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
        parameters=count_parameters(meta_model(config)),
        seq_len=run.get("seq_len", config.max_seq_len),
        data=_data(run),
        corpora=corpora,
        origins=_origins(run),
        linears=sorted(linears),
        settings=_settings(config, configuration),
        in_transformers=(folder / "tokenizer.json").is_file(),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _data(run: dict[str, Any]) -> str:
    """The data's fingerprint. TorchTitan's own data sets have none: their names."""
    if fingerprint := run.get("data_fingerprint"):
        return fingerprint
    names = [corpus["name"] for corpus in run.get("corpora", ())]
    return f"{', '.join(names)} (no fingerprint)" if names else "not recorded"


def _corpora(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The corpora of a run in the order in which it read them, each with `begins`, the step after which it was read."""
    corpora, begins = [], 0
    for data in [*run.get("earlier_data", []), run]:
        corpora += [corpus | {"begins": begins} for corpus in data.get("corpora", ())]
        begins = data.get("ends")
    return corpora


def _origins(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Models whose weights the run began with, the latest first; not those that `convert` made and nobody trained."""
    origins = []
    while origin := run.get("started_from"):
        if origin["step"]:
            origins.append(origin)
        run = origin["run"]
    return origins


def _settings(
    config: ModelConfig, configuration: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """TOML's tables of the model's settings and of the run's recipe."""
    model = config.to_dict()
    mixers = model.pop("mixer")
    tables = [("[model]", model)]
    tables += (
        [("[[mixer]]", mixer) for mixer in mixers]
        if isinstance(mixers, list)
        else [("[mixer]", mixers)]
    )
    tables += [(f"[{name}]", configuration[name]) for name in RECIPE if name in configuration]
    if RESET in configuration.get("data", {}):
        tables.append(("[data]", {RESET: configuration["data"][RESET]}))
    return tables
