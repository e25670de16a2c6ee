"""Every command that a page shows is one that its program takes, with files, tests and options that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import doc_pages
import program_help
import pytest
import shell_words
import yaml
from browser import require_program
from doc_pages import ROOT, Block
from shown_programs import Reader, complaints, made_by
from suite_names import Item

COMMENTED = re.compile(r"^\s*# {2,}((?:sbatch|srun|salloc|kubectl|gpucluster|docker|make|python|torchrun) [^\[]*)$")
"""What stands in brackets is a usage line."""
PAGES = [page for page in doc_pages.every_page() if page.blocks_of("console", "bash")]


def typed(value: object) -> Iterator[str]:
    """The command lines in the steps of a CI's file: GitHub's `run`, GitLab's `script`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("run", "script", "before_script", "after_script"):
                yield from [inner] if isinstance(inner, str) else map(str, inner if isinstance(inner, list) else ())
            else:
                yield from typed(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from typed(inner)


def told(text: str, config: pytest.Config, items: tuple[Item, ...], made: tuple[str, ...] = ()) -> list[str]:
    """What is said of a block with these lines."""
    block = Block(page="page.md", line=1, language="console", text=text, before="")
    return complaints(block, Reader(config=config, items=items, made=made))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_that_its_program_takes(page, pytestconfig, items):
    reader = Reader(config=pytestconfig, items=items, made=made_by(page.blocks))
    wrong = [complaint for block in page.blocks_of("console") for complaint in complaints(block, reader)]
    assert wrong == []


@pytest.mark.parametrize("page", doc_pages.every_page(), ids=lambda page: page.name)
def test_every_command_in_the_steps_of_a_ci_is_one(page, pytestconfig, items):
    wrong = []
    for block in page.blocks_of("yaml"):
        for document in yaml.safe_load_all(block.text):
            for line in typed(document):
                shown = replace(block, language="console", text=f"{line}\n")
                wrong += complaints(shown, Reader(config=pytestconfig, items=items, made=made_by(page.blocks)))
    assert wrong == []


def deployed() -> list[str]:
    """The files of deploy/ with commands in their comments, such as `#   sbatch deploy/slurm/acceptance.sbatch`."""
    found = [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and "node_modules" not in path.parts]
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path.suffix != ".pyc" and in_comments(path))


def in_comments(path: Path) -> str:
    """The commands in the comments of a file, each in its line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "".join(f"{match[1]}\n" if (match := COMMENTED.match(line)) else "\n" for line in lines).rstrip("\n")


@pytest.mark.parametrize("name", deployed())
def test_commands_in_the_comments_of_deployed_files_are_such_too(name, pytestconfig, items):
    text = in_comments(ROOT / name)
    block = Block(page=name, line=1, language="console", text=f"{text}\n", before="")
    assert complaints(block, Reader(config=pytestconfig, items=items)) == []


def test_the_steps_of_a_ci_are_found():
    steps = yaml.safe_load("jobs: {a: {steps: [{uses: x}, {run: gpucluster info}]}, b: {script: [make test, ls]}}")
    assert list(typed(steps)) == ["gpucluster info", "make test", "ls"]


def test_there_are_commands_of_every_kind_to_look_at():
    shown = {
        command.words[0]
        for page in PAGES
        for block in page.blocks_of("console")
        for command in shell_words.commands(block.text)
    }
    assert {"gpucluster", "pytest", "torchrun", "make", "python", "srun", "salloc", "mpirun", "ssh"} <= shown


@pytest.mark.parametrize("program", ["sbatch", "srun", "salloc", "kubectl"])
def test_programs_that_know_their_own_options_are_here(program):
    require_program(program)
    if program == "kubectl":
        assert {"get", "apply", "logs", "cp", "wait"} <= program_help.kubectl_commands()
        assert (program_help.kubectl_options("apply") or {})["-k"] is True
        assert program_help.kubectl_options("aply") == {}
    else:
        known = program_help.slurm_options(program) or {}
        assert (known["--nodes"], known["-N"], known["--exclusive"], known["--no-kill"]) == (True, True, None, False)


WRONG = {
    "an unknown program": ("gpuclutser info", "gpuclutser: no program that is known here"),
    "an unknown command": ("gpucluster informations", "invalid choice"),
    "an unknown option": ("gpucluster verdict gpucluster-report/latest --jsno answer.json", "--jsno"),
    "a missing argument": ("gpucluster verdict", "are required: JOURNAL"),
    "an option of pytest behind run": ("gpucluster run -- acceptance/ --gpucluster-devise=cpu", "--gpucluster-devise"),
    "an option of torchrun before it": ("gpucluster run --nprocs=8 -- acceptance/", "--nprocs"),
    "run without anything": ("gpucluster run --nproc-per-node=8", "nothing says what pytest is to run"),
    "an argument of a sweep": (
        "gpucluster sweep slurm --expect 8xH100 -- acceptance/ -k nothing_like_it",
        "nothing_like_it",
    ),
    "an argument of nccl-tests": (
        "gpucluster crosscheck nccl-tests gpucluster-report/latest -- --warm 5",
        "--warm: no option",
    ),
    "an argument of nccl-tests that is not the operator's": (
        "gpucluster crosscheck nccl-tests gpucluster-report/latest -- -b 8",
        "'-b' after -- is decided here",
    ),
    "a path that is not there": ("pytest acceptence/", "acceptence/: there is no such file"),
    "a test that is not there": ("pytest acceptance/test_hbm.py::test_hmb", "test_hmb: there is no such test"),
    "a name behind -k": ("torchrun -m pytest acceptance/ -k 'hbm or nvme'", "nothing that would run has nvme"),
    "a selection of nothing": ("pytest acceptance/ -k 'hbm and matmul'", "selects no test"),
    "a marker": ("pytest acceptance/ -m singel_gpu", "there is no marker singel_gpu"),
    "an expression": ("pytest acceptance/ -k 'hbm or'", "-k 'hbm or'"),
    "the value of an option of ours": (
        "pytest acceptance/ --gpucluster-expect=2xH100x8",
        "--gpucluster-expect 2xH100x8",
    ),
    "a key of the workload": ("pytest acceptance/ --gpucluster-workload matmul.size=8192", "matmul.size"),
    "a profile": ("pytest acceptance/ --gpucluster-profile=fast", "--gpucluster-profile fast"),
    "an option of xdist": ("pytest -n 8 --dists each acceptance/", "--dists"),
    "an option of torchrun": ("torchrun --nproc_per_nodes=8 -m pytest acceptance/", "--nproc_per_nodes"),
    "a target of make": ("make tests", "make tests: no target"),
    "an extra of pip": ("python -m pip install -e '.[lorra]'", "there is no extra lorra"),
    "a file of constraints": ("python -m pip install -c constraint.txt -e .", "constraint.txt: there is no such file"),
    "a module": ("python -m pytset acceptance/", "python -m pytset"),
    "a script": ("python perf/loaders.py", "perf/loaders.py: there is no such file"),
    "an option of a shell script": ("deploy/kubernetes/collect.sh --jobb x reports", "it has no option --jobb"),
    "an option of a script": ("python perf/loader.py --datas /data", "it has no option --datas"),
    "an option of srun": ("srun --node=2 gpucluster info", "srun --node: no option of srun"),
    "what srun runs": ("srun --nodes=2 gpucluster inform", "invalid choice"),
    "an option of sbatch": ("sbatch --node 2 deploy/slurm/acceptance.sbatch", "sbatch --node: no option of sbatch"),
    "a script of sbatch": ("sbatch deploy/slurm/acceptence.sbatch", "acceptence.sbatch: there is no such file"),
    "what mpirun runs": ("mpirun -n 2 python -m pytest acceptance/ -m nvlink", "there is no marker nvlink"),
    "what ssh runs": ("ssh gpu-07 gpucluster wach", "invalid choice"),
    "what ssh is given in quotes": ("ssh gpu-07 'cd /opt && gpucluster wach'", "invalid choice"),
    "a command of kubectl": ("kubectl aply -k deploy/", "kubectl aply: no command of kubectl"),
    "an option of kubectl": ("kubectl get pods --namspace=gpu", "kubectl get --namspace: no option"),
    "an option of a longer command": ("kubectl create secret generic it --from-fil=x", "generic --from-fil: no option"),
    "a kustomization": ("kubectl apply -k deploy/hooks", "there is no kustomization.yaml in it"),
    "a manifest": ("kubectl apply -f deploy/nothing.yaml", "deploy/nothing.yaml: there is no such file"),
    "what is run in a pod": ("kubectl exec acceptance-0 -- gpucluster inform", "invalid choice"),
    "a Dockerfile": ("docker build -f deploy/Dockerfile.none .", "Dockerfile.none: there is no such file"),
    "an option of docker": ("docker run --gpu all IMAGE", "docker run --gpu: no option"),
    "a prompt": ("$ gpucluster info", "no prompts"),
    "dots": ("torchrun ... -m pytest acceptance/", "a command is shown whole"),
    "a variable": (
        "GPUCLUSTER_DEVISE=cpu gpucluster run -- acceptance/",
        "GPUCLUSTER_DEVISE: no variable",
    ),
    "an exported variable": ("export GPUCLUSTER_DEVISE=cpu\ngpucluster run -- acceptance/", "GPUCLUSTER_DEVISE"),
    "a quote": ("gpucluster sweep slurm --nodes 'gpu-[1-2]", "unexpected EOF"),
    "a file in the repository": ("cat deploy/slurm/nothing.txt", "deploy/slurm/nothing.txt: there is no such file"),
    "the second of two": ("gpucluster info && gpucluster inform", "invalid choice"),
    "behind a pipe": ("gpucluster info --json | jqq .", "jqq: no program"),
    "inside a substitution": ('echo "$(gpucluster inform)"', "invalid choice"),
    "inside a loop": ("for n in a b; do gpucluster inform; done", "invalid choice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_fault_is_named(name, pytestconfig, items):
    text, expected = WRONG[name]
    for program in ("srun", "sbatch", "kubectl"):
        if text.startswith(program):
            require_program(program)
    [complaint, *_] = told(f"make help\n{text}\n", pytestconfig, items)
    assert expected in complaint
    assert re.match(r"page\.md:[123]: ", complaint)


RIGHT = [
    "gpucluster --version",
    "gpucluster run --nproc-per-node=8 -- acceptance/ -k nccl",
    "R=$(ls -d gpucluster-report/latest); gpucluster verdict $R > verdict.txt 2>&1 || echo $?",
    "for n in gpu-001 gpu-002; do ssh -o BatchMode=yes $n 'cd /opt && gpucluster info --json' > $n.json; done",
    "srun --nodes=2 --ntasks-per-node=1 --container-image=x gpucluster info --json  # one operator's comment",
    "kubectl -n gpu get pods -l app=acceptance -o wide",
    "kubectl logs -f job/acceptance | tee log.txt",
    "cat > x.yaml <<'EOF'\nit isn't: a command\nEOF",
    "docker run --rm --gpus all --shm-size=8g registry.example/gpucluster-acceptance:0.1.0 gpucluster info",
    "pytest test_mine.py -k anything",
    "sudo nvidia-smi -q -d ECC",
    "pytest --help",
    'export PYTEST_ADDOPTS="-k hbm"',
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_right_is_not_complained_of(text, pytestconfig, items):
    assert told(f"{text}\n", pytestconfig, items, made=("test_mine.py",)) == []
