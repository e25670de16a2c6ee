from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.training_inputs import Source, TrainingInputs, read_data, read_model

HASH = "e9b5d671812b5ca2fbd7b625a37d5c99a19576c37252cdc806defe256aea6dad"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with pictures, rows and a model in it."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "odd").write_text("[]")
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "key", "name", "local", "revision", "sha256"),
    [
        pytest.param("images=pictures", "images", "pictures", True, None, None, id="named folder"),
        pytest.param("pictures", "images", "pictures", True, None, None, id="bare folder"),
        pytest.param("rows.json", "function_calls", "rows.json", True, None, None, id="bare file"),
        pytest.param("odd", "function_calls", "odd", True, None, None, id="bare file of no suffix"),
        pytest.param("gone.jsonl", "function_calls", "gone.jsonl", True, None, None, id="bare file that is not there"),
        pytest.param("gone", "images", "gone", True, None, None, id="bare path that is not there"),
        pytest.param("a/b=c", "images", "a/b=c", True, None, None, id="a path with an equals sign"),
        pytest.param("function_calls=rows.json", "function_calls", "rows.json", True, None, None, id="named file"),
        pytest.param(
            f"function_calls=rows.json@sha256:{HASH}", "function_calls", "rows.json", True, None, HASH, id="with a hash"
        ),
        pytest.param("function_calls=o/c", "function_calls", "o/c", False, None, None, id="hub"),
        pytest.param("function_calls=o/c@e7f4", "function_calls", "o/c", False, "e7f4", None, id="hub with revision"),
        pytest.param("function_calls=org/name", "function_calls", "org/name", True, None, None, id="a folder like it"),
        pytest.param("function_calls=d/x.json", "function_calls", "d/x.json", True, None, None, id="a missing file"),
        pytest.param("function_calls=./o/c", "function_calls", "./o/c", True, None, None, id="a path, by its dot"),
    ],
)
def test_data_are_a_path_or_a_name_on_the_hub(
    place: Path, text: str, key: str, name: str, local: bool, revision: str | None, sha256: str | None
) -> None:
    found = read_data(text, place)
    path = place / name if local else None
    assert (found.key, found.source) == (key, Source(name=name, path=path, revision=revision, sha256=sha256))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "no path; allowed: images=FOLDER", id="nothing"),
        pytest.param("images=", "no path; allowed: ", id="a name alone"),
        pytest.param("image=x", "unknown data 'image'; allowed: images=FOLDER, function_calls=FILE", id="another name"),
        pytest.param("function_calls=x@sha256:12", "'12' is no sha256: write its 64 digits", id="a short hash"),
        pytest.param(f"function_calls=x@sha256:{HASH.upper()}", "is no sha256", id="capitals"),
        pytest.param(f"images=x@sha256:{HASH}", "@sha256 is for a file, and images are a folder", id="a folder's hash"),
    ],
)
def test_other_data_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read_data(text)
    assert str(caught.value).startswith(message) or message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("model", Source(name="model", path=Path("model")), id="a folder"),
        pytest.param("Qwen/Qwen2-7B", Source(name="Qwen/Qwen2-7B", path=None), id="hub"),
        pytest.param("Qwen/Qwen2-7B@v1", Source(name="Qwen/Qwen2-7B", path=None, revision="v1"), id="with a revision"),
        pytest.param("gpt2", Source(name="gpt2", path=None), id="hub, without a slash"),
        pytest.param("org/name", Source(name="org/name", path=Path("org/name")), id="a folder that looks like the hub"),
        pytest.param("./gone", Source(name="./gone", path=Path("./gone")), id="a path, by its dot"),
        pytest.param("/gone@x", Source(name="/gone@x", path=Path("/gone@x")), id="a path, by its slash"),
        pytest.param("a/b/c", Source(name="a/b/c", path=Path("a/b/c")), id="too deep for the hub"),
    ],
)
def test_a_model_is_a_folder_or_a_name_on_the_hub(place: Path, text: str, expected: Source) -> None:
    path = None if expected.path is None else place / expected.path
    assert read_model(text, place) == Source(name=expected.name, path=path, revision=expected.revision)


def test_no_model_is_refused() -> None:
    with pytest.raises(OptionError, match="no model; write a folder, or ORG/NAME"):
        read_model(" ")


def test_a_home_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read_model("~/qwen2").path == Path("/home/me/qwen2")


def inputs(place: Path, **settings: Any) -> TrainingInputs:
    given = {"data": (), "model": None, "resume": False, "scratch": None, "golden": None, **settings}
    return TrainingInputs.of(SimpleNamespace(**given))


def test_nothing_given_is_nothing_wrong(place: Path) -> None:
    nothing = inputs(place)
    assert nothing == TrainingInputs()
    assert (nothing.told(), nothing.problems(), dict(nothing.data)) == ({}, [], {})


def test_what_is_there_is_no_problem_and_is_told(place: Path) -> None:
    found = inputs(
        place,
        data=(read_data("pictures", place), read_data("function_calls=o/c@v1", place)),
        model=read_model("model", place),
        scratch=place,
        resume=True,
    )
    assert found.problems() == []
    assert found.data["images"].path == place / "pictures"
    assert found.told() == {
        "--gpucluster-data images": f"{place}/pictures",
        "--gpucluster-data function_calls": "o/c@v1 on the hub",
        "--gpucluster-model": f"{place}/model",
        "--gpucluster-scratch": f"{place}",
        "--gpucluster-resume": "yes",
    }


def test_a_pipe_is_not_waited_for(place: Path) -> None:
    os.mkfifo(place / "pipe")
    found = TrainingInputs(
        data={"function_calls": Source(name="pipe", path=place / "pipe")}, golden=place / "pipe"
    ).problems()
    assert found == [
        "--gpucluster-data function_calls=pipe: is a pipe or a device, and must be a file",
        f"--gpucluster-golden {place}/pipe: is a pipe or a device, and must be a file",
    ]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        pytest.param({"data": "images=gone"}, "--gpucluster-data images=gone: no such folder", id="images gone"),
        pytest.param(
            {"data": "images=rows.json"},
            "--gpucluster-data images=rows.json: is a file, and must be a folder",
            id="images a file",
        ),
        pytest.param(
            {"data": "function_calls=./gone"}, "--gpucluster-data function_calls=./gone: no such file", id="rows gone"
        ),
        pytest.param(
            {"data": "function_calls=pictures"},
            "--gpucluster-data function_calls=pictures: is a folder, and must be a file",
            id="rows a folder",
        ),
        pytest.param(
            {"model": "./gone"},
            "--gpucluster-model ./gone: no such folder, and that is no name on the hub (ORG/NAME[@REVISION])",
            id="model gone",
        ),
        pytest.param(
            {"model": "rows.json"}, "--gpucluster-model rows.json: is a file, and must be a folder", id="model a file"
        ),
        pytest.param(
            {"model": "pictures"},
            "--gpucluster-model pictures: the folder has no config.json; name one that save_pretrained or the hub has "
            "made",
            id="no model in it",
        ),
        pytest.param({"scratch": "gone"}, "--gpucluster-scratch {place}/gone: no such folder", id="scratch gone"),
        pytest.param({"golden": "gone"}, "--gpucluster-golden {place}/gone: no such file", id="golden gone"),
        pytest.param(
            {"golden": "pictures"},
            "--gpucluster-golden {place}/pictures: is a folder, and must be a file",
            id="golden a folder",
        ),
        pytest.param(
            {"golden": "rows.json"},
            "--gpucluster-golden {place}/rows.json: no golden curve: its format is not 'pytest-gpucluster golden "
            "curve'; make one with gpucluster golden",
            id="golden something else",
        ),
    ],
)
def test_what_is_not_there_is_named_with_its_option(place: Path, settings: dict[str, str], problem: str) -> None:
    readers: dict[str, Any] = {
        "data": lambda text: (read_data(text, place),),
        "model": lambda text: read_model(text, place),
        "scratch": lambda text: place / text,
        "golden": lambda text: place / text,
    }
    found = inputs(place, **{name: readers[name](text) for name, text in settings.items()})
    assert found.problems() == [problem.format(place=place)]


def test_a_scratch_folder_must_be_writable(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # everything is allowed to root
    [problem] = inputs(place, scratch=place / "pictures").problems()
    assert problem == f"--gpucluster-scratch {place}/pictures: nothing can be written into it"
