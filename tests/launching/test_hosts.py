"""Machines from hostfiles and from SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from ds_trainer.launching.hosts import Host, expand_node_list, hostfile_text, read_hostfile, slurm_hosts
from ds_trainer.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b-c", ["a", "b-c"]),
        ("gpu[007-009,12],login", ["gpu007", "gpu008", "gpu009", "gpu12", "login"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[03-04]-ib,x", ["r1n03-ib", "r1n04-ib", "r2n03-ib", "r2n04-ib", "x"]),
    ],
)
def test_node_lists_of_slurm(text: str, names: list[str]) -> None:
    assert expand_node_list(text) == names


@pytest.mark.parametrize("text", ["", "a[1-2", "a[2-1]", "a[x]"])
def test_malformed_node_lists(text: str) -> None:
    with pytest.raises(ConfigError, match="The node list"):
        expand_node_list(text)


def test_a_hostfile_is_read_and_written_as_deepspeed_does(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=4\n\n  node2\tslots=2 # half\n")
    hosts = read_hostfile(str(path))
    assert hosts == [Host("node1", 4), Host("node2", 2)]
    (tmp_path / "again").write_text(hostfile_text(hosts))
    assert dict(fetch_hostfile(tmp_path / "again")) == {"node1": 4, "node2": 2}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a slots=2\na slots=2\n", ":2: a is listed twice"),
        ("a.b slots=2\nA.b slots=2\n", ":2: A.b is listed twice"),
        pytest.param(
            "".join(f"a{number} slots=1\n" for number in range(100_001)), "more than 100,000 machines", id="many"
        ),
        ("a cores=3\n", "1: 'a cores=3' is not of the form"),
        ("a\n", "--nproc-per-node is not given"),
        ("a slots=0\n", "slots=0"),
        ("# none\n", "no machine"),
    ],
)
def test_a_hostfile_that_cannot_work(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_hostfile(str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1"}, [8, 8]),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, [4, 4]),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:4(S:0-1)"}, [4, 4]),
        ({"SLURM_NTASKS_PER_NODE": "3"}, [3, 3]),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, [2, 2]),
        ({"SLURM_TASKS_PER_NODE": "3,1"}, [3, 1]),
        ({}, [1, 1]),
    ],
)
def test_ranks_of_an_allocation(variables: dict[str, str], slots: list[int]) -> None:
    environment = {"SLURM_JOB_NODELIST": "n[1-2]", **variables}
    assert [host.slots for host in slurm_hosts(environment)] == slots
    assert slurm_hosts(environment, 5) == [Host("n1", 5), Host("n2", 5)]


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("node1:2", [Host("node1", 2)]),
        ("me@10.0.0.1 slots=3 max_slots=8", [Host("me@10.0.0.1", 3)]),
        ("fe80::1 slots=2", [Host("fe80::1", 2)]),
        ("node-1.example.org. slots=1", [Host("node-1.example.org.", 1)]),
    ],
)
def test_forms_of_a_line(tmp_path: Path, line: str, hosts: list[Host]) -> None:
    path = tmp_path / "hosts"
    path.write_text(line)
    assert read_hostfile(str(path)) == hosts


@pytest.mark.parametrize(
    "name",
    ["^/etc/passwd", "a;touch", "a,b", "a\x1b[2J", "node\u0663", "$(id)", "-oProxyCommand", "a/b", "[::", "a" * 400],
)
def test_a_name_that_a_shell_would_run_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{name} slots=2")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(str(path))
    assert "is not a host name" in str(caught.value) and "\x1b" not in str(caught.value)
    with pytest.raises(ConfigError):
        expand_node_list(f"a1,{name}" if "," not in name else f"{name};")


@pytest.mark.parametrize(
    "text", ["a[1-999999999999]", "a[1-9999]b[1-9999]", "a" + "[1]" * 5000, "a[" + "9" * 5000 + "]"]
)
def test_a_node_list_does_not_explode(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        expand_node_list(text)
    assert len(str(caught.value)) < 1000
