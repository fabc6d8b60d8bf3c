"""Batch scripts: generated scripts match those of launch/, and jobs that cannot work are rejected."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ds_trainer.cli.main import main
from ds_trainer.launching.batch_script import BatchRequest, batch_script, parse_time_limit, set_sbatch_options, template
from ds_trainer.launching.launch_request import LaunchRequest, Target
from ds_trainer.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = "ds_configs/recipes/quickstart.yaml"
NAMES = ("one_node", "nodes_srun", "nodes_torchrun")


def request(*argv: str, nodes: int = 2, ranks: int = 4, launcher: str = "auto", path: str = RECIPE) -> LaunchRequest:
    return LaunchRequest(Target(path, argv), nodes=nodes, nproc_per_node=ranks, launcher=launcher)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("name", [*NAMES, "_slurm"])
def test_the_scripts_in_launch_share_their_text(name: str) -> None:
    suffix = ".sh" if name == "_slurm" else ".sbatch"
    assert (ROOT / "launch" / (name + suffix)).read_text(encoding="utf-8") == template(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_script_is_like_those_in_launch(name: str) -> None:
    """Line by line, except the values, the arguments of the job, and the shared part, which replaces its name."""
    nodes, launcher = (1 if name == "one_node" else 2), ("torchrun" if name == "nodes_torchrun" else "auto")
    text = batch_script(request(nodes=nodes, ranks=8, launcher=launcher), BatchRequest())
    assert options(text) == options(template(name))
    assert "".join(template("_slurm").splitlines(keepends=True)[2:]) in text
    end = template(name).partition('prepare "$@"\n')[2]
    assert text.endswith(f'prepare {RECIPE} "$@"\n{end}')
    assert "launch/_slurm.sh" not in text


def test_values_and_arguments_of_the_job() -> None:
    batch = BatchRequest(
        time="2-00", signal_seconds=600, partition="gpu", account="me", requeue=False, folder="/data", job_name="run",
        sbatch_args=("--qos=long",)
    )  # fmt: skip
    requested = replace(request("--data.train", "a file.txt"), environment={"WHERE": "a b"})
    text = batch_script(requested, batch)
    assert options(text) == [
        *("job-name=run", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=8", "time=2-00"),
        *("signal=B:USR1@600", "open-mode=append", "output=slurm-%j.out", "no-requeue", "chdir=/data"),
        *("partition=gpu", "account=me", "#SBATCH --qos=long".removeprefix("#SBATCH --")),
    ]
    assert "export WHERE='a b'\n" in text and "    'a file.txt' \"$@\"\n" in text
    text = batch_script(request("--arguments.use_cpu", "true", nodes=1), BatchRequest())
    assert "gpus-per-node" not in "".join(options(text)) and "cpus-per-task=32" in options(text)
    assert "export NPROC=4\n" in text


def test_values_replace_each_other() -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --requeue\necho\n"
    assert set_sbatch_options(text, {}) == text
    changed = set_sbatch_options(text, {"nodes": 3, "requeue": False, "no-requeue": True, "account": None})
    assert changed == "#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --no-requeue\necho\n"


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:15", 5415),
        ("2-01", 176400),
        ("2-01:30", 178200),
        ("2-01:30:15", 178215),
        ("UNLIMITED", float("inf")),
    ],
)
def test_time_limits(time: str, seconds: float) -> None:
    assert parse_time_limit(time) == seconds


@pytest.mark.parametrize(
    ("requested", "batch", "message"),
    [
        (request("--arguments.tensor_parallel_size", "3"), {}, "8 ranks cannot be divided by tensor 3"),
        (request(ranks=0), {}, "set --nproc-per-node"),
        (request(launcher="pdsh"), {}, "no batch script for --launcher pdsh"),
        (request(), {"time": "tomorrow"}, "'tomorrow' is not a time limit"),
        (request(), {"time": "6"}, "--time 6 (360 s) leaves no time for training: the ranks are asked to stop 300 s"),
        (request(), {"signal_seconds": 0}, "--signal-before 0 must be from 1 to 65535"),
        (request("--arguments.save_strategy", "no"), {}, "starts over"),
        (
            request("--arguments.time_limit_margin", "4000"),
            {"time": "60"},
            "time_limit_margin is 4000 s (command line)",
        ),
    ],
)
def test_jobs_that_cannot_work_are_rejected(requested: LaunchRequest, batch: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        batch_script(requested, BatchRequest(**batch))  # type: ignore[arg-type]
    assert message in str(error.value)


def test_runs_that_do_not_save_are_allowed_without_requeue() -> None:
    requested = request("--arguments.save_strategy", "no")
    assert "no-requeue" in options(batch_script(requested, BatchRequest(requeue=False)))
    assert batch_script(
        request("--arguments.save_strategy", "no", "--arguments.enable_jit_checkpoint", "true"), BatchRequest()
    )


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        batch_script(request("--arguments.tensor_parallel_size", "3", launcher="pdsh"), BatchRequest(time="2"))
    assert len(error.value.problems) == 3


def test_the_launch_command_writes_a_valid_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["launch", "--slurm", "--nodes", "2", "--nproc-per-node", "2", "--max-restarts", "7", "--time", "1:00:00"]
    assert main([*argv, RECIPE, "--arguments.max_steps", "5", "--sbatch-arg=--qos=long", "--cpus-per-rank", "3"]) == 0
    text = capsys.readouterr().out
    assert {"time=1:00:00", "cpus-per-task=3", f"chdir={Path.cwd()}", "qos=long"} <= set(options(text))
    assert "export MAX_RESTARTS=7\n" in text
    if shutil.which("shellcheck"):
        path = tmp_path / "job.sbatch"
        path.write_text(text, encoding="utf-8")
        completed = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stdout
    assert main(["launch", "--time", "1:00:00", "--no-requeue", RECIPE]) == 2
    assert "--time, --no-requeue: only with --slurm" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["job_name", "partition", "account", "folder", "sbatch_args"])
@pytest.mark.parametrize("text", ["--a\ntouch x", "--a\rb", "--a\x1b[2J", "--a\u2028b"])
def test_a_directive_is_one_line(field: str, text: str) -> None:
    with pytest.raises(ConfigError, match="control characters or several lines") as caught:
        batch_script(request(), replace(BatchRequest(), **{field: (text,) if field == "sbatch_args" else text}))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["my run", 'a"b', "a#b", "a\\b", "a'b c"])
def test_a_value_with_spaces_is_quoted_as_sbatch_reads_it(text: str) -> None:
    (line,) = [one for one in options(batch_script(request(), BatchRequest(job_name=text))) if "job-name" in one]
    assert line == 'job-name="' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_values_and_arguments_reach_the_job_as_they_are() -> None:
    odd = "a\n'b'\t\x1b\\ $(touch x) `y`"
    text = batch_script(replace(request("--data.train", odd, path="x.py"), environment={"WHERE": odd}), BatchRequest())
    assert "\x1b" not in text and "touch x) `y`'\n" in text
    (line,) = [one for one in text.splitlines() if one.startswith("export WHERE=")]
    shell = shutil.which("bash")
    assert shell is not None
    said = subprocess.run(
        [shell, "-c", f'{line}\nprintf %s "$WHERE"'], capture_output=True, check=True, text=True
    ).stdout
    assert said == odd


def test_secrets_are_not_in_a_batch_script() -> None:
    text = batch_script(replace(request(), environment={"WANDB_API_KEY": "s3cr3t-value"}), BatchRequest())
    assert "s3cr3t-value" not in text and 'export WANDB_API_KEY="${WANDB_API_KEY:?' in text
    with pytest.raises(ConfigError, match="would be written into the script") as caught:
        batch_script(request("--token", "s3cr3t-value", path="x.py"), BatchRequest())
    assert "s3cr3t-value" not in str(caught.value)
