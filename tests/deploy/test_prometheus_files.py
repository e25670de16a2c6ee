"""deploy/prometheus: the rules fire on the product's own metrics of runs that were not accepted, and on no other."""

import json
import re
import subprocess

import example_runs
import pytest
import yaml
from deploy_files import ROOT
from programs import require_program

from pytest_gpucluster.reports import prometheus

RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "prometheus" / "dashboard.json"
ENDS = "gpucluster_run_end_timestamp_seconds"
ALERTS = {
    "accepted": set(),
    "cluster": {"ClusterNotAccepted", "GpuFailedAcceptance"},
    "rehearsal": {"ClusterNotAccepted"},
    "broken": {"ClusterNotAccepted", "AcceptanceWasCutOff"},
    "": {"ClusterNotAccepted"},
}
"""Example of a run -> the alerts about it; "": no metrics at all."""


def metrics(name):
    """The lines of metrics.prom of an example; the time of its end, in seconds."""
    lines = prometheus.render(example_runs.journal_of(name)).splitlines() if name else []
    samples = [re.fullmatch(r"(\S+?(?:\{.*\})?) (\S+)", line).groups() for line in lines if not line.startswith("#")]
    return samples, next((float(value) for series, value in samples if series == ENDS), 0.0)


def expressions():
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [*rules, *(target["expr"] for panel in panels for target in panel["targets"])]


def test_rules_and_dashboard_ask_for_metrics_and_labels_that_there_are():
    samples, _ = metrics("cluster")
    known = {re.match(r"\w+", series)[0] for series, _ in samples}
    labels = {label for series, _ in samples for label in re.findall(r'(\w+)="', series)} | {"instance"}
    text = RULES.read_text() + DASHBOARD.read_text()
    asked = {name for expression in expressions() for name in re.findall(r"gpucluster_\w+", expression)}
    assert len(asked) > 5
    assert asked <= known
    assert set(re.findall(r"(?:\$labels\.|\{\{)(\w+)", text)) <= labels


@pytest.mark.extended
@pytest.mark.parametrize("name", ALERTS)
def test_what_is_not_accepted_fires_and_what_is_accepted_does_not(name, tmp_path):
    promtool = require_program("promtool")
    samples, end = metrics(name)
    rules = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]

    def alerts_of(age):
        """Return what is not as a test says that expects no alert at all."""
        now = f"{int(end + age)}s"
        series = [{"series": series, "values": f"{value}x1"} for series, value in samples]
        cases = [{"eval_time": now, "alertname": rule, "exp_alerts": []} for rule in rules]
        path = tmp_path / "test.yaml"
        test = {"interval": now, "input_series": series, "alert_rule_test": cases}
        path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": now, "tests": [test]}))
        done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=60)
        return set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr))

    assert alerts_of(3600) == ALERTS[name]
    if end:
        assert alerts_of(31 * 86400) == ALERTS[name] | {"AcceptanceIsOld"}


@pytest.mark.extended
def test_promtool_reads_every_expression(tmp_path):
    promtool = require_program("promtool")
    shown = [expression.replace("$__range", "30d") for expression in expressions()]
    path = tmp_path / "rules.yaml"
    rules = [{"record": f"a:{number}", "expr": shown} for number, shown in enumerate(shown)]
    path.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    for file in (RULES, path):
        done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
