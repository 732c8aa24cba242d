"""Folders: what is loaded is what was written, saved folders load again, and everything that can be wrong with one."""

import ast
import copy
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from interdomain import bundle
from interdomain.data import load_tokenizer
from interdomain.model.pretrained import checksums, load_model, load_pretrained
from interdomain.tools import convert

from ..tools.checkpoints import small_model, write_checkpoint
from .common import CLOSE, KINDS, greedy, random_texts

ON = dict(do_sample=False, eos_token_id=None)


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


@pytest.fixture
def folder(tmp_path, exported):
    return shutil.copytree(exported("interdomain")[1], tmp_path / "folder")


@pytest.mark.parametrize("case", KINDS)
def test_every_bit_arrives(loaded, case):
    model, there = loaded(case)
    found, wanted = there.state_dict(), model.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert not there.training
    assert there.num_parameters() == sum(p.numel() for p in model.parameters())
    assert there.get_input_embeddings().weight is not there.get_output_embeddings().weight


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dynamics_stay_float32(exported, case, dtype):
    model, folder = exported(case)
    there = load(folder, dtype=dtype)
    for name, tensor in there.state_dict().items():
        spared = ".ssm." in name or name.endswith("frequencies")
        wanted = model.state_dict()[name]
        assert tensor.dtype == (torch.float32 if spared else dtype), name
        assert torch.equal(tensor, wanted if spared else wanted.to(dtype)), name
    ours = load_model(folder, dtype=dtype)
    tokens = random_texts(1, 9)
    with torch.no_grad():
        assert torch.equal(there(tokens, use_cache=False).logits, ours(tokens))
    there.generate(tokens, max_new_tokens=2, **ON)
    assert there.to(torch.float32).to(torch.bfloat16).state_dict()["norm.weight"].dtype == torch.bfloat16
    if case != "softmax":
        assert there.layers["0"].attention.ssm.log_dt.dtype == torch.float32


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
def test_in_float64(exported, case):
    """The dynamics too; in one way of attention, whichever is named."""
    _, folder = exported(case)
    there, ours = load(folder, dtype=torch.float64, attn_implementation="sdpa"), load_model(folder, dtype=torch.float64)
    assert {tensor.dtype for tensor in there.state_dict().values()} == {torch.float64}
    with torch.no_grad():
        assert torch.equal(there(random_texts(1, 9)).logits, ours(random_texts(1, 9)))


def test_shards(tmp_path, exported):
    model, folder = exported("interdomain")
    run = folder.with_name("interdomain-run")
    assert convert.main([str(run / "step-100"), "--output", str(tmp_path / "sharded"), "--max-shard-gb", "2e-5"]) == 0
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 3
    tokens = random_texts(1, 9)
    found = load(tmp_path / "sharded")
    assert torch.equal(found.generate(tokens, max_new_tokens=3, **ON), greedy(model, tokens, 3))
    lost = min((tmp_path / "sharded").glob("model-00002-*"))
    data = lost.read_bytes()
    lost.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{lost.name} is not the file that was exported"):
        load(tmp_path / "sharded")
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {lost.name}; copy the whole folder again"):
        load(tmp_path / "sharded")


@pytest.mark.parametrize("case", KINDS)
def test_saved_and_loaded_again(tmp_path, loaded, tokenizer, case):
    model, there = loaded(case)
    there.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    record = json.loads((tmp_path / "saved" / "config.json").read_text())
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert record["weights"] == checksums(files)
    assert len(files) > 1
    assert {p.name for p in (tmp_path / "saved").glob("*.py")} == set(bundle.bundled())
    again = load(tmp_path / "saved")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert again.generation_config.suppress_tokens == there.generation_config.suppress_tokens
    # It is a folder of ours still.
    ours, own = load_pretrained(tmp_path / "saved")
    assert own.sha256 == tokenizer.sha256
    with torch.no_grad():
        torch.testing.assert_close(ours(random_texts(1, 5)), model(random_texts(1, 5)), **CLOSE)


def test_saved_where_it_came_from(tmp_path, loaded):
    """In one file, in several, and in one again: always what was written last, and nothing of what was before."""
    _, there = loaded("interdomain")
    tuned, sizes = copy.deepcopy(there), []
    for size in ("5GB", "100KB", "5GB"):
        with torch.no_grad():
            tuned.norm.weight.mul_(1.1)
        (tmp_path / "adapter_model.safetensors").touch()  # none of its weights
        tuned.save_pretrained(tmp_path, max_shard_size=size)
        files = sorted(tmp_path.glob("model[.-]*"))
        sizes.append(len(files))
        record = json.loads((tmp_path / "config.json").read_text())
        assert record["weights"] == checksums(file for file in files if file.suffix == ".safetensors")
        with pytest.raises(ValueError, match="Unit"):  # nothing is lost
            tuned.save_pretrained(tmp_path, max_shard_size="none")
        tuned = load(tmp_path)
        ours = load_model(tmp_path)
        for name, tensor in tuned.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name
    assert sizes[0] == sizes[2] == 1 < 3 < sizes[1]
    torch.testing.assert_close(tuned.norm.weight, 1.1**3 * there.norm.weight)


def test_an_adapter_is_saved_alone(tmp_path, monkeypatch, loaded):
    """transformers writes no config.json then, and the folder may be the model's own."""
    there = copy.copy(loaded("interdomain")[1])
    written = []
    monkeypatch.setattr(type(there).__mro__[1], "save_pretrained", lambda self, folder, **_: written.append(folder))
    monkeypatch.setitem(vars(there), "_hf_peft_config_loaded", True)
    (tmp_path / "model.safetensors.index.json").touch()
    there.save_pretrained(tmp_path)
    assert written == [tmp_path]
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors.index.json"]


@pytest.mark.parametrize("name", ["../secret", "other", "."])
def test_no_other_file_is_copied(tmp_path, folder, name):
    """Whatever config.json names."""
    for file in (tmp_path / "secret", folder / "secret", folder / "other"):
        file.touch()
    edit(folder, lambda record: record["tokenizer"].update(file=name))
    load(folder).save_pretrained(tmp_path / "saved")
    assert {"secret", "other"}.isdisjoint(os.listdir(tmp_path / "saved"))


def test_a_configuration_has_no_checksums_of_a_folder(tmp_path, folder):
    """It may be saved beside other weights."""
    from transformers import AutoConfig

    AutoConfig.from_pretrained(folder, trust_remote_code=True).save_pretrained(folder)
    rewrite(folder, lambda tensors: tensors["norm.weight"].mul_(2), recorded=False)
    assert torch.equal(load(folder).norm.weight, load_model(folder).norm.weight)


def test_a_copy_is_a_model_of_its_own(loaded):
    model, there = loaded("interdomain")
    tokens = random_texts(1, 9)
    other = copy.deepcopy(there)
    with torch.no_grad():
        other.layers["0"].attention.wo.weight.zero_()
        other.tok_embeddings = copy.deepcopy(other.tok_embeddings)
        other.tok_embeddings.weight.mul_(2)
        assert not torch.allclose(other(tokens).logits, model(tokens), **CLOSE)
        changed = copy.deepcopy(model)
        changed.layers["0"].attention.wo.weight.zero_()
        changed.tok_embeddings.weight.mul_(2)
        torch.testing.assert_close(other(tokens).logits, changed(tokens), **CLOSE)
        torch.testing.assert_close(there(tokens).logits, model(tokens), **CLOSE)


def test_the_package_and_two_folders_in_one_process(exported, loaded, package):
    """Each with its own ops, and the package's are what they were."""
    from interdomain.scan import ops

    before = torch.ops.interdomain.scan.default
    tokens = random_texts(2, 9)
    there = {case: loaded(case) for case in ("interdomain", "s4d")}
    ours = package().InterdomainForCausalLM.from_pretrained(exported("interdomain")[1])
    assert type(ours).__module__ == "interdomain.hf.modeling"
    namespaces = set()
    for case, (model, found) in there.items():
        assert torch.equal(found.generate(tokens, max_new_tokens=3, **ON), greedy(model, tokens, 3)), case
        scan = sys.modules[type(found).__module__.rpartition(".")[0] + ".interdomain_scan_ops"]
        namespaces.add(scan.scan._qualname)
    assert torch.equal(ours.generate(tokens, max_new_tokens=3, **ON), greedy(there["interdomain"][0], tokens, 3))
    assert torch.ops.interdomain.scan.default is before
    assert ops.scan._qualname == "interdomain::scan"
    assert len({*namespaces, "interdomain::scan"}) == 3


def test_the_package_needs_no_trust(tmp_path, exported, package):
    """Without code in the folder: the installed package's own; saving writes the code."""
    model, folder = exported("interdomain")
    folder = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.py"))
    record = json.loads((folder / "config.json").read_text())
    del record["auto_map"]
    (folder / "config.json").write_text(json.dumps(record))
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match="interdomain"):  # no model type of transformers'
        AutoModelForCausalLM.from_pretrained(folder)
    kind = package().InterdomainForCausalLM
    there = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(there, kind)
    there.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"] == bundle.AUTO_MAP
    assert {p.name: p.read_text() for p in (tmp_path / "saved").glob("*.py")} == bundle.bundled()
    again = load(tmp_path / "saved")
    tokens = random_texts(1, 9)
    assert torch.equal(again.generate(tokens, max_new_tokens=3, **ON), greedy(model, tokens, 3))


def test_how_it_is_computed_can_be_chosen(exported):
    model, folder = exported("interdomain")
    tokens = random_texts(1, 9)
    for options in (dict(backend="sequential" if torch.cuda.is_available() else "reference"), dict(features="torch")):
        there = load(folder, **options)
        assert vars(there.layers["0"].attention.execution).items() >= options.items()
        with torch.no_grad():
            torch.testing.assert_close(there(tokens).logits, model(tokens), **CLOSE)


def test_a_new_model(loaded):
    from transformers import AutoModelForCausalLM

    _, there = loaded("interdomain")
    config = copy.deepcopy(there.config)
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made.append(AutoModelForCausalLM.from_config(config, trust_remote_code=True).state_dict())
    assert all(tensor.isfinite().all() for tensor in made[0].values())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(made[0]["output.weight"], made[2]["output.weight"])


# What is in the code


def test_transformers_finds_every_file(exported):
    """By the text of the imports, and without a requirement but torch and itself."""
    from transformers import dynamic_module_utils as dynamic

    folder = exported("interdomain")[1]
    main = folder / "modeling_interdomain.py"
    files = set(bundle.bundled())
    assert {f"{name}.py" for name in dynamic.get_relative_imports(main)} == files - {main.name}  # all that 4 copies
    for name in files:
        assert {f"{found}.py" for found in dynamic.get_relative_imports(folder / name)} <= files, name
        needed = {n for n in dynamic.get_imports(folder / name) if n not in sys.stdlib_module_names}
        assert needed <= {"torch", "transformers"}, name


def test_the_code_is_the_project_s():
    """Line for line but for imports; nothing of data preparation, training or tools; names that say where from."""
    for name, text in bundle.bundled().items():
        first, rest = text.split("\n", 1)
        module = first.split(" ")[6].rstrip(":")
        source = Path(importlib.util.find_spec(module).origin).read_text()
        assert name == f"{bundle.flat_name(module)}.py"
        assert module.split(".")[1] in ("hf", "model", "scan", "features")
        left = without_imports(rest.partition("\n\n\nthis_module = ")[0].partition("\n\nif False:")[0])
        assert left == without_imports(source), name


def test_every_file_can_be_imported(loaded):
    """The kernels too, which nothing imports without a GPU."""
    package = type(loaded("interdomain")[1]).__module__.rpartition(".")[0]
    triton = importlib.util.find_spec("triton") is not None
    files = [name.removesuffix(".py") for name in bundle.bundled() if triton or "_triton_" not in name]
    for name in files:
        importlib.import_module(f"{package}.{name}")
    if triton:
        kernels = sys.modules[f"{package}.interdomain_scan_triton_chunkwise"]
        assert kernels.launch is sys.modules[f"{package}.interdomain_scan_triton_launch"]


def without_imports(source):
    lines = source.rstrip().splitlines()
    for node in ast.walk(ast.parse(source)):
        handled = isinstance(node, ast.Try) and isinstance(node.body[0], ast.Import | ast.ImportFrom)
        if handled or isinstance(node, ast.Import | ast.ImportFrom):
            for i in range(node.lineno - 1, node.end_lineno):
                lines[i] = None
    return [line for line in lines if line is not None]


# What can be wrong


def edit(folder, change):
    record = json.loads((folder / "config.json").read_text())
    change(record)
    (folder / "config.json").write_text(json.dumps(record))


def rewrite(folder, change, recorded=True):
    """Other tensors, with their checksum."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    if recorded:
        edit(folder, lambda record: record.update(weights=checksums([file])))


DAMAGE = {
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop("norm.weight")), ["do not fit", "missing norm.weight"]),
    "unknown tensor": (
        lambda f: rewrite(f, lambda t: t.update(extra=torch.zeros(3))),
        ["do not fit its config.json", "unexpected extra"],
    ),
    "altered weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1] + b"\x07"),
        ["model.safetensors is not the file that was exported", "Copy the folder again"],
    ),
    "cut weights": (lambda f: os.truncate(f / "model.safetensors", 5000), ["is not the file that was exported"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["lacks model.safetensors"]),
    "newer version": (
        lambda f: edit(f, lambda r: r["interdomain"].update(format_version=2)),
        ["format version 2", "reads version 1", "update"],
    ),
    "unknown setting": (
        lambda f: edit(f, lambda r: r["interdomain"]["mixer"].update(turbo=True)),
        ["unknown mixer setting(s): turbo"],
    ),
    "two widths": (lambda f: edit(f, lambda r: r.update(hidden_size=64)), ["hidden_size is 32", "under `interdomain`"]),
    "tied": (lambda f: edit(f, lambda r: r.update(tie_word_embeddings=True)), ["tie_word_embeddings", "not tied"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.filterwarnings("ignore")  # transformers warns of missing tensors before it is told that they are needed
def test_a_damaged_folder_is_refused(folder, damage):
    break_it, words = DAMAGE[damage]
    break_it(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        load(folder)
    for word in words:
        assert word in str(raised.value)


def test_a_tokenizer_without_a_counterpart_is_refused(tmp_path, tokenizer, capsys):
    """A piece defined by hand, as Mistral's have: from the .model alone transformers 5 builds a tokenizer with other ids."""
    from transformers import AutoTokenizer

    sentencepiece_model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.data)
    model.pieces[300].type = model.pieces[300].USER_DEFINED
    (tmp_path / "defined.model").write_bytes(model.SerializeToString())
    defined, folder = load_tokenizer(tmp_path / "defined.model"), tmp_path / "folder"
    checkpoint = write_checkpoint(tmp_path / "run", small_model(), defined)
    assert convert.main([str(checkpoint), "--output", str(folder)]) == 0
    assert "AutoTokenizer refuses the folder: only sentencepiece BPE" in capsys.readouterr().err
    assert "no exact counterpart of this folder's tokenizer, `tokenizer.model`" in (folder / "README.md").read_text()
    with pytest.raises(OSError, match=r"no_exact_tokenizer_for_transformers\.py"):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert load_pretrained(folder)[1].sha256 == defined.sha256


def test_another_shape_is_refused(folder):
    edit(folder, lambda r: (r["interdomain"].update(vocab_size=421), r.update(vocab_size=421)))
    with pytest.raises((ValueError, RuntimeError), match=r"size mismatch|mismatched|MISMATCH"):
        load(folder)


def test_names_set_at_load(tmp_path, exported):
    """That of a length, by which nothing is computed, is kept; others must be what the model is."""
    _, folder = exported("interdomain")
    load(folder, max_position_embeddings=4096).save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").config.max_position_embeddings == 4096
    for name, told in (("num_hidden_layers", "num_hidden_layers is 2 in this"), ("tie_word_embeddings", "not tied")):
        with pytest.raises(ValueError, match=told):
            load(folder, **{name: 1})


def test_several_devices_are_refused(tmp_path, exported):
    """Before anything is loaded; by accelerate's own functions, too."""
    accelerate = pytest.importorskip("accelerate", reason="device_map needs accelerate, of the extra `eval`")
    _, folder = exported("interdomain")
    places = {**dict.fromkeys(("tok_embeddings", "layers.0", "norm", "output"), "cpu"), "layers.1": "disk"}
    there = load(folder, device_map={"": "cpu"})
    assert there.device.type == "cpu"
    for wrong, told in ((places, "cpu, disk"), ({"": "disk"}, "disk"), ("disk", "disk")):
        with pytest.raises(ValueError, match=f"runs on one device, device_map puts it on {told}: name one"):
            load(folder, device_map=wrong, offload_folder=tmp_path)
    with pytest.raises(ValueError, match="device_map puts it on cpu, disk: name one"):
        accelerate.dispatch_model(there, places, offload_dir=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, "float8_e5m2"], ids=str)
def test_a_dtype_that_is_not_computed_with_is_refused(exported, dtype):
    with pytest.raises(ValueError, match=rf"dtype is {dtype}: this model is float32, float64, bfloat16 or float16"):
        load(exported("interdomain")[1], dtype=dtype)


@pytest.mark.parametrize(("gpus", "place"), [(True, "cuda"), (False, "cpu")])
def test_an_automatic_device_map_is_one_device(monkeypatch, loaded, exported, gpus, place):
    """accelerate's would spread it over all GPUs, of which it needs one."""
    kind, found = type(loaded("interdomain")[1]), {}

    def asked(cls, folder, **options):
        found.update(options)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(kind.__mro__[1], "from_pretrained", classmethod(asked))
    with pytest.raises(InterruptedError):
        kind.from_pretrained(exported("interdomain")[1], device_map="auto")
    assert found["device_map"] == place


def test_half_a_folder_is_not_uploaded(tmp_path, loaded):
    with pytest.raises(ValueError, match=r"call model.push_to_hub\(name\), which saves first"):
        loaded("interdomain")[1].save_pretrained(tmp_path / "saved", push_to_hub=True)
    assert not (tmp_path / "saved").exists()


def test_quantized_weights_are_refused(exported):
    from transformers import QuantoConfig

    with pytest.raises(ValueError, match="not made to be quantized: leave out quantization_config; dtype='bfloat16'"):
        load(exported("interdomain")[1], quantization_config=QuantoConfig(weights="int8"))


def test_the_vocabulary_is_fixed(loaded):
    _, there = loaded("interdomain")
    for same in ((), (there.config.vocab_size,)):
        assert there.resize_token_embeddings(*same) is there.tok_embeddings
    with pytest.raises(NotImplementedError, match="vocabulary of this model is fixed"):
        there.resize_token_embeddings(500)
