"""The files for many machines name commands and settings that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from trainer.config import UpdateConfig
from trainer.launch import command

INFRA = Path(__file__).parents[2] / "infra"
FILES = [INFRA / "multinode" / "hostfile", INFRA / "multinode" / "node", INFRA / "k8s" / "trainer.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_setting_named_in_a_file_for_many_machines_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"trainer\.([a-z_]+)", text)) | set(re.findall(r"^#\s+([a-z_]+) = ", text, flags=re.MULTILINE))
    assert named
    assert named <= set(UpdateConfig.model_fields)


def test_the_kubernetes_job_runs_a_command_that_exists_on_a_shared_home() -> None:
    job, service = yaml.safe_load_all((INFRA / "k8s" / "trainer.yaml").read_text(encoding="utf-8"))
    container = job["spec"]["template"]["spec"]["containers"][0]
    words = container["command"]
    assert words[:3] == [".venv/bin/tidegate", "trainer", "join"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert words[words.index("--home") + 1] == mounts["home"]
    assert {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]} == set(mounts)
    assert service["spec"]["ports"][0]["port"] == 29400


def test_the_node_script_is_valid_shell_and_says_how_it_is_used() -> None:
    done = subprocess.run([str(INFRA / "multinode" / "node")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("usage:")) == (2, True)


def test_one_node_needs_no_meeting_place_and_several_do() -> None:
    folder = Path("jobs/update-1")
    alone = command(folder, UpdateConfig(world_size=3))
    assert alone[1:] == [
        "-m",
        "torch.distributed.run",
        "--log-dir=jobs/update-1/agents",
        "--nnodes=1",
        "--nproc-per-node=3",
        "--standalone",
        "-m",
        "trainer.rank",
        str(folder),
    ]
    several = command(folder, UpdateConfig(nodes=4, rendezvous="head:29400"))
    assert {"--nnodes=4", "--rdzv-endpoint=head:29400", "--rdzv-id=update-1", "--rdzv-backend=c10d"} <= set(several)
    by_ssh = command(folder, UpdateConfig(launcher="deepspeed", hostfile="hosts", world_size=8))
    assert by_ssh == [
        sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hosts", "--num_gpus", "8", "--no_local_rank", "--module",
        "trainer.rank", str(folder),
    ]  # fmt: skip
    with pytest.raises(ValidationError, match="rendezvous"):
        UpdateConfig(nodes=2)
    with pytest.raises(ValidationError, match="hostfile"):
        UpdateConfig(launcher="deepspeed")
