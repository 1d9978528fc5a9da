"""Reading a candidate's files without torch, and signatures."""

import json
import subprocess
import sys

import numpy as np
import pytest

from deploy.release import artifact, gates, signing
from deploy.release.config import GateConfig
from deploy.release.evidence import Evidence
from deploy.release.verdicts import Verdict
from pipelines.errors import CheckpointInvalid
from pipelines.storage import Home
from tests.support.release import base_weights, make_checkpoint, write_safetensors


def verdicts(home: Home, serving: str, candidate: str) -> dict[str, Verdict]:
    facts = artifact.inspect(home, serving=serving, candidate=candidate)
    found = Evidence(serving=serving, candidate=candidate, anchor=serving, artifact=facts)
    return {c.name.removeprefix("artifact."): c.verdict for c in gates.decide(found, GateConfig(), names=gates.ARTIFACT_CHECKS).checks}


def test_a_good_candidate_is_read_whole_and_its_move_is_measured(release_home, pair):
    serving, candidate = pair
    facts = artifact.inspect(release_home, serving=serving, candidate=candidate)
    assert facts.relative_norm == pytest.approx(0.01 / 10, rel=1e-4)  # moved by .01; the norm is sqrt(9 + 16 + 75)
    assert set(verdicts(release_home, serving, candidate).values()) == {Verdict.PASS}


def test_bf16_numbers_are_read_as_the_upper_half_of_f32(tmp_path):
    values = np.array([1.0, -2.5, 3.140625, np.inf], dtype=np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"w": values}, bf16=("w",))
    (tensor,) = artifact.tensors(tmp_path).values()
    assert (tensor.dtype, tensor.shape) == ("BF16", (4,))
    assert np.concatenate(list(artifact.numbers(tensor))).tolist() == [1.0, -2.5, 3.140625, np.inf]


def test_a_tensor_larger_than_a_chunk_is_read_whole(tmp_path):
    values = np.arange(11, dtype=np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"w": values})
    (tensor,) = artifact.tensors(tmp_path).values()
    parts = list(artifact.numbers(tensor, chunk=4))
    assert [len(part) for part in parts] == [4, 4, 3]
    assert np.concatenate(parts).tolist() == values.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_none_is_found_and_named(release_home, pair, bad):
    weights = base_weights()
    weights["b.weight"][1, 0] = bad
    candidate = make_checkpoint(release_home, weights, parent=pair[0])
    facts = artifact.inspect(release_home, serving=pair[0], candidate=candidate)
    assert facts.non_finite == ("b.weight",)
    assert verdicts(release_home, pair[0], candidate)["finite"] is Verdict.FAIL


def test_a_copy_of_the_parent_and_a_leap_from_it_are_refused(release_home, pair):
    copy = make_checkpoint(release_home, base_weights(), parent=pair[0])
    leap = make_checkpoint(release_home, {name: values * 1.1 for name, values in base_weights().items()}, parent=pair[0])
    assert verdicts(release_home, pair[0], copy)["norm"] is Verdict.FAIL
    assert verdicts(release_home, pair[0], leap)["norm"] is Verdict.FAIL


def test_another_shape_name_or_number_of_tensors_is_refused(release_home, pair):
    changed = base_weights() | {"a.weight": np.zeros(3, dtype=np.float32), "c.weight": np.zeros(1, dtype=np.float32)}
    del changed["b.weight"]
    candidate = make_checkpoint(release_home, changed, parent=pair[0])
    facts = artifact.inspect(release_home, serving=pair[0], candidate=candidate)
    assert facts.tensor_differences == ("a.weight F32[2] became F32[3]", "b.weight is missing", "c.weight is new")
    assert verdicts(release_home, pair[0], candidate)["tensors"] is Verdict.FAIL


def test_an_altered_byte_is_found(release_home, pair):
    path = release_home.store / pair[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert verdicts(release_home, *pair)["bytes"] is Verdict.FAIL


def test_a_folder_renamed_to_another_id_is_found(release_home, pair):
    other = "f" * 64
    (release_home.store / pair[1]).rename(release_home.store / other)
    signing.sign(release_home, other)
    facts = artifact.inspect(release_home, serving=pair[0], candidate=other)
    assert facts.bytes_error.startswith(f"the folder {other[:12]} holds checkpoint")


def test_an_unsigned_and_a_foreign_signature_are_refused(release_home, pair, tmp_path):
    unsigned = make_checkpoint(
        release_home, base_weights() | {"a.weight": np.array([3.0, 4.01], dtype=np.float32)}, parent=pair[0], sign="no"
    )
    with pytest.raises(CheckpointInvalid, match="not signed"):
        signing.check_signature(release_home, unsigned)
    foreign = signing.sign(Home(tmp_path / "elsewhere"), unsigned)
    signing.signature_path(release_home, unsigned).write_bytes(foreign.read_bytes())
    with pytest.raises(CheckpointInvalid, match="not by this deployment"):
        signing.check_signature(release_home, unsigned)
    assert verdicts(release_home, pair[0], unsigned)["bytes"] is Verdict.FAIL


def test_the_signing_key_is_readable_by_its_owner_only(release_home, pair):
    assert (release_home.keys / "signing.ed25519").stat().st_mode & 0o777 == 0o600


def test_a_candidate_of_another_parent_tokenizer_or_template_is_refused(release_home, pair):
    moved = base_weights() | {"a.weight": np.array([3.01, 4.0], dtype=np.float32)}
    for change in ({"parent": pair[1]}, {"parent": None}, {"tokenizer": '{"v": 2}'}, {"template": "other"}):
        candidate = make_checkpoint(release_home, moved, **({"parent": pair[0]} | change))
        assert verdicts(release_home, pair[0], candidate)["lineage"] is Verdict.FAIL


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 8, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"\x04\x00\x00\x00\x00\x00\x00\x00nope"]
)
def test_a_file_that_is_no_safetensors_file_gives_a_sentence(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointInvalid):
        artifact.tensors(tmp_path)


def test_a_tensor_that_reaches_past_the_file_is_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x00" * 8)
    with pytest.raises(CheckpointInvalid, match="past the end"):
        artifact.tensors(tmp_path)


def test_the_gate_never_loads_torch():
    script = "import sys, deploy.release.gates, deploy.release.artifact, deploy.release.ship; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "False"
