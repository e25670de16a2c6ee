import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from complaints import in_order
from each import of_each

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.session.selection import Source, TrainingInputs, read_data, read_model

HASH = "e9b5d671812b5ca2fbd7b625a37d5c99a19576c37252cdc806defe256aea6dad"


@pytest.fixture
def place(tmp_path):
    """A folder with pictures, rows and a model in it."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@of_each(
    "case",
    [
        ("images=pictures", "images", "pictures", True, None, None),
        ("function_calls=rows.json", "function_calls", "rows.json", True, None, None),
        (f"function_calls=rows.json@sha256:{HASH}", "function_calls", "rows.json", True, None, HASH),
        ("function_calls=o/c", "function_calls", "o/c", False, None, None),
        ("function_calls=o/c@e7f4", "function_calls", "o/c", False, "e7f4", None),
        ("function_calls=org/name", "function_calls", "org/name", True, None, None),
        ("function_calls=d/x.json", "function_calls", "d/x.json", True, None, None),
        ("function_calls=./o/c", "function_calls", "./o/c", True, None, None),
    ],
)
def test_data_are_a_path_or_a_name_on_the_hub(case, place):
    text, key, name, local, revision, sha256 = case
    found = read_data(text, place)
    path = place / name if local else None
    assert (found.key, found.source) == (key, Source(name=name, path=path, revision=revision, sha256=sha256))


@of_each(
    "case",
    [
        ("", "images=FOLDER"),
        ("pictures", "'pictures' images=FOLDER"),
        ("images=", "path"),
        ("image=x", "'image' images=FOLDER, function_calls=FILE"),
        ("function_calls=x@sha256:12", "'12' sha256 64"),
        (f"function_calls=x@sha256:{HASH.upper()}", "sha256 64"),
        (f"images=x@sha256:{HASH}", "@sha256 folder"),
    ],
)
def test_other_data_are_refused(case):
    text, words = case
    with pytest.raises(OptionError) as caught:
        read_data(text)
    assert in_order(str(caught.value), words)


@of_each(
    "case",
    [
        ("model", "model", True, None),
        ("Qwen/Qwen2-7B", "Qwen/Qwen2-7B", False, None),
        ("Qwen/Qwen2-7B@v1", "Qwen/Qwen2-7B", False, "v1"),
        ("gpt2", "gpt2", False, None),
        # A folder that looks like the hub; a path, by its dot, and by its slash; too deep for the hub.
        ("org/name", "org/name", True, None),
        ("./gone", "./gone", True, None),
        ("/gone@x", "/gone@x", True, None),
        ("a/b/c", "a/b/c", True, None),
    ],
)
def test_a_model_is_a_folder_or_a_name_on_the_hub(place, case):
    text, name, local, revision = case
    assert read_model(text, place) == Source(name=name, path=place / name if local else None, revision=revision)


def test_no_model_is_refused_and_a_home_is_found(monkeypatch):
    with pytest.raises(OptionError, match="folder, or ORG/NAME"):
        read_model(" ")
    monkeypatch.setenv("HOME", "/home/me")
    assert read_model("~/qwen2").path == Path("/home/me/qwen2")


def inputs(place, **settings):
    given = {"data": (), "model": None, "resume": "no", "scratch": None, "reference_curve": None, **settings}
    return TrainingInputs.of(SimpleNamespace(**given))


def test_what_is_there_is_no_problem_and_is_told(place):
    found = inputs(
        place,
        data=(read_data("images=pictures", place), read_data("function_calls=o/c@v1", place)),
        model=read_model("model", place),
        scratch=place,
        resume="yes",
    )
    assert found.problems() == []
    assert found.data["images"].path == place / "pictures"
    assert found.values()["--gpucluster-data function_calls"] == "o/c@v1 on the hub"
    assert len(found.values()) == 5
    nothing = inputs(place)
    assert nothing == TrainingInputs()
    assert (nothing.values(), nothing.problems(), dict(nothing.data)) == ({}, [], {})


def test_a_pipe_is_not_waited_for(place):
    os.mkfifo(place / "pipe")
    found = TrainingInputs(
        data={"function_calls": Source(name="pipe", path=place / "pipe")}, reference_curve=place / "pipe"
    ).problems()
    for problem, words in zip(found, ("-data function_calls=pipe:", f"-reference-curve {place}/pipe:"), strict=True):
        assert in_order(problem, f"--gpucluster{words} pipe file")


def test_a_scratch_folder_must_be_writable(place, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # everything is allowed to root
    [problem] = inputs(place, scratch=place / "pictures").problems()
    assert in_order(problem, f"--gpucluster-scratch {place}/pictures: written")


@of_each(
    "case",
    [
        ({"data": "images=gone"}, "--gpucluster-data images=gone: folder"),
        ({"data": "images=rows.json"}, "--gpucluster-data images=rows.json: file folder"),
        ({"data": "function_calls=./gone"}, "--gpucluster-data function_calls=./gone: file"),
        ({"data": "function_calls=pictures"}, "--gpucluster-data function_calls=pictures: folder file"),
        ({"model": "./gone"}, "--gpucluster-model ./gone: folder (ORG/NAME[@REVISION])"),
        ({"model": "rows.json"}, "--gpucluster-model rows.json: file folder"),
        ({"model": "pictures"}, "--gpucluster-model pictures: config.json"),
        ({"scratch": "gone"}, "--gpucluster-scratch {place}/gone: folder"),
        ({"reference_curve": "gone"}, "--gpucluster-reference-curve {place}/gone: file"),
        ({"reference_curve": "pictures"}, "--gpucluster-reference-curve {place}/pictures: folder file"),
        (
            {"reference_curve": "rows.json"},
            "--gpucluster-reference-curve {place}/rows.json: format lora reference-curve",
        ),
    ],
)
def test_what_is_not_there_is_named_with_its_option(case, place):
    settings, words = case
    readers = {
        "data": lambda text: (read_data(text, place),),
        "model": lambda text: read_model(text, place),
        "scratch": lambda text: place / text,
        "reference_curve": lambda text: place / text,
    }
    found = inputs(place, **{name: readers[name](text) for name, text in settings.items()})
    [problem] = found.problems()
    assert in_order(problem, words.format(place=place))
