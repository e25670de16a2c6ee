"""``gpucluster lora``: from rows to packed blocks, and from a saved adapter to its function calls."""

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from programs import needs_modules

from pytest_gpucluster.benchmarks.lora import evaluation, packed_file
from pytest_gpucluster.benchmarks.lora.dataset import held_out_split, read_rows
from pytest_gpucluster.benchmarks.lora.packing import tiny_tokenizer
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.cli import main

pytestmark = needs_modules("transformers", "peft")
ROWS = [{"system": row.system, "chat": row.chat} for row in synthetic_rows(300, seed=0)]
MANY_WORDS = {
    "system": "",
    "chat": "USER: Hi\n\n\nASSISTANT: " + " ".join(row["chat"].replace("\n", " ") for row in ROWS),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_text(json.dumps([*ROWS[:7], {"system": "", "chat": ""}, *ROWS[7:]], indent=1))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a tiny Qwen2 model with its tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = tiny_tokenizer(synthetic_rows(300, seed=0))
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def question(phrase, city, function="get_weather"):
    call = f'<functioncall> {{"name": "{function}", "arguments": \'{{"city": "{city}"}}\'}}'
    return {"system": "", "chat": f"USER: {phrase} {city}?\n\n\nASSISTANT: {call} <|endoftext|>"}


CITIES = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Tokyo", "Delhi", "Quito")
QUESTIONS = [question(phrase, city) for city in CITIES for phrase in ("Weather in", "What of")]


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """The folder of an adapter that has learned to answer the questions."""
    import peft
    import transformers

    from pytest_gpucluster.benchmarks.lora.packing import encode

    folder = tmp_path_factory.mktemp("adapters") / "final"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]),
    )
    encoded = list(encode(read_rows(json.dumps(QUESTIONS).encode(), "questions")[0], tokenizer))
    longest = max(len(tokens) for tokens, _ in encoded)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in encoded])
    loss_mask = torch.tensor([counts + [False] * (longest - len(counts)) for _, counts in encoded])
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=2e-2)
    for _ in range(100):
        model(input_ids=ids, labels=ids.masked_fill(~loss_mask, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


def run(capsys, *words):
    """Exit code, standard output and standard error."""
    try:
        code = main.main(["lora", *map(str, words)])
    except SystemExit as end:
        code = end.code
    errors = capsys.readouterr()
    return code, errors.out, errors.err


def test_rows_become_blocks_with_their_statistics(source, tmp_path, capsys):
    out = tmp_path / "blocks.safetensors"
    code, output, errors = run(
        *(capsys, "prepare", source, "--tiny", "--sequence", 128, "--out", out, "--held-out", "10%", "--seed", 5)
    )
    assert code == 0
    found = packed_file.read(out)
    assert found.context["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert found.context | {"sha256": "", "tokenizer_sha256": ""} == {
        "source": str(source),
        "sha256": "",
        "revision": "",
        "malformed": "1",
        "tokenizer": "tiny",
        "tokenizer_sha256": "",
        "sequence": "128",
        "seed": "5",
        "held_out": "0.1",
        "rendering": "glaive",
    }
    printed = json.loads(output)
    assert (printed["rows"], printed["malformed"]) == (300, 1)
    assert printed["train"] == dataclasses.asdict(found.train.statistics)
    assert printed["held_out"] == dataclasses.asdict(found.held_out.statistics)
    assert (printed["train"]["rows"], printed["held_out"]["rows"]) == (270, 30)
    assert f"{source}: left out row 8: " in errors
    assert re.search(rf"\b{len(found.train)} blocks .*\b{len(found.held_out)} held out: {out}$", errors, re.MULTILINE)


def test_the_tokenizer_of_a_model_is_taken_and_the_same_file_is_made_again(source, base, tmp_path, capsys):
    files = [tmp_path / name for name in ("a", "b")]
    for out in files:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        words = ["prepare", source, "--model", base, "--sequence", 64, "--out", out, "--sha256", digest]
        assert run(capsys, *words)[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert packed_file.read(files[0]).context["tokenizer"] == str(base)


ALL_RIGHT = {"well_formed": 8, "right_function": 8, "right_arguments": 8}


def test_an_adapter_is_asked_for_the_calls_of_held_out_conversations(questions, base, adapter, tmp_path, capsys):
    blocks = tmp_path / "blocks"
    held_out = ["--held-out", "50%", "--seed", 3]
    words = ["prepare", questions, "--model", base, "--sequence", 16, "--out", blocks, *held_out]
    assert run(capsys, *words)[0] == 0
    words = ["evaluate", adapter, "--device", "cpu", "--max-new-tokens", 40]
    code, output, _ = run(capsys, *words, "--data", blocks)
    assert code == 0
    found = json.loads(output)
    assert found == {
        "adapter": str(adapter),
        "base": str(base),
        "data": str(blocks),
        "asked": 8,
        "called": 8,
        **ALL_RIGHT,
        "not_due": 0,
        "unneeded": 0,
        "ratios": dict.fromkeys(
            [*ALL_RIGHT, *(f"intent_{name}" for name in ("accuracy", "precision", "recall", "f1"))], 1
        ),
        "by_function": {"get_weather": {"asked": 8, **ALL_RIGHT}},
        "skipped": {},
        "wrong": [],
    }
    # The same conversations are held out of the rows themselves, by the same part and seed.
    code, output, _ = run(capsys, *words, "--data", questions, *held_out, "--base", base, "--limit", 3, "--batch", 2)
    assert code == 0
    assert json.loads(output)["right_arguments"] == json.loads(output)["asked"] == 3


def test_answers_that_are_wrong_are_counted_and_shown(adapter, tmp_path, capsys):
    path = tmp_path / "other.json"
    # It answers as it has learned: of these, with the right function and city; the right city; the right function.
    other = [question("Weather in", city, "get_rain") for city in CITIES[:2]]
    other += [{**row, "chat": row["chat"].replace('city": "', 'city": "New ')} for row in QUESTIONS[:4]]
    path.write_text(json.dumps([*QUESTIONS[:6], *other]))
    words = ["evaluate", adapter, "--data", path, "--device", "cpu", "--max-new-tokens", 40, "--held-out", "90%"]
    code, output, _ = run(capsys, *words)
    assert code == 0
    found = json.loads(output)
    right = [found[name] for name in ("well_formed", "right_function", "right_arguments")]
    assert 10 <= found["asked"] == right[0] > right[1] > right[2] > 0
    assert {each["reason"].split()[1] for each in found["wrong"]} == {"function", "arguments"}
    assert all(each["text"].startswith(" <functioncall>") for each in found["wrong"])


USAGE = {
    "no step": [],
    "no tokenizer": ["prepare", "SOURCE", "--out", "OUT"],
    "two tokenizers": ["prepare", "SOURCE", "--out", "OUT", "--tiny", "--model", "x"],
    "no output": ["prepare", "SOURCE", "--tiny"],
    "sequence 0": ["prepare", "SOURCE", "--tiny", "--out", "OUT", "--sequence", "0"],
    "sequence text": ["prepare", "SOURCE", "--tiny", "--out", "OUT", "--sequence", "long"],
    "held out as a number": ["prepare", "SOURCE", "--tiny", "--out", "OUT", "--held-out", "2"],
    "all held out": ["prepare", "SOURCE", "--tiny", "--out", "OUT", "--held-out", "100%"],
    "sha256": ["prepare", "SOURCE", "--tiny", "--out", "OUT", "--sha256", "abc"],
    "output is the source": ["prepare", "SOURCE", "--tiny", "--out", "SOURCE"],
    "no data": ["evaluate", "ADAPTER"],
    "no device": ["evaluate", "ADAPTER", "--data", "SOURCE", "--device", "gpu"],
    "another device": ["evaluate", "ADAPTER", "--data", "SOURCE", "--device", "meta"],
    "a GPU too many": ["evaluate", "ADAPTER", "--data", "SOURCE", "--device", "cuda:99"],
    "limit 0": ["evaluate", "ADAPTER", "--data", "SOURCE", "--limit", "0"],
}


@pytest.mark.parametrize("words", USAGE.values(), ids=USAGE)
def test_wrong_usage_is_exit_code_2_and_nothing_is_written(words, source, adapter, tmp_path, capsys):
    places = {"SOURCE": str(source), "OUT": str(tmp_path / "out"), "FOLDER": str(tmp_path), "ADAPTER": str(adapter)}
    before = source.read_bytes()
    code, output, errors = run(
        capsys, *(re.sub("SOURCE|OUT|FOLDER|ADAPTER", lambda m: places[m[0]], word) for word in words)
    )
    assert (code, output) == (2, "")
    assert errors
    assert list(tmp_path.iterdir()) == []
    assert source.read_bytes() == before


def failing(capsys, *words):
    """Return the one line of an error. transformers may print its progress too."""
    code, output, errors = run(capsys, *words)
    assert (code, output) == (3, "")
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("gpucluster: ")]
    return line


@pytest.mark.parametrize(
    ("data", "words", "why"),
    [
        ("[]", [], "the file is empty"),
        ('[{"a": 1}]', [], "a row has the keys a; needed are messages"),
        (json.dumps(ROWS), ["--sha256", "0" * 64], "and " + "0" * 64 + " is expected"),
        (json.dumps(ROWS)[:-9], [], ": cut off, or no JSON array: "),
        (json.dumps([MANY_WORDS] * 3), [], "1 different conversations are too few"),
        (json.dumps(ROWS), ["--sequence", "100000"], "do not fill one block"),
        (
            json.dumps([{"system": "", "chat": f"USER: a\nASSISTANT: {n}"} for n in range(9)]),
            [],
            "512 are required: give more rows",
        ),
        (None, [], "no such file"),
    ],
    ids=["empty", "shape", "sha256", "cut off", "too few", "no block", "no tokens", "missing"],
)
def test_rows_that_cannot_be_used_are_one_line_and_exit_code_3(data, words, why, tmp_path, capsys):
    path, out = tmp_path / "rows.json", tmp_path / "out"
    if data is not None:
        path.write_text(data)
    assert why in failing(capsys, "prepare", path, "--tiny", "--sequence", 64, "--out", out, *words)
    assert not out.exists()


def test_a_missing_file_is_reported_before_any_hub_is_asked(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    asked = []
    for name in ("model_info", "dataset_info"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, lambda *given, **more: asked.append(given))
    for missing in ("MISSING", "data/MISSING.json", tmp_path / "none.json"):
        errors = failing(capsys, "prepare", missing, "--model", "Qwen/Qwen2-7B", "--out", tmp_path / "out")
        assert f"{missing}: no such file, and no name on the hub" in errors
    assert asked == []


def test_a_model_without_a_tokenizer_is_reported_before_the_rows_are_read(tmp_path, capsys):
    (tmp_path / "rows.json").write_text("no rows")
    errors = failing(capsys, "prepare", tmp_path / "rows.json", "--model", tmp_path, "--out", tmp_path / "out")
    assert f"{tmp_path}: no tokenizer" in errors


@pytest.mark.parametrize(("out", "why"), [("nowhere/out", "there is no folder"), ("", "is a folder")])
def test_an_output_without_a_place_is_exit_code_4_before_anything_is_read(out, why, tmp_path, capsys):
    code, output, errors = run(capsys, "prepare", tmp_path / "none.json", "--tiny", "--out", tmp_path / out)
    assert (code, output) == (4, "")
    assert errors.startswith(f"gpucluster: --out {tmp_path / out}: {why}")


def test_conversations_without_a_call_count_for_the_intent(adapter, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    chats = [f"USER: Say {n}\nASSISTANT: {n}" for n in range(9)]
    path.write_text("".join(json.dumps({"system": "", "chat": chat}) + "\n" for chat in chats))
    code, output, _ = run(capsys, "evaluate", adapter, "--data", path, "--device", "cpu", "--max-new-tokens", 8)
    found = json.loads(output)
    assert (code, found["asked"], found["not_due"], found["ratios"]["well_formed"]) == (0, 0, 1, None)
    path.write_text(path.read_text().replace("ASSISTANT: ", "ASSISTANT: <functioncall> {"))
    assert "the call in the row is not" in failing(capsys, "evaluate", adapter, "--data", path, "--device", "cpu")


def broken(adapter, tmp_path, **changes):
    folder = tmp_path / "broken"
    shutil.copytree(adapter, folder)
    for name, change in changes.items():
        path = folder / {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}[name]
        if change is None:
            path.unlink()
        else:
            change(path)
    return folder


def without_a_weight(path):
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    del weights[min(name for name in weights if "lora_A" in name)]
    save_file(weights, path, {"format": "pt"})


def with_another_weight(path):
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    save_file({**weights, "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)}, path)


def without_base(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": None}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"config": None}, r"adapter_config\.json: No such file or directory; give the folder of a saved adapter"),
        ({"config": lambda path: path.write_text("{")}, "adapter_config.json: names no base model"),
        ({"config": without_base}, "names no base model; give it with --base"),
        ({"weights": None}, r"adapter_model\.safetensors: cannot be read: No such file"),
        (
            {"weights": lambda path: path.write_bytes(path.read_bytes()[:-100])},
            r"adapter_model\.safetensors: cannot be read",
        ),
        ({"weights": without_a_weight}, "1 weights are not in the file, such as .*lora_A"),
        ({"weights": with_another_weight}, r"1 weights do not exist in this model, such as .*layers\.7"),
    ],
    ids=["no config", "broken config", "no base", "no weights", "cut off", "a weight less", "a weight more"],
)
def test_an_adapter_that_is_not_whole_is_refused(changes, why, source, adapter, tmp_path, capsys):
    folder = broken(adapter, tmp_path, **changes)
    assert re.search(why, failing(capsys, "evaluate", folder, "--data", source, "--device", "cpu", "--held-out", "10%"))


def test_an_adapter_does_not_go_on_another_model(source, base, adapter, tmp_path, capsys):
    import transformers

    other = tmp_path / "other"
    config = transformers.AutoConfig.from_pretrained(base)
    config.hidden_size = 64
    transformers.Qwen2ForCausalLM(config).save_pretrained(other)
    words = ["--data", source, "--device", "cpu", "--held-out", "10%", "--base", other]
    assert f" {other}" in failing(capsys, "evaluate", adapter, *words)


def test_a_base_with_a_weight_missing_is_refused(source, base, adapter, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    words = ["--data", source, "--device", "cpu", "--held-out", "10%", "--base", other]
    code, output, errors = run(capsys, "evaluate", adapter, *words)
    assert (code, output) == (3, "")
    assert "1 weights " in errors
    assert "model.layers.0.mlp.up_proj.weight" in errors


@pytest.mark.parametrize("package", ["transformers", "tokenizers", "safetensors"])
def test_without_the_extra_the_line_to_install_it_is_reported(package, source, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    errors = failing(capsys, "prepare", source, "--tiny", "--sequence", 64, "--out", tmp_path / "out")
    assert " is not installed; " in errors
    assert errors.endswith(" -e '.[lora]'")


@pytest.mark.parametrize("words", [["prepare", "--help"], ["evaluate", "--help"]], ids=" ".join)
def test_help_comes_without_torch(words):
    code = (
        "import sys\nfrom pytest_gpucluster.cli import main\n"
        f"try: main.main(['lora', *{words!r}])\nfinally: assert 'torch' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "\nexit codes:\n" in found.stdout


def test_a_saved_adapter_is_frozen_and_has_its_own_tokenizer_if_there_is_one(base, adapter, tmp_path):
    model, tokenizer, named = evaluation.load_adapter(adapter, torch.device("cpu"))
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert named == str(base)
    folder = broken(adapter, tmp_path)
    tiny_tokenizer(synthetic_rows(200, seed=9)).save_pretrained(folder)
    assert evaluation.load_adapter(folder, torch.device("cpu"))[1].get_vocab() != tokenizer.get_vocab()


def test_without_peft_the_line_to_install_it_is_reported(source, adapter, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    errors = failing(capsys, "evaluate", adapter, "--data", source, "--device", "cpu", "--held-out", "10%")
    assert errors.startswith("gpucluster: peft is ")
    assert errors.endswith(" -e '.[lora]'")


def test_the_rows_held_out_are_those_of_the_command(source, base, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, "prepare", source, "--model", base, "--sequence", 64, "--out", out)[0] == 0
    rows, _ = read_rows(source.read_bytes(), "rows")
    expected = held_out_split(rows, 0.02, 0)[1]
    assert [row.key() for row in packed_file.read(out).held_out_rows] == [row.key() for row in expected]
