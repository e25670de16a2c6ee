import os
import re
from pathlib import Path

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.session import options, xdist
from pytest_gpucluster.session.options import OPTIONS, Timeouts, active, asked_for, positive_seconds, resolve

INI = "gpucluster_deadline = 30\ngpucluster_sku = from-ini\n"


@pytest.fixture
def configure(pytester, monkeypatch):
    """Make pytest's configuration of an empty project, from command line and ini; nothing is started."""
    for name in [name for name in os.environ if name.startswith("GPUCLUSTER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(xdist.environment, "prepare", lambda environ: None)

    def make(*arguments, ini=""):
        pytester.makeini(f"[pytest]\n{ini}")
        return pytester.parseconfig(*arguments)

    return make


def test_the_options_are_these_and_no_others():
    frozen = [(option.flag, option.dest, option.variable, option.metavar, option.default) for option in OPTIONS]
    assert frozen == [
        ("--gpucluster-device", "gpucluster_device", "GPUCLUSTER_DEVICE", "DEVICE", "cuda"),
        ("--gpucluster-simulate", "gpucluster_simulate", "GPUCLUSTER_SIMULATE", "WHAT", None),
        ("--gpucluster-expect", "gpucluster_expect", "GPUCLUSTER_EXPECT", "NODESxGPUS[xSKU]", None),
        ("--gpucluster-thresholds", "gpucluster_thresholds", "GPUCLUSTER_THRESHOLDS", "FILE", None),
        ("--gpucluster-sku", "gpucluster_sku", "GPUCLUSTER_SKU", "NAME", None),
        ("--gpucluster-profile", "gpucluster_profile", "GPUCLUSTER_PROFILE", "PROFILE", "full"),
        ("--gpucluster-workload", "gpucluster_workload", "GPUCLUSTER_WORKLOAD", "KEY=VALUE", None),
        ("--gpucluster-report-dir", "gpucluster_report_dir", "GPUCLUSTER_REPORT_DIR", "DIR", "gpucluster-report"),
        ("--gpucluster-deadline", "gpucluster_deadline", "GPUCLUSTER_DEADLINE", "SECONDS", "300"),
        ("--gpucluster-require", "gpucluster_require", "GPUCLUSTER_REQUIRE", "CRITERIA", ""),
        ("--gpucluster-timeouts", "gpucluster_timeouts", "GPUCLUSTER_TIMEOUTS", "NAME=SECONDS,...", ""),
        ("--gpucluster-data", "gpucluster_data", "GPUCLUSTER_DATA", "NAME=PATH", None),
        ("--gpucluster-model", "gpucluster_model", "GPUCLUSTER_MODEL", "PATH|NAME[@REVISION]", None),
        ("--gpucluster-scratch", "gpucluster_scratch", "GPUCLUSTER_SCRATCH", "DIR", None),
        ("--gpucluster-resume", "gpucluster_resume", "GPUCLUSTER_RESUME", "yes|no", "no"),
        ("--gpucluster-reference-curve", "gpucluster_reference_curve", "GPUCLUSTER_REFERENCE_CURVE", "FILE", None),
        ("--gpucluster-baseline", "gpucluster_baseline", "GPUCLUSTER_BASELINE", "JOURNAL", None),
        ("--gpucluster-baseline-fail", "gpucluster_baseline_fail", "GPUCLUSTER_BASELINE_FAIL", "PERCENT", "3%"),
    ]
    assert [option.flag for option in OPTIONS if option.repeatable] == ["--gpucluster-workload", "--gpucluster-data"]
    assert [option.flag for option in OPTIONS if option.bare] == ["--gpucluster-resume"]


def test_nothing_given_means_the_defaults(configure):
    settings = resolve(configure(), {})
    assert (settings.deadline, settings.report_dir, settings.baseline_fail) == (300.0, Path("gpucluster-report"), 0.03)
    assert (settings.require, settings.workload, settings.data, settings.resume) == ((), (), (), "no")
    assert settings.timeouts == Timeouts()
    assert {setting.origin for setting in settings.settings.values()} == {"default"}


@pytest.mark.parametrize(
    ("arguments", "environ", "ini", "value", "origin"),
    [
        pytest.param([], {}, "", 300.0, "default", id="nothing"),
        pytest.param([], {}, INI, 30.0, "ini", id="ini over default"),
        pytest.param([], {"GPUCLUSTER_DEADLINE": "20"}, INI, 20.0, "environment", id="environment over ini"),
        pytest.param(
            ["--gpucluster-deadline=10"], {"GPUCLUSTER_DEADLINE": "20"}, INI, 10.0, "command line", id="command line"
        ),
        pytest.param(["-o", "gpucluster_deadline=40"], {}, INI, 40.0, "ini", id="an overridden ini setting"),
    ],
)
def test_the_closest_setting_counts_and_its_origin_is_known(configure, arguments, environ, ini, value, origin):
    settings = resolve(configure(*arguments, ini=ini), environ)
    assert settings.deadline == value
    assert settings.settings["deadline"].origin == origin
    assert settings.settings["device"].origin == "default"


def test_settings_are_read_by_name_and_unknown_names_are_no_settings(configure):
    settings = resolve(configure("--gpucluster-require=lora, matmul ,,", "--gpucluster-thresholds=a b.yaml"), {})
    assert settings.require == ("lora", "matmul")
    assert settings.thresholds == Path("a b.yaml")
    with pytest.raises(AttributeError, match="no_such"):
        _ = settings.no_such


def test_settings_go_on_record_as_text_with_their_origin(configure):
    body = resolve(configure("--gpucluster-deadline=10"), {"GPUCLUSTER_SKU": "B200"}).to_json()
    assert body["deadline"] == {"value": "10.0", "origin": "command line"}
    assert body["sku"] == {"value": "B200", "origin": "environment"}
    assert body["expect"] == {"value": None, "origin": "default"}
    assert list(body) == [option.name.replace("-", "_") for option in OPTIONS]


WRONG = {
    "command line": ("--gpucluster-device=gpu", "--gpucluster-device gpu: 'gpu' .*: cuda, cpu, simulated"),
    "environment": ({"GPUCLUSTER_DEVICE": "CPU"}, "GPUCLUSTER_DEVICE=CPU: 'CPU' .*: cuda, cpu, simulated"),
    "an empty variable is not the default": (
        {"GPUCLUSTER_DEVICE": ""},
        "GPUCLUSTER_DEVICE=: '' .*: cuda, cpu, simulated",
    ),
    "ini": ("ini: gpucluster_deadline = soon", "{ini}: gpucluster_deadline = soon: 'soon' .* seconds"),
    "a timeout that is none": (
        "--gpucluster-timeouts=grce=1",
        "--gpucluster-timeouts grce=1: .* 'grce'; .*: join, grace, stuck, dead, unresponsive, terminate, .*",
    ),
    "a timeout twice": (
        "--gpucluster-timeouts=grace=1,grace=2",
        "--gpucluster-timeouts grace=1,grace=2: timeout 'grace' is given twice.*",
    ),
    "a profile that is none": ("--gpucluster-profile=fast", "--gpucluster-profile fast: 'fast' .*: quick, full, soak"),
    "the profile of a rehearsal": ("--gpucluster-profile=cpu", "--gpucluster-profile cpu: 'cpu' .*: quick, full, soak"),
    "some of several": (
        "--gpucluster-workload=matmul.sizes=17 --gpucluster-workload=health.mig=on --gpucluster-workload=x",
        "--gpucluster-workload matmul.sizes=17: matmul.sizes: 17 .* 16 from 16 to 65536\n"
        "--gpucluster-workload x: 'x' .* KEY=VALUE, .*",
    ),
    "one of several in the environment": (
        {"GPUCLUSTER_WORKLOAD": "matmul.window=5; health.mig=on"},
        "GPUCLUSTER_WORKLOAD=matmul.window=5: matmul.window: '5' .*: write '5 s'",
    ),
    "one of several in the ini file": (
        "ini: gpucluster_workload =\n    health.mig = on\n    health.load = soon",
        "{ini}: gpucluster_workload = health.load = soon: health.load: 'soon' .* '400 s'",
    ),
    "a key twice": (
        "--gpucluster-workload=health.load=1s --gpucluster-workload=health.load=2s",
        "--gpucluster-workload health.load=...: health.load .* 2 times",
    ),
    "data of no name, and twice": (
        "--gpucluster-data=picures=/data --gpucluster-data=images=/a --gpucluster-data=images=/b",
        "--gpucluster-data picures=/data: .* 'picures'; .*: images=FOLDER, function_calls=FILE.*\n"
        "--gpucluster-data images=...: images .* 2 times",
    ),
    "nothing to go on from": (
        "--gpucluster-resume",
        r"--gpucluster-resume \(command line\): .* --gpucluster-scratch, .*",
    ),
    "nothing to simulate": (
        "--gpucluster-device=simulated",
        r"--gpucluster-device=simulated \(command line\): .*; add --gpucluster-simulate=2x8xH100, .* YAML file",
    ),
    "nothing to simulate, by an empty variable": (
        {"GPUCLUSTER_DEVICE": "simulated", "GPUCLUSTER_SIMULATE": ""},
        r"--gpucluster-device=simulated \(environment\): .*; add --gpucluster-simulate=2x8xH100, .* YAML file",
    ),
    "simulated on GPUs": (
        "--gpucluster-simulate=2x8xH100",
        r"--gpucluster-simulate \(command line\): does nothing without --gpucluster-device=simulated, .* is cuda",
    ),
    "a flag that took a path for its value": (
        "--gpucluster-resume acceptance/",
        "--gpucluster-resume acceptance/: 'acceptance/' .*: yes, no",
    ),
    "a path that is empty": ({"GPUCLUSTER_SCRATCH": " "}, "GPUCLUSTER_SCRATCH= : no path"),
    "all of them at once": (
        "--gpucluster-device=x --gpucluster-deadline=0",
        "--gpucluster-device x: 'x' .*: cuda, cpu, simulated\n--gpucluster-deadline 0: '0' .* seconds",
    ),
}
"""Options, or variables of the environment, or lines of the ini file -> what the complaint says."""


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_value_is_told_with_its_place_and_what_is_allowed(configure, which):
    given, message = WRONG[which]
    text = given if isinstance(given, str) else ""
    ini = text.removeprefix("ini: ") if text.startswith("ini: ") else ""
    config = configure(*([] if ini else text.split()), ini=ini)
    with pytest.raises(OptionError) as caught:
        resolve(config, {} if isinstance(given, str) else given)
    assert re.fullmatch(message.replace("{ini}", str(config.inipath)), str(caught.value)), str(caught.value)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e400", "five", "", "5 s"])
def test_seconds_are_a_positive_finite_number(text):
    for read in (positive_seconds, lambda text: Timeouts.parse(f"grace={text}")):
        with pytest.raises(OptionError, match=r"is not a (positive )?number of seconds"):
            read(text)


def test_timeouts_are_read_by_name():
    assert Timeouts.parse(" grace=2 , join=900 ,") == Timeouts(grace=2.0, join=900.0)
    every = {"join": 1.0, "grace": 2.0, "stuck": 3.0, "dead": 4.0, "unresponsive": 5.0, "terminate": 6.5}
    assert Timeouts.parse(",".join(f"{name}={seconds}" for name, seconds in every.items())) == Timeouts(**every)


@pytest.mark.parametrize(
    ("arguments", "ini", "expected"),
    [
        pytest.param(["--gpucluster-resume", "-q"], "", ("yes", "command line"), id="bare"),
        pytest.param(["--gpucluster-resume=no"], "gpucluster_resume = yes", ("no", "command line"), id="no"),
        pytest.param([], "", ("no", "default"), id="default"),
    ],
)
def test_a_flag_needs_no_value_and_may_have_one(configure, arguments, ini, expected):
    settings = resolve(configure(*arguments, "--gpucluster-scratch=/scratch", ini=ini), {})
    assert (settings.resume, settings.settings["resume"].origin) == expected


def test_data_and_model_go_on_record_as_they_were_understood(configure, tmp_path):
    ini = f"gpucluster_data =\n    images={tmp_path}\n    function_calls=org/calls@v1\ngpucluster_model = org/model"
    settings = resolve(configure(ini=ini), {})
    assert settings.to_json()["data"] == {
        "value": f"images={tmp_path}; function_calls=org/calls@v1 on the hub",
        "origin": "ini",
    }
    assert settings.to_json()["model"]["value"].startswith("org/model ")


def test_the_report_directory_is_known_also_where_another_setting_is_wrong(configure):
    config = configure("--gpucluster-device=x", "--gpucluster-report-dir=there")
    assert options.report_directory(config, {}) == Path("there")
    assert options.report_directory(configure(), {"GPUCLUSTER_REPORT_DIR": "elsewhere"}) == Path("elsewhere")
    assert options.report_directory(configure(), {}) == Path("gpucluster-report")


# ---- whether the plugin takes part ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "ini", "expected"),
    [
        pytest.param([], "", False, id="merely installed"),
        pytest.param([], "gpucluster = true", True, id="the ini setting"),
        pytest.param([], "gpucluster = false", False, id="the ini setting says no"),
        pytest.param([], "gpucluster_device = cpu", True, id="any other ini setting of it"),
        pytest.param(["--gpucluster-sku="], "", True, id="an empty option, which is an error later"),
        pytest.param(["-o", "gpucluster=true"], "", True, id="an overridden ini setting"),
    ],
)
def test_the_plugin_takes_part_where_the_project_or_the_command_line_asks(configure, arguments, ini, expected):
    assert active(configure(*arguments, ini=ini)) is expected


def test_every_option_turns_it_on_whatever_its_value(configure):
    assert [option.name for option in OPTIONS if not active(configure(f"{option.flag}=1"))] == []


@pytest.mark.parametrize(
    ("arguments", "ini", "expected"),
    [
        pytest.param([], "", False, id="nothing"),
        pytest.param(["-v", "tests"], "", False, id="other options"),
        pytest.param(["--gpucluster-device", "cpu"], "", True, id="in two words"),
        pytest.param(["-v", "--gpucluster-device=cpu"], "", True, id="in one"),
        pytest.param(["gpucluster-report/test_x.py"], "", False, id="a path of that name"),
        pytest.param([], "gpucluster = true", True, id="turned on in the ini file"),
        pytest.param([], "gpucluster_device = cpu", True, id="a setting in the ini file"),
        pytest.param([], "gpucluster_workload = health.mig=on", True, id="a list in the ini file"),
    ],
)
def test_options_are_recognised_before_pytest_has_parsed_them(configure, arguments, ini, expected):
    assert asked_for(configure(ini=ini), arguments) is expected


def test_a_path_of_the_ini_file_is_relative_to_that_file(configure, monkeypatch):
    config = configure(
        ini="gpucluster_thresholds = limits.yaml\ngpucluster_report_dir = /reports\n"
        "gpucluster_reference_curve = g.json\ngpucluster_data = images=pictures\ngpucluster_model = ./qwen2"
    )
    monkeypatch.chdir("/")
    settings = resolve(config, {"GPUCLUSTER_SKU": "H200"})
    assert settings.thresholds == config.inipath.parent / "limits.yaml"
    assert str(settings.report_dir) == "/reports"
    assert settings.reference_curve == config.inipath.parent / "g.json"
    assert settings.data[0].source.path == config.inipath.parent / "pictures"
    assert settings.model.path == config.inipath.parent / "qwen2"
    assert resolve(config, {"GPUCLUSTER_THRESHOLDS": "mine.yaml"}).thresholds == Path("mine.yaml")


def test_an_allowance_without_a_baseline_is_no_silent_nothing(configure):
    with pytest.raises(OptionError, match="without --gpucluster-baseline"):
        resolve(configure("--gpucluster-baseline-fail=5%"), {})
    with pytest.raises(OptionError, match="'much'"):
        resolve(configure("--gpucluster-baseline=x", "--gpucluster-baseline-fail=much"), {})
    assert resolve(configure("--gpucluster-baseline=x", "--gpucluster-baseline-fail=5 %"), {}).baseline_fail == 0.05


def test_the_latest_run_is_looked_up_before_this_one_becomes_it(configure, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "journal.jsonl").write_text("{}")
    (tmp_path / "latest").symlink_to("first")
    settings = resolve(configure(f"--gpucluster-baseline={tmp_path}"), {})
    assert settings.baseline == tmp_path / "first" / "journal.jsonl"
