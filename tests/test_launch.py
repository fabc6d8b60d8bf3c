"""The launch scripts: what they select and reject, and that their exit codes are correct."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

# The launcher of a real run takes half a minute. What is tested here is what the script makes of its end, so a launcher
# that ends in a chosen way replaces it: it gets the same arguments.
LAUNCHER = """\
#!/bin/sh
printf '%s\\n' "$@" > "$SEEN"
case "$ENDING" in
    success) mkdir -p "$OUTPUT" && touch "$OUTPUT/results.json" ;;
    silent) sleep 60 & echo $! > "$OUTPUT/rank" ;;
    failure) exit 7 ;;
    hang) sleep 60 & echo $! > "$OUTPUT/rank"; wait ;;
esac
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that the scripts accept as complete, with the launcher above."""
    path = tmp_path_factory.mktemp("house") / "a venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    launcher = path / "bin" / "deepspeed"
    launcher.write_text(LAUNCHER, encoding="utf-8")
    launcher.chmod(0o755)
    key = bash("source launch/_venv.sh; stamp_key", DS_TRAINER_VENV=str(path)).stdout.strip()
    assert len(key) == 64
    (path / ".ds_trainer_run").write_text(key, encoding="utf-8")
    return path


def bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the clone as a user's shell would, without the settings of the tests."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHON", "NPROC", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    }
    command = ["bash", "-c", f"set -euo pipefail; {code}"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=clean | environment, check=False, timeout=60
    )


class Quickstart:
    """launch/quickstart.sh with a launcher that ends in a given way."""

    def __init__(self, venv: Path, tmp_path: Path) -> None:
        self.output, self.seen = tmp_path / "out", tmp_path / "seen"
        self.environment = {"DS_TRAINER_VENV": str(venv), "OUTPUT": str(self.output), "SEEN": str(self.seen)}

    def __call__(self, ending: str, options: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        options = options or f"--arguments.output_dir '{self.output}'"
        return bash(f"launch/quickstart.sh {options}", ENDING=ending, **self.environment, **environment)

    def rank(self) -> int | None:
        """The process that the launcher has left running, once it has said which."""
        path = self.output / "rank"
        return int(text) if path.exists() and (text := path.read_text(encoding="utf-8").strip()) else None

    def option(self, name: str) -> str:
        argv = self.seen.read_text(encoding="utf-8").splitlines()
        return argv[argv.index(name) + 1]


def wait_for_end(process: int | None) -> None:
    assert process is not None
    deadline = time.monotonic() + 30
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def quickstart(venv: Path, tmp_path: Path) -> Quickstart:
    return Quickstart(venv, tmp_path)


@pytest.mark.parametrize("form", ["--arguments.output_dir {}", "--arguments.output_dir={} --arguments.max_steps 3"])
def test_quickstart_succeeds_if_the_job_wrote_results(quickstart: Quickstart, form: str) -> None:
    completed = quickstart("success", form.format(quickstart.output))
    assert completed.returncode == 0, completed.stderr
    argv = quickstart.seen.read_text(encoding="utf-8").splitlines()
    at = argv.index("ds_trainer")
    assert argv[at - 1] == "--module"
    assert argv[at : at + 3] == ["ds_trainer", "train", "ds_configs/recipes/quickstart.yaml"]
    assert argv[at + 3 :] == form.format(quickstart.output).split()


def test_quickstart_fails_if_the_launcher_returns_0_without_results(quickstart: Quickstart) -> None:
    quickstart.output.mkdir()
    (quickstart.output / "results.json").touch()  # of an earlier run
    completed = quickstart("silent")
    assert completed.returncode == 1
    assert "results.json is missing" in completed.stderr
    wait_for_end(quickstart.rank())


def test_quickstart_fails_when_the_launcher_fails(quickstart: Quickstart) -> None:
    completed = quickstart("failure")
    assert completed.returncode == 1
    assert "exit code 7" in completed.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="counts cores by affinity")
def test_quickstart_selects_processes_and_threads(quickstart: Quickstart, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: A Card (UUID: GPU-$i)"; done\n', encoding="utf-8")
    smi.chmod(0o755)
    gpus = {"PATH": f"{tools}:{os.environ['PATH']}"}
    cores = len(os.sched_getaffinity(0))

    completed = quickstart("success", **gpus)
    assert quickstart.option("--num_gpus") == "4"
    assert f"4 processes (4 GPUs, {cores} cores), {max(1, cores // 4)} threads each" in completed.stdout
    quickstart("success", CUDA_VISIBLE_DEVICES="1,3", **gpus)
    assert quickstart.option("--include") == "localhost:1,3"
    quickstart("success", CUDA_VISIBLE_DEVICES="1,3", NPROC="1", **gpus)
    assert quickstart.option("--include") == "localhost:1"
    quickstart("success", CUDA_VISIBLE_DEVICES="", **gpus)
    assert quickstart.option("--num_gpus") == str(min(2, cores))
    assert quickstart.option("--arguments.use_cpu") == "true"
    assert "name GPUs by number" in quickstart("success", CUDA_VISIBLE_DEVICES="GPU-1", **gpus).stderr
    quickstart("success", NPROC="3", OMP_NUM_THREADS="5", **gpus)
    assert quickstart.option("--num_gpus") == "3"
    for wrong, message in (("5", "there are 4 GPUs"), ("two", "NPROC=two"), ("0", "NPROC=0")):
        completed = quickstart("success", NPROC=wrong, **gpus)
        assert completed.returncode == 1 and message in completed.stderr

    smi.write_text("#!/bin/sh\necho 'no driver'; exit 9\n", encoding="utf-8")
    quickstart("success", **gpus)
    assert quickstart.option("--num_gpus") == str(min(2, cores))


def test_stopping_quickstart_stops_its_ranks(quickstart: Quickstart) -> None:
    quickstart.output.mkdir()
    environment = os.environ | quickstart.environment | {"ENDING": "hang"}
    command = ["launch/quickstart.sh", f"--arguments.output_dir={quickstart.output}"]
    script = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while (rank := quickstart.rank()) is None:
        assert time.monotonic() < deadline and script.poll() is None
        time.sleep(0.05)
    os.kill(rank, 0)  # it lives
    script.terminate()
    assert script.wait(timeout=30) == 130
    wait_for_end(rank)


def test_environment_is_updated_when_its_requirements_change(venv: Path, tmp_path: Path) -> None:
    code = "make_venv; key=$(stamp_key); stamped run $key && ! stamped dev $key && ! stamped run x"
    assert bash(f"source launch/_venv.sh; {code}", DS_TRAINER_VENV=str(venv)).returncode == 0
    for name in ("pyproject.toml", "constraints.txt", "launch/_venv.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    keys = [bash("source launch/_venv.sh; stamp_key", DS_TRAINER_VENV=str(venv)).stdout]
    for text in ("", "# changed\n"):
        with (tmp_path / "constraints.txt").open("a", encoding="utf-8") as file:
            file.write(text)
        keys.append(bash(f"source '{tmp_path}/launch/_venv.sh'; stamp_key", DS_TRAINER_VENV=str(venv)).stdout)
    assert len({key for key in keys if key}) == 3  # this clone, another clone, another pin


def test_unusable_environments_are_rejected(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3.9\n", encoding="utf-8")
    old.chmod(0o755)
    make = "source launch/_venv.sh; make_venv"
    fresh = str(tmp_path / "fresh")

    def error(**environment: str) -> str:
        completed = bash(make, **environment)
        assert completed.returncode == 1
        return completed.stderr

    assert "is Python 3.9; Python 3.10 to 3.13 is required" in error(PYTHON=str(old), DS_TRAINER_VENV=fresh)
    assert "does not run" in error(PYTHON=str(tmp_path / "absent"), DS_TRAINER_VENV=fresh)
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "thesis.tex").touch()
    assert "is not a virtual environment" in error(DS_TRAINER_VENV=fresh)
    assert (tmp_path / "fresh" / "thesis.tex").exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_files_pass_shellcheck(tmp_path: Path) -> None:
    scripts = [*(ROOT / "launch").glob("*.s*"), ROOT / ".ci" / "run", *(ROOT / "tests").rglob("*.sh")]
    scripts += (ROOT / "benchmarks").glob("*.sh")
    assert {"_slurm.sh", "_venv.sh", "run", "nodes_srun.sbatch", "cluster.sh", "gpu.sh"} <= {
        path.name for path in scripts
    }
    command = ["shellcheck", "--external-sources"]
    completed = subprocess.run([*command, *map(str, scripts)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert completed.returncode == 0, completed.stdout
    wrong = tmp_path / "wrong.sh"
    wrong.write_text("#!/bin/sh\nrm $1\n", encoding="utf-8")
    assert subprocess.run([*command, str(wrong)], capture_output=True, check=False).returncode == 1
